"""What the dashboard and the alerts ask for is what the server has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import openai
from servers import RunningServer

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
NAME = re.compile(r"quire:[a-z0-9_]+")
LABEL = re.compile(r"by \(([a-z_, ]+)\)")


def _queries(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel.get("targets", ())]


def test_every_metric_that_is_asked_for_exists(
    server: RunningServer, client: openai.OpenAI
) -> None:
    for stream in (False, True):
        messages: Any = [{"role": "user", "content": "Tell me a story."}]
        answer = client.chat.completions.create(
            model="quire-storyteller", messages=messages, max_tokens=3, stream=stream
        )
        if stream:
            list(answer)
    httpx.get(f"{server.url}/metrics")
    lines = [
        line
        for line in httpx.get(f"{server.url}/metrics").text.splitlines()
        if not line.startswith("#")
    ]
    known: dict[str, set[str]] = {}
    for line in lines:
        name, _, rest = line.partition("{")
        known.setdefault(name.split(" ")[0], set()).update(re.findall(r"(\w+)=\"", rest))
    declared = set(
        re.findall(r"^# HELP (\S+)", httpx.get(f"{server.url}/metrics").text, re.MULTILINE)
    )
    dashboard = json.loads((DEPLOY / "grafana" / "quire.json").read_text())
    queries = [query for panel in dashboard["panels"] for query in _queries(panel)]
    assert len(queries) > 25
    alerts = (DEPLOY / "prometheus" / "alerts.yml").read_text()
    for query in (*queries, *re.findall(r"expr: (.*)", alerts)):
        for name in NAME.findall(query):
            assert name in known or name in declared, f"{name} of {query!r} does not exist"
        for labels in LABEL.findall(query):
            for label in labels.split(","):
                names = [name for name in NAME.findall(query) if name in known]
                assert all(label.strip() in known[name] for name in names), (label, query)


def test_panels_do_not_overlap() -> None:
    panels = json.loads((DEPLOY / "grafana" / "quire.json").read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (place["x"] + dx, place["y"] + dy)
            for dx in range(place["w"])
            for dy in range(place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)

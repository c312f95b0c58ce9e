"""The live engine over HTTP: followed by a cursor, texts for admins only."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from fake_client import FakeClient
from servers import RunningServer, serve, serve_model

from quire.engine.loop.inspection import (
    Base,
    BlockContent,
    EnteredRow,
    Inspection,
    RequestSnapshot,
    RowState,
    StepRecord,
)
from quire.server.quota.tenants import Tenant, key_ring

KEYS = key_ring(
    [(Tenant("boss", is_admin=True), ["sk-admin-key"]), (Tenant("other"), ["sk-other-key"])]
)
SECRET = "secret-name"


def _inspection() -> Inspection:
    entered = EnteredRow(0, SECRET, SECRET, 3, 3, 0, 0, 0.0, (1,))
    return Inspection(
        engine="e",
        now_s=1.0,
        num_blocks=8,
        block_size=16,
        num_groups=1,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        last_step=2,
        base=Base(1, (RowState(1, SECRET, 3, 3, (2,)),), (3,)),
        steps=(
            StepRecord(
                2,
                0.5,
                0.1,
                0.0,
                3,
                entered=(entered,),
                num_waiting=1,
                waits_for=f"preempted {SECRET}: {SECRET} needs",
            ),
        ),
        gone_rows=(),
        requests=(
            RequestSnapshot(
                SECRET, -1, SECRET, 3, 0, 4, 0, 1, 0.5, f"preempted {SECRET}: nothing else"
            ),
        ),
        num_running=1,
        num_waiting=1,
        num_preemptions=1,
        num_copies=0,
        num_merges=0,
        num_evictions=0,
        waste=0.0,
    )


def _get(server: RunningServer, path: str, key: str | None = None) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.get(server.url + path, headers=headers, timeout=60)


def test_steps_are_followed_and_blocks_hold_what_was_said(
    server: RunningServer, client: openai.OpenAI
) -> None:
    before = _get(server, "/inspect/steps").json()["inspection"]
    story = "Tell me a story about a hippopotamus."
    answer = client.chat.completions.create(
        model="quire-storyteller", messages=[{"role": "user", "content": story}], max_tokens=20
    )
    path = f"/inspect/steps?engine={before['engine']}&since={before['last_step']}"
    after = _get(server, path).json()["inspection"]
    assert after["base"] is None and after["last_step"] >= before["last_step"] + 20
    entered = [entry for step in after["steps"] for entry in step["entered"]]
    assert [entry["num_prompt_tokens"] for entry in entered] == [
        answer.usage.prompt_tokens if answer.usage else 0
    ]
    texts = ""
    last = after["steps"][-1]["step"]
    for block in (
        *entered[0]["blocks"],
        *(b for step in after["steps"] for _, blocks in step["appended"] for b in blocks),
    ):
        content = _get(server, f"/inspect/blocks/{block}?step={last}").json()
        assert content["owners"] == [entered[0]["name"]]
        texts += "".join(content["texts"])
    assert story in texts and (answer.choices[0].message.content or "")[:20] in texts


@pytest.mark.parametrize(
    "path",
    [
        "steps?since=x",
        "steps?since=1e3",
        "blocks/x",
        "blocks/1?step=--1",
        "steps?engine=" + "e" * 65,
    ],
)
def test_what_is_asked_wrongly_is_refused(server: RunningServer, path: str) -> None:
    assert _get(server, f"/inspect/{path}").status_code == 400


def test_unknown_blocks_and_steps_are_not_there(server: RunningServer) -> None:
    for path in ("blocks/99999999?step=1", "blocks/-1?step=1", "blocks/0?step=99999999"):
        assert _get(server, f"/inspect/{path}").status_code == 404


def test_only_admins_see_names_and_texts() -> None:
    client = FakeClient(
        inspection=_inspection(), content=BlockContent(1, 2, (5, 6), (SECRET,), 0, True)
    )
    with serve(client, keys=KEYS) as server:
        assert (
            _get(server, "/inspect/steps").status_code
            == _get(server, "/inspect/blocks/1").status_code
            == 401
        )
        seen = _get(server, "/inspect/steps", "sk-admin-key").json()
        assert seen["is_admin"] and seen["inspection"]["steps"][0]["entered"][0]["name"] == SECRET
        assert _get(server, "/inspect/blocks/1", "sk-admin-key").json()["token_ids"] == [5, 6]
        hidden = _get(server, "/inspect/steps", "sk-other-key")
        assert SECRET not in hidden.text and not hidden.json()["is_admin"]
        assert _get(server, "/inspect/blocks/1", "sk-other-key").status_code == 403
        body: dict[str, Any] = hidden.json()["inspection"]
        names = {
            body["base"]["rows"][0]["name"],
            body["steps"][0]["entered"][0]["name"],
            body["requests"][0]["name"],
        }
        assert len(names) == 1 and names != {""}  # one request is one name, whatever it is
        assert body["steps"][0]["waits_for"].startswith("preempted")


def test_an_engine_that_cannot_be_asked_is_told_of() -> None:
    with serve(FakeClient(state="loading")) as server:
        answer = _get(server, "/inspect/steps").json()
        assert (answer["state"], answer["inspection"]) == ("loading", None)


def test_without_keys_everything_is_shown() -> None:
    with serve(FakeClient(inspection=_inspection())) as server:
        assert _get(server, "/inspect/steps").json()["inspection"]["requests"][0]["name"] == SECRET


def test_served_models_have_a_pool() -> None:
    with serve_model(kv_cache_memory="8MiB") as server:
        inspection = _get(server, "/inspect/steps").json()["inspection"]
        assert (
            inspection["num_blocks"] * inspection["block_size"] == server.client.model.num_kv_slots
        )

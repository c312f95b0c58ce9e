"""Figures come out right against a server whose delays are known;
failures are counted as what they were."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from fake_server import FakeServer, Plan, Seen, fake_server
from timing import timed

from quire.bench import record as records
from quire.bench.serving.arrivals import Arrivals
from quire.bench.serving.dataset import Dataset, ServeRequest
from quire.bench.serving.exchange import RequestTimeline
from quire.bench.serving.load import LoadOptions
from quire.bench.serving.report import render_html
from quire.bench.serving.results import meets, parse_objectives
from quire.bench.serving.runner import ServeOptions, measure_server, render
from quire.errors import ConfigError, EngineError

FAST = {"num_warmups": 0, "timeout_s": 60.0}


def dataset(count: int, num_output: int = 5) -> Dataset:
    return Dataset(
        "made up", {}, [ServeRequest(f"{number}", num_output) for number in range(count)]
    )


def measured(server: FakeServer, asked: Dataset, **options: Any) -> dict[str, Any]:
    record = asyncio.run(measure_server(ServeOptions(url=server.url, **{**FAST, **options}), asked))
    assert records.problems(record) == []
    return record


@timed
def test_latencies_are_those_of_the_server() -> None:
    """Ten requests one after the other: the first tokens of nine after 40 ms, of one after a
    second; gaps of 20 ms.

    Nothing comes before it is sent; how much later it may come is a matter of the machine.
    """

    def plan(seen: Seen) -> Plan:
        return Plan(first_s=1.0 if seen.body["prompt"] == "3" else 0.04, gap_s=0.02)

    with fake_server(plan) as server:
        objectives = {"ttft": 900.0, "tpot": 900.0}
        record = measured(
            server, dataset(10), load=LoadOptions(max_concurrency=1), objectives_ms=objectives
        )
        assert server.num_connections == 1  # kept open
    result = record["result"]
    assert (result["num_ok"], result["num_output_tokens"], result["num_prompt_tokens"]) == (
        10,
        50,
        110,
    )
    assert (
        0.04
        <= result["ttft_s"]["p50"]
        <= result["ttft_s"]["p90"]
        < 0.9
        < result["ttft_s"]["p99"]
        < 4
    )
    assert 0.019 <= result["tpot_s"]["p50"] < 0.4 and 0.019 <= result["itl_s"]["p50"] < 0.4
    assert 0.12 <= result["e2e_s"]["p50"] < 2.4 and result["wall_s"] >= 9 * 0.12 + 1.08
    assert result["goodput_share"] == 0.9 and result["peak_concurrency"] == 1
    assert result["output_tokens_per_s"] == pytest.approx(50 / result["wall_s"])
    assert sum(record["series"]["output_tokens_per_s"]) * record["series"][
        "interval_s"
    ] == pytest.approx(50, abs=0.1)
    assert record["server"] == {
        "url": server.url, "model": "fake", "endpoint": "completions", "max_model_len": 99,
        "version": "7",
    }  # fmt: skip


@timed
def test_requests_are_sent_when_they_are_due_however_slow_the_server_is() -> None:
    with fake_server(lambda seen: Plan(first_s=2.0)) as server:
        record = measured(server, dataset(10, 1), arrivals=Arrivals(40.0, burstiness=math.inf))
    requests, result = record["requests"], record["result"]
    assert requests["due_s"] == pytest.approx([number / 40 for number in range(10)])
    assert result["send_delay_s"]["p50"] < 1.0 and result["peak_concurrency"] == 10
    assert result["wall_s"] < 15  # not ten times two seconds


@timed
def test_a_limit_of_concurrency_and_of_time() -> None:
    with fake_server(lambda seen: Plan(first_s=0.1)) as server:
        record = measured(
            server, dataset(200, 1), load=LoadOptions(max_concurrency=4, duration_s=1.0)
        )
    count = record["result"]["num_requests"]
    assert record["result"]["peak_concurrency"] == 4 and 4 < count <= 44


def test_a_trace_is_replayed_at_its_own_pace_or_faster() -> None:
    asked = Dataset("trace", {}, dataset(3, 1).requests, [7.0, 8.0, 9.0])
    with fake_server() as server:
        record = measured(server, asked, speed_up=10.0)
    assert record["requests"]["due_s"] == pytest.approx([0.0, 0.1, 0.2])
    assert (
        record["configuration"]["speed_up"] == 10.0
        and record["configuration"]["request_rate"] is None
    )


PLANS = {
    "0": Plan(),
    "1": Plan(status=429, headers={"retry-after": "1"}),
    "2": Plan(status=429),
    "3": Plan(is_cut=True),
    "4": Plan(error="out of luck", pieces=["a"]),
    "5": Plan(has_done=False),
    "6": Plan(first_s=600.0),
    "7": Plan(pieces=["", ""], has_usage=False),
}


@timed
def test_every_way_to_fail_is_counted_as_what_it_was() -> None:
    with fake_server(lambda seen: PLANS[seen.body["prompt"]]) as server:
        record = measured(server, dataset(8), timeout_s=2.0)
    result = record["result"]
    assert result["statuses"] == {
        "429": 2,
        "broken": 1,
        "ok": 2,
        "stream_error": 1,
        "timeout": 1,
        "truncated": 1,
    }
    assert "out of luck" in result["errors"]["stream_error"]
    assert result["refusal_s"]["p50"] < 2.0
    text, page = "\n".join(render(record)), render_html(record)
    assert "2 of 8 requests answered" in text and "429: 2" in text and "out of luck" in text
    assert (
        page.count("<svg") == 6
        and "http://www" not in page
        and "<script" not in page
        and "src=" not in page
    )


def test_bodies_and_keys_go_where_they_belong() -> None:
    with fake_server(lambda seen: Plan(pieces=["a", "b"])) as server:
        extra: dict[str, Any] = {"top_p": 0.5, "ignore_eos": None}
        headers = {"authorization": "Bearer k"}
        record = measured(
            server, dataset(1), is_chat=True, model="own", body=extra, headers=headers
        )
        [seen] = server.posts
    assert record["result"]["num_output_tokens"] == 2
    assert seen.path == "/v1/chat/completions" and seen.headers["authorization"] == "Bearer k"
    assert seen.body == {
        "model": "own", "messages": [{"role": "user", "content": "0"}], "max_tokens": 5,
        "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True}, "top_p": 0.5,
    }  # fmt: skip


def test_a_first_request_that_fails_ends_it_all() -> None:
    with (
        fake_server(lambda seen: Plan(status=400)) as server,
        pytest.raises(EngineError, match=r"failed \(400\).*no"),
    ):
        measured(server, dataset(100), num_warmups=1)


def test_objectives() -> None:
    assert parse_objectives(["ttft:500", "e2el:9"]) == {"ttft": 500.0, "e2e": 9.0}
    for bad in ("ttft", "ttft:0", "ttft:x", "speed:1", ":5"):
        with pytest.raises(ConfigError, match="is no objective"):
            parse_objectives([bad])
    seen = RequestTimeline(
        0.0, sent_s=1.0, end_s=2.0, token_s=[1.2, 1.3, 1.9], status="ok", num_output=3
    )
    for objective, is_met in {
        "ttft:201": True,
        "ttft:199": False,
        "itl:601": True,
        "itl:599": False,
        "tpot:351": True,
        "tpot:349": False,
        "e2e:1001": True,
        "e2e:999": False,
    }.items():
        assert meets(seen, parse_objectives([objective])) is is_met, objective


def test_a_report_escapes_what_a_server_says() -> None:
    with fake_server(lambda seen: Plan(error="<b>bold</b>", pieces=["a"])) as server:
        record = measured(server, dataset(1), model="<i>m</i>", num_warmups=0)
    page = render_html(record)
    assert "<b>bold" not in page and "<i>m" not in page and "&lt;i&gt;m" in page

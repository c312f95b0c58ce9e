"""The load harnesses: their arithmetic on made-up runs, and short runs of the real thing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_server import Plan, fake_server
from served import is_alive
from timing import timed

from benchmarks import overload, serving_compare, soak, streams, survival
from benchmarks.servers import (
    Launch,
    Server,
    descendants,
    histogram_percentile,
    launch_of,
    metric,
    num_fds,
    rss_bytes,
    running,
)
from quire.bench.serving.exchange import RequestTimeline
from quire.bench.serving.load import LoadRun
from quire.errors import ConfigError

pytestmark = pytest.mark.slow

TEXT = """\
# HELP a:lag_seconds x
a:lag_seconds_bucket{le="0.01",model_name="m"} 50.0
a:lag_seconds_bucket{le="0.02",model_name="m"} 90.0
a:lag_seconds_bucket{le="+Inf",model_name="m"} 100.0
a:lag_seconds_count{model_name="m"} 100.0
a:tasks{model_name="m"} 7.0
a:refused_total{reason="x"} 2.0
a:refused_total{reason="y"} 3.5
"""


def test_metrics_are_read_as_prometheus_writes_them() -> None:
    assert histogram_percentile(TEXT, "a:lag_seconds", 0.5) == pytest.approx(0.01)
    assert histogram_percentile(TEXT, "a:lag_seconds", 0.7) == pytest.approx(0.015)
    assert histogram_percentile(TEXT, "a:lag_seconds", 0.99) == float("inf")
    assert (
        metric(TEXT, "a:tasks") == 7
        and metric(TEXT, "a:refused_total") == 5.5
        and metric(TEXT, "a:none") == 0
    )


def test_only_what_a_run_added_to_a_histogram_counts() -> None:
    before = TEXT.replace("a:lag", "quire:event_loop_lag")
    after = before.replace(" 90.0", " 95.0").replace(" 100.0", " 105.0")
    assert histogram_percentile(
        streams._difference(before, after), streams.LAG, 0.99
    ) == pytest.approx(0.0199)


def args_of(*options: str) -> Any:
    return overload.parse(options)


def test_goodput_counts_answered_tokens_within_the_window() -> None:
    def exchange(sent_s: float, token_s: list[float], status: str) -> RequestTimeline:
        return RequestTimeline(sent_s, sent_s, 99.0, token_s, status, num_output=2 * len(token_s))

    run = LoadRun(
        [
            exchange(0, [1, 3, 4], "ok"),
            exchange(2, [5, 6, 12], "ok"),
            exchange(9, [7, 8], "broken"),
        ],
        20,
        0,
        [],
    )
    assert overload.goodput(run, args_of("--settle-seconds", "2")) == pytest.approx(2 * 4 / 7)


def test_an_overload_is_held_against_the_peaks_around_it() -> None:
    def phases(*rates: float) -> list[overload.Phase]:
        return [
            overload.Phase(rate, LoadRun([], 1.0, 0, []), {"http": rate / 1000}, {"steps": rate})
            for rate in rates
        ]

    seen = overload.compare(phases(100, 200, 300), phases(100, 100, 300), phases(90, 190))
    assert seen["goodput_share"] == pytest.approx(280 / (100 + 200)) and seen["cores"][
        "overload"
    ] == {"http": 0.14}
    assert seen["goodput_share_of_plain_peak"] == pytest.approx(280 / (150 + 250))
    assert seen["recovered_share"] == pytest.approx(500 / 300)
    assert seen["goodput_shares"] == pytest.approx([0.9, 0.95]) and seen[
        "goodput_share_error"
    ] == pytest.approx(0.025)
    assert overload.compare(phases(1, 1), phases(1, 1), phases(1))["goodput_share_error"] is None


GOOD: dict[str, Any] = {
    "goodput_share": 0.97, "recovered_share": 1.0, "refusal_s": {"p99": 0.02},
    "statuses": {"ok": 3, "429": 9}, "rss_bytes": [100, 200, 300], "peak_requests_per_s": 10.0,
    "e2e_s": {"p99": 5.0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, None),
        ({"goodput_share": 0.9}, "goodput is 90.0%"),
        ({"refusal_s": {"p99": 0.06}}, "refusals take 60 ms"),
        ({"refusal_s": None}, "nothing was refused"),
        ({"statuses": {"ok": 1, "500": 1}}, "otherwise than answered or refused"),
        ({"rss_bytes": [0, 1 << 30]}, "memory grew by 1024 MiB"),
        ({"rss_bytes": [0, 8 << 20, 16 << 20]}, "memory grew by 16 MiB"),
        ({"e2e_s": {"p99": 50.0}}, "accepted requests took 50.0 s"),
        ({"recovered_share": 0.5}, "afterwards"),
    ],
)
def test_broken_promises_of_an_overload_are_named(
    change: dict[str, Any], complaint: str | None
) -> None:
    broken = overload.broken_promises({**GOOD, **change}, 64, 64)
    assert len(broken) == (complaint is not None)
    assert complaint is None or complaint in broken[0]


def samples(rate: float) -> list[soak.Sample]:
    noise = [0, 5 << 20, 0, 0, 1 << 20] * 20
    return [soak.Sample(t, int(rate * t) + noise[t], 100, 10, 3) for t in range(100)]


def test_a_slope_is_seen_through_noise() -> None:
    assert abs(soak.slope(samples(0), "api_bytes")) < 10 << 20
    assert soak.slope(samples(50_000), "api_bytes") == pytest.approx(3600 * 50_000, rel=0.15)
    assert soak.slope(samples(1)[:1], "api_bytes") == 0


def figures() -> dict[str, Any]:
    sample = {
        "at_s": 0,
        "api_bytes": 50 << 20,
        "engine_bytes": 200 << 20,
        "num_fds": 10,
        "num_threads": 3,
    }
    return {
        "api_bytes_per_hour": 0.0, "engine_bytes_per_hour": 0.0, "before": sample, "last": sample,
        "after": dict(sample), "tasks": {"before": 5.0, "after": 5.0}, "kv_usage": 0.0,
        "num_in_flight": 0.0, "outcomes": {"200": 9, "left": 1}, "num_engine_restarts": 0.0,
        "minutes": 60.0,
    }  # fmt: skip


def test_what_a_soak_leaves_behind_is_named() -> None:
    assert soak.broken_promises(figures()) == []
    leaks: dict[str, Any] = {
        "grows by 100 MiB": {"api_bytes_per_hour": 100.0 * (1 << 20)},
        "num_fds is 12": {"after": {**figures()["after"], "num_fds": 12}},
        "6 tasks are left": {"tasks": {"before": 5.0, "after": 6.0}},
        "25.0% of the blocks": {"kv_usage": 0.25},
        "otherwise than they may": {"outcomes": {"stream_error": 1}},
    }
    assert (
        soak.broken_promises({**figures(), "api_bytes_per_hour": 100.0 * (1 << 20), "minutes": 3.0})
        == []
    )
    for complaint, change in leaks.items():
        [broken] = soak.broken_promises({**figures(), **change})
        assert complaint in broken


def test_a_server_that_fails_says_why() -> None:
    class Broken(Launch):
        def command(self, port: int) -> list[str]:
            return [sys.executable, "-c", "import sys; sys.exit('no luck')"]

    with pytest.raises(RuntimeError, match="no luck"), running(Broken("quire", "m")):
        pass


def test_processes_are_watched() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert descendants(process.pid) == [process.pid] and num_fds(process.pid) >= 3
        assert process.pid in descendants(os.getpid()) and rss_bytes(os.getpid()) > 1 << 20
        process.kill()


def test_a_harness_that_is_terminated_leaves_no_server_behind() -> None:
    """As `timeout` does; a server is in a session of its own."""
    program = """
import time
from benchmarks.servers import Launch, running
with running(Launch("quire", "quire-storyteller", ["--kv-cache-memory", "8MiB"])) as server:
    print(server.pid, flush=True)
    time.sleep(600)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True
    ) as harness:
        assert harness.stdout is not None
        pid = int(harness.stdout.readline())
        assert is_alive(pid)
        harness.terminate()
        assert harness.wait(60) == 128 + signal.SIGTERM
    assert not is_alive(pid)


@timed
def test_overload_in_short() -> None:
    options = [
        "--seconds",
        "1.5",
        "--warm-seconds",
        "0.5",
        "--peak-seconds",
        "1",
        "--seats",
        "8",
        "--queue",
        "12",
        "--input-len",
        "8",
        "--settle-seconds",
        "0.5",
    ]
    args = args_of(*options, "--output-len", "16", "--threads", "1", "--factor", "6")
    own = ["--max-num-seqs", "8", "--max-queued-requests", "12", "--kv-cache-memory", "16MiB"]
    with running(launch_of(args, *own)) as server:
        seen = asyncio.run(overload.measure(server, args))
    assert set(seen["statuses"]) == {"ok", "429"}, "all of them answered, some of them refused"
    assert (
        seen["refusal_s"]["p50"] > 0 and seen["goodput_share"] > 0 and seen["recovered_share"] > 0
    )


def test_the_soak_in_short(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--minutes", "0.05", "--clients", "8", "--threads", "1"]
    soak.main(options)  # too short to judge a slope
    out = capsys.readouterr().out
    assert (
        "blocks in use 0.0%" in out
        and "otherwise" not in out
        and "left;" not in out
        and "num_" not in out
    )


def test_streams_are_measured_with_their_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        fake_server(lambda seen: Plan()) as fake,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as process,
    ):
        server = Server(fake.url, process, 0.0)
        monkeypatch.setattr(
            Server, "metrics", lambda self: TEXT.replace("a:lag", "quire:event_loop_lag")
        )
        options = [
            "--streams",
            "4",
            "--rounds",
            "2",
            "--input-len",
            "4",
            "--output-len",
            "3",
            "--chat",
            "--engine",
            "vllm",
        ]
        seen = asyncio.run(streams.measure(server, streams.parse(options)))
        process.kill()
    assert seen["result"]["num_output_tokens"] == 24 and seen["api_cpu_us_per_token"] >= 0
    assert "24 tokens" in streams.render(seen)[0] and "at most 4" in streams.render(seen)[0]


def test_a_comparison_is_rendered_by_medians(tmp_path: Path) -> None:
    args = serving_compare.parse(["--model", "M", "--vllm", "py", "--forms", "bfloat16,int8"])
    assert list(serving_compare.launches(args)) == ["quire:bfloat16", "quire:int8", "vllm:bfloat16"]
    latency = {"p50": 0.5, "p99": 1.0}
    runs = [
        {"server": "a", "output_tokens_per_s": rate, "ttft_s": latency, "itl_s": latency}
        for rate in (1.0, 9.0, 5.0)
    ]
    [row] = serving_compare.render({"servers": {"a": {"ready_s": 2.0}}, "measurements": runs})[2:]
    assert row == "| a | 5.0 (1.0 to 9.0) | 0.50 / 1.00 | 500 / 1000 | 2.0 |"
    assert json.dumps(args.forms)


def test_the_table_of_kills_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    page = tmp_path / "survival.md"
    page.write_text(f"a\n{survival.BEGIN}\nold\n{survival.END}\nb\n")
    seen = survival.Seen([1], "x", [1.0, 4.0])
    lines = survival.table([survival.Kill(2.0, 3.5), survival.Kill(9.0, 9.5)], [seen], 1)
    survival.write_table(page, lines)
    survival.write_table(page, lines)
    text = page.read_text()
    assert (
        text.startswith(f"a\n{survival.BEGIN}\n1 rounds")
        and text.endswith(f"{survival.END}\nb\n")
        and "old" not in text
    )
    assert "| 1 | 1.50 | 1 | 3.00 | 3.00 |\n| 2 | 0.50 | 0 | - | - |\n" in text
    page.write_text("nothing")
    with pytest.raises(ConfigError, match="no place"):
        survival.write_table(page, lines)

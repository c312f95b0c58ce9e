"""`quire bench serve` as a command: against the real server, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fake_server import Plan, fake_server
from servers import serve_model

from quire.bench import record
from quire.cli.bench.serve import without_key
from quire.cli.main import main


@pytest.mark.slow
def test_a_real_server_is_measured_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, page = tmp_path / "r.json", tmp_path / "r.html"
    with serve_model() as server:
        common = [
            "bench",
            "serve",
            "--url",
            server.v1,
            "--num-requests",
            "4",
            "--input-len",
            "8:12",
            "--output-len",
            "6",
        ]
        assert (
            main(
                [
                    *common,
                    "--json",
                    str(kept),
                    "--html",
                    str(page),
                    "--goodput",
                    "ttft:60000",
                    "tpot:60000",
                ]
            )
            == 0
        )
        assert (
            main(
                [
                    *common,
                    "--endpoint",
                    "chat",
                    "--request-rate",
                    "50",
                    "--burstiness",
                    "inf",
                    "--json",
                    "-",
                ]
            )
            == 0
        )
    made = json.loads(kept.read_text())
    assert record.problems(made) == [] and made["kind"] == "serve"
    assert made["result"]["num_output_tokens"] == 24 and made["result"]["goodput_share"] == 1.0
    assert made["server"]["model"] == "quire-storyteller" and made["server"]["version"]
    assert "<svg" in page.read_text()
    out = capsys.readouterr().out
    assert (
        "4 of 4 requests answered" in out
        and json.loads(out[out.index("{") :])["server"]["endpoint"] == "chat"
    )


def test_failures_are_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    plans = iter([Plan(), Plan(), Plan(status=503)])
    with fake_server(lambda seen: next(plans)) as server:
        command = [
            "bench",
            "serve",
            "--url",
            server.url,
            "--num-requests",
            "2",
            "--api-key",
            "secret",
        ]
        assert main(command) == 1
        assert server.posts[0].headers["authorization"] == "Bearer secret"
    assert "503: 1" in capsys.readouterr().out


def test_keys_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert without_key(["a", "--api-key", "k", "--api-key=k", "--x"]) == [
        "a",
        "--api-key",
        "...",
        "--api-key=...",
        "--x",
    ]
    assert "k" not in without_key(["--api-key", "k"])
    assert sys.argv


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ([], "--url"),
        (["--url", "ftp://x"], "not a URL"),
        (["--url", "http://127.0.0.1:1"], "cannot connect to 127.0.0.1:1"),
        (["--url", "x", "--num-requests", "0"], "--num-requests must be at least 1"),
        (["--url", "x", "--goodput", "speed:1"], "is no objective"),
        (["--url", "x", "--extra-body", "[]"], "must be a JSON object"),
        (["--url", "x", "--extra-body", '{"a": 1, "a": 2}'], "comes twice"),
        (["--url", "x", "--extra-body", "{"], "not valid JSON"),
        (["--url", "x", "--end-rate", "2"], "--end-rate needs --request-rate"),
        (["--url", "x", "--request-rate", "-2"], "must be above 0"),
        (["--url", "x", "--trace", "a", "--prompts-file", "b"], "either --trace or --prompts-file"),
        (["--url", "x", "--trace", "/nowhere/t.csv"], "no trace file"),
    ],
)
def test_bad_options_are_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], part: str
) -> None:
    assert main(["bench", "serve", *options]) == 2
    err = capsys.readouterr().err
    assert part in err and "Traceback" not in err

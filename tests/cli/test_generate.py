"""`quire generate` in process: texts, JSON lines, prompts from everywhere, failures."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from quire.cli.main import main

START = "Once upon a time"
GREEDY = (
    "--temperature",
    "0",
    "--max-tokens",
    "12",
    "--num-threads",
    "1",
    "--kv-cache-memory",
    "4MiB",
)
CONTINUATION = ", there was a little girl named"


def test_text_and_summary(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    assert main(["generate", tiny, "-p", START, *GREEDY]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(CONTINUATION) and captured.out.endswith("\n")
    assert "1 request: 5 prompt + 12 output tokens in" in captured.err
    assert "output tokens/s" in captured.err and "first token after" in captured.err
    assert (
        "blocks at the peak" in captured.err
        and "prefix hits" in captured.err
        and "0 preemptions" in captured.err
    )
    assert "\033" not in captured.err  # no terminal, no bar


def test_several_prompts_come_in_order(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    assert (
        main(["generate", tiny, "-p", START, "-p", "Lily was", "--n", "2", "--quiet", *GREEDY]) == 0
    )
    captured = capsys.readouterr()
    headings = [line for line in captured.out.splitlines() if line.startswith("[")]
    assert headings == [
        f"[1/2] {START}",
        f"[1/2 #1] {START}",
        "[2/2] Lily was",
        "[2/2 #1] Lily was",
    ]
    assert captured.err == ""


def test_json_lines(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    assert (
        main(
            [
                "generate",
                tiny,
                "-p",
                START,
                "-p",
                "Lily",
                "--json",
                "--logprobs",
                "2",
                "--quiet",
                *GREEDY,
            ]
        )
        == 0
    )
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["index"], second["index"], second["prompt"]) == (0, 1, "Lily")
    output = first["outputs"][0]
    assert output["text"].startswith(CONTINUATION) and output["finish_reason"] == "length"
    assert len(output["token_ids"]) == len(output["logprobs"]) == 12
    best = output["logprobs"][0][0]
    assert best["rank"] == 1 and best["token_id"] == output["token_ids"][0] and best["logprob"] <= 0
    assert output["cumulative_logprob"] == pytest.approx(
        sum(each[0]["logprob"] for each in output["logprobs"])
    )
    assert 0 < first["first_token_s"] <= first["total_s"]


def test_output_file_and_prompt_files(
    capsys: pytest.CaptureFixture[str], tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.jsonl").write_text(
        '"Once"\n\n{"prompt": "Lily"}\n{"prompt_token_ids": [1, 403]}\n'
    )
    out = tmp_path / "out.jsonl"
    argv = ["generate", tiny, "--json", "--output", str(out), "--quiet", *GREEDY]
    assert main([*argv, "--prompts-file", str(tmp_path / "prompts.jsonl")]) == 0
    assert [json.loads(line)["prompt"] for line in out.read_text().splitlines()] == [
        "Once",
        "Lily",
        "2 token ids",
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("Tom\nSue\n"))
    assert main([*argv, "-p", "Ann", "--prompts-file", "-"]) == 0
    assert [json.loads(line)["prompt"] for line in out.read_text().splitlines()] == [
        "Ann",
        "Tom",
        "Sue",
    ]
    assert capsys.readouterr().out == ""


def test_chat_goes_through_the_template(
    capsys: pytest.CaptureFixture[str], tiny: str, chat_template: str
) -> None:
    argv = ["generate", tiny, "--json", "--quiet", *GREEDY]
    assert (
        main([*argv, "-p", START, "--chat", "--chat-template", chat_template, "--system", "Hello."])
        == 0
    )
    assert main([*argv, "-p", f"Hello. {START} "]) == 0
    chatted, plain = map(json.loads, capsys.readouterr().out.splitlines())
    assert chatted["prompt"] == START
    # templates write their own BOS
    assert chatted["num_prompt_tokens"] == plain["num_prompt_tokens"] - 1


@pytest.mark.parametrize(
    ("line", "part"),
    [("{", "is not valid JSON"), ("17", "must be a text"), ('{"text": "x"}', "must be a text")],
)
def test_bad_prompt_files_are_refused_by_line(
    capsys: pytest.CaptureFixture[str], tiny: str, tmp_path: Path, line: str, part: str
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f'"fine"\n{line}\n')
    assert main(["generate", tiny, "--prompts-file", str(path)]) == 2
    err = capsys.readouterr().err
    assert f"{path}:2" in err and part in err


def test_a_failed_request_is_reported_and_gives_exit_code_1(
    capsys: pytest.CaptureFixture[str], tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.core.plan import WorkResult
    from quire.worker.worker import Worker

    monkeypatch.setattr(
        Worker,
        "_launch",
        lambda self, work: lambda: [WorkResult(error="broken") for _ in work],
    )
    assert main(["generate", tiny, "-p", START, *GREEDY]) == 1
    captured = capsys.readouterr()
    assert "[failed: broken]" in captured.out and "failed: 1 of 1 request" in captured.err

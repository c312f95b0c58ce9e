"""Turns of conversations as traces have them, and what an engine that starts anew finds of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tiers
from benchmarks.conversations import Turn, conversations
from benchmarks.models import QWEN3_0_6B

SHAPE = {"divide": 2, "max_len": 200, "min_turns": 3, "vocab_size": 500}


@pytest.fixture
def hashed(tmp_path: Path) -> Path:
    """Three conversations behind one system prompt, in turns; one too short, one too long."""
    lines: list[dict[str, Any]] = []
    for turn in range(4):
        for chat in range(5):
            num_blocks = 3 + 2 * turn if chat < 4 else 100
            hashes = [0, *(1000 * (chat + 1) + place for place in range(num_blocks))]
            if chat != 3 or turn == 0:
                lines.append(
                    {"arrival_s": float(len(lines)), "prompt_tokens": 16 * len(hashes) - 5,
                     "output_tokens": 4, "block_hashes": hashes}
                )  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def known(turns: list[Turn], number: int) -> int:
    """Tokens of a prompt that an earlier history begins with."""
    prompt, found = turns[number].prompt, 0
    for earlier in turns[:number]:
        pairs = zip(prompt, earlier.history, strict=False)
        same = next((n for n, (one, two) in enumerate(pairs) if one != two), len(earlier.history))
        found = max(found, min(same, len(prompt)))
    return found


def test_hashes_say_which_turn_continues_which(hashed: Path) -> None:
    turns = conversations(hashed, 12, **SHAPE)
    assert [turn.is_continuing for turn in turns] == [False] * 3 + [True] * 9
    assert [len(turn.prompt) for turn in turns] == [30] * 3 + [46] * 3 + [62] * 3 + [78] * 3
    for number, turn in enumerate(turns):
        assert turn.history == turn.prompt and max(turn.prompt) < 500
        assert abs(known(turns, number) - turn.num_known) <= 8, "half a block of the trace"


@pytest.mark.parametrize(("num_asked", "num_found"), [(12, 12), (11, 8), (4, 4), (3, 3)])
def test_conversations_are_taken_whole(hashed: Path, num_asked: int, num_found: int) -> None:
    """Cut ones would have too many first turns; only a single one may be cut."""
    assert len(conversations(hashed, num_asked, **SHAPE)) == num_found


def test_lengths_say_it_where_there_are_no_hashes(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    rows = ["20,30", "60,10", "90,20", "30,20", "50,40", "100,20", "10,2", "1000,3"]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *("," + r for r in rows)]))
    turns = conversations(path, 6, **SHAPE)
    assert [(len(turn.prompt), len(turn.history)) for turn in turns] == [
        (10, 25), (15, 25), (30, 35), (25, 45), (45, 55), (50, 60),
    ]  # fmt: skip
    for number, turn in enumerate(turns):
        assert known(turns, number) == turn.num_known
        assert turn.history[: len(turn.prompt)] == turn.prompt


def test_an_engine_that_starts_anew_finds_what_one_finds_that_goes_on(
    hashed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a model that is large enough for restoring to pay; its weights are not read."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_0_6B))
    figures = tmp_path / "figures.json"
    options = ["--divide", "1", "--min-turns", "3", "--turns", "12", "--after", "5"]
    code = tiers.main(
        ["restart", "--simulate", "--model", str(tmp_path), "--trace", str(hashed),
         "--vocab-size", "500", "--threads", "1", "--json", str(figures), *options]
    )  # fmt: skip
    assert code == 0 and "started anew" in capsys.readouterr().out
    before, going_on, anew = json.loads(figures.read_text())["num_hit_tokens"]
    assert len(before) == 7 and len(going_on) == 5 and sum(anew) > 0
    assert anew == going_on

"""The bench of tiers: hits grow with the disk up to what an unlimited cache finds, at the time that
reading takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.bench.tiers import ideal_share, prompts_of
from quire.cli.main import main
from quire.config.limits import SchedulerLimits
from quire.core.step_cost import NUM_COSTS, UnitCosts
from quire.sim.tier_replay import TierModel, TierReplay
from quire.sim.traces import read_trace

NUM_CHATS, NUM_TURNS = 6, 3


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Conversations whose turns take turns: each continues what came six requests ago."""
    lines: list[dict[str, Any]] = []
    for turn in range(NUM_TURNS):
        for chat in range(NUM_CHATS):
            hashes = [1000 * chat + place for place in range(4 * (turn + 1))]
            lines.append(
                {"arrival_s": float(len(lines)), "prompt_tokens": 16 * len(hashes),
                 "output_tokens": 4, "block_hashes": hashes}
            )  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def replay(trace: Path, folder: Path | None, num_places: int) -> tuple[float, float]:
    """(share of prompt tokens that are found, seconds to the first tokens together)."""
    limits = SchedulerLimits(num_blocks=16, block_size=16, max_model_len=256, max_num_seqs=2)
    run = TierReplay(
        TierModel(limits, UnitCosts(*(1e-3,) * NUM_COSTS), 1000), folder, 1000 * num_places
    )
    prompts = prompts_of(read_trace(trace), 100, 200, 5000)
    served = [run.serve(str(number), prompt, 2) for number, prompt in enumerate(prompts)]
    run.close()
    num_tokens = sum(each.num_prompt_tokens for each in served)
    share = sum(each.num_hit_tokens for each in served) / num_tokens
    return share, sum(each.first_token_s for each in served)


def test_hits_grow_with_the_disk_up_to_what_there_is_to_find(trace: Path, tmp_path: Path) -> None:
    none, none_s = replay(trace, None, 0)
    folders = [tmp_path / name for name in ("small", "large")]
    small, _ = replay(trace, folders[0], 24)
    large, large_s = replay(trace, folders[1], 1000)
    ideal = ideal_share(prompts_of(read_trace(trace), 100, 200, 5000), 16)
    assert none <= small <= large == pytest.approx(ideal) and large > 0.4 > none
    assert large_s < 0.7 * none_s


def test_prompts_share_what_the_traces_hashes_share(trace: Path) -> None:
    prompts = prompts_of(read_trace(trace), 100, 10_000, 500)
    first, again, other = prompts[0], prompts[NUM_CHATS], prompts[1]
    assert again[: len(first)] == first and first[:16] != other[:16]
    assert all(3 <= token < 500 for prompt in prompts for token in prompt)


@pytest.mark.slow
def test_the_command_measures_a_model(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--kv-cache-memory", "4MiB", "--sizes", "0,64MiB", "--limit", "8"]
    assert main(["bench", "tiers", "quire-storyteller", "--trace", str(trace), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["none", "64"]
    assert all(line.count("%") == 2 and line.count("ms") == 2 for line in lines[1:3])
    assert "unlimited size finds" in lines[3]
    assert main(["bench", "tiers", "quire-storyteller", "--trace", str(trace), "--sizes", "x"]) == 2

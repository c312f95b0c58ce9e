"""`quire simulate`."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from quire.cli import simulate
from quire.errors import ConfigError
from quire.sim.simulation import Simulation, SimulationError


def _run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    simulate.add_arguments(parser)
    return simulate.run(parser.parse_args(words))


def test_several_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--seeds", "3", "--seed", "7", "--liveness") == 0
    assert "3 of 3 seeds passed" in capsys.readouterr().out


def test_one_seed_says_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--seed", "4") == 0
    out = capsys.readouterr().out
    assert "finished:" in out and "state after the last step" in out and "1 of 1" in out


def test_a_failure_is_reported_with_its_seed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Simulation) -> None:
        raise SimulationError(f"seed={self.scenario.seed} step=3: it broke")

    monkeypatch.setattr(Simulation, "run", fail)
    assert _run("--seeds", "2") == 1
    out = capsys.readouterr().out
    assert "seed=1 step=3: it broke" in out and "0 of 2 seeds passed" in out


@pytest.mark.parametrize("num_blocks", ["unbounded", "20"])
def test_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str], num_blocks: str) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,30,9\n0.1,50,4\n0.2,8,1\n")
    assert _run("--trace", str(trace), "--limit", "2", "--num-blocks", num_blocks) == 0
    assert "2 of 2 complete" in capsys.readouterr().out


def test_a_bad_number_of_blocks_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,30,9\n")
    with pytest.raises(ConfigError, match="--num-blocks='many'"):
        _run("--trace", str(trace), "--num-blocks", "many")


def test_a_fleet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, costs = tmp_path / "t.csv", tmp_path / "costs.json"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,30,9\n0.1,50,4\n0.2,8,1\n")
    costs.write_text('{"estimate": [1, 1, 1, 1, 1, 1], "ratios": [1, 2, 0.5, 1, 1, 1]}')
    words = ("--trace", str(trace), "--fleet", "2", "--policy", "round-robin")
    assert _run(*words) == 0
    quick = capsys.readouterr().out
    assert "3 of 3 complete; by replica 2, 1" in quick and "median" in quick
    assert _run(*words, "--step-costs", str(costs)) == 0
    assert capsys.readouterr().out != quick


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--fleet", "2"), "--trace FILE"),
        (("--fleet", "0", "--trace", "x"), "--fleet=0"),
        (("--fleet", "2", "--trace", "x", "--speed", "0"), "--speed=0"),
        (("--fleet", "2", "--trace", "x", "--token-us", "0"), "--token-us=0"),
        (("--trace", "x", "--step-ms", "nan"), "--step-ms=nan"),
        (("--trace", "x", "--step-ms", "-1"), "--step-ms=-1"),
        (("--trace", "x", "--block-size", "0"), "--block-size=0"),
        (("--trace", "x", "--limit", "0"), "--limit=0"),
        (("--trace", "x", "--block-size", "999999999999"), "at most 4096"),
        (("--trace", "x", "--fleet", "1000000000"), "at most 1024"),
        (("--trace", "x", "--overlap"), "--overlap is for scenarios"),
        (("--trace", "x", "--policy", "session"), "--policy is for several"),
        (("--num-blocks", "20"), "--num-blocks replays a trace"),
        (("--fleet", "2", "--trace", "x", "--step-costs", "y", "--step-ms", "3"),
         "--step-ms and --step-costs"),
    ],
)  # fmt: skip
def test_what_cannot_be_or_would_change_nothing_is_refused(
    words: tuple[str, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        _run(*words)


_COSTS = '"estimate": [1, 1, 1, 1, 1, 1], "ratios": [1, 1, 1, 1, 1, 1]'


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "[]", '{"estimate": [0, 0, 0, 0, 0, 0], "ratios": [1]}',
        f'{{{_COSTS}, "curve": [[8, 1.0], [8, 1.1]]}}', f'{{{_COSTS}, "curve": [[8, 0.0]]}}',
        f'{{{_COSTS}, "curve": [8]}}',
    ],
)  # fmt: skip
def test_step_costs_that_are_none(tmp_path: Path, text: str) -> None:
    trace, costs = tmp_path / "t.csv", tmp_path / "costs.json"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,30,9\n")
    costs.write_text(text)
    with pytest.raises(ConfigError, match="step costs"):
        _run("--trace", str(trace), "--fleet", "1", "--step-costs", str(costs))


@pytest.mark.parametrize("words", [["--seeds", "0"], ["--seeds", "-1"], ["--seed", "-3"]])
def test_no_seeds_at_all_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"{words[0]}={words[1]} must be at least"):
        _run(*words)


@pytest.mark.parametrize("count", ["many", "-1", "1.5", "99999999", "9" * 5000])
def test_blocks_that_no_pool_could_have_are_refused(count: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival_s":0,"prompt_tokens":9,"output_tokens":1}')
    with pytest.raises(ConfigError, match='neither "unbounded" nor a number of at most 7 digits'):
        _run("--trace", str(trace), f"--num-blocks={count}")

"""Ranks as processes: the answers of one process, whatever is done to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ranks import LATENT, OLMOE, answers, engine_of, needs_ranks, ranks_of, write_model

from quire.errors import ConfigError
from quire.executor.ranks import MAX_LOSSES
from quire.kernels.cpu.program import NativeProgram
from quire.parallel.processes import LocalPlaces, RankProcess

pytestmark = needs_ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("OlmoeForCausalLM", OLMOE, {"dtype": "float32", "kv_cache_memory": "64KiB"}),
        ("DeepseekV3ForCausalLM", LATENT, {"quantization": "int4"}),
    ],
    ids=str,
)
def test_ranks_with_experts_of_their_own_are_replaced_and_give_the_bits_of_one_process(
    tmp_path: Path, name: str, sizes: dict[str, int], options: dict[str, Any]
) -> None:
    folder = write_model(tmp_path, name, **sizes)
    with engine_of(folder, **options) as engine:
        expected = answers(engine)
    sizes_of_group = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with engine_of(folder, **sizes_of_group, **options) as engine:
        group, num_steps = ranks_of(engine).group, 0

        def strike() -> None:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 5:
                os.kill(group.pids[0], signal.SIGKILL)

        assert answers(engine, strike) == expected
        assert num_steps > 5


@pytest.mark.slow
@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_a_process_that_is_lost_is_replaced_and_every_request_goes_on(
    tmp_path: Path, size: str
) -> None:
    """First one is killed, and then another frozen; and at the end none is left behind."""
    folder = write_model(tmp_path, "LlamaForCausalLM", num_hidden_layers=3)
    with engine_of(folder) as engine:
        expected = answers(engine)
    options: dict[str, Any] = {size: 3, "distributed_timeout_seconds": 1.0}
    if size == "pipeline_parallel_size":  # a second step is in flight, which is lost, too
        options["overlap"] = "on"
    strikes = {3: (0, signal.SIGKILL), 9: (1, signal.SIGSTOP)}
    with engine_of(folder, **options) as engine:
        group, num_steps = ranks_of(engine).group, 0
        lost: list[int] = []

        def strike() -> None:
            nonlocal num_steps
            num_steps += 1
            if num_steps in strikes:
                place, number = strikes[num_steps]
                lost.extend(group.pids)
                os.kill(group.pids[place], number)

        assert answers(engine, strike) == expected
        last = group.pids
        assert len(set(lost)) == 4 and not set(last) & set(lost)
        assert not any(map(_lives, lost)) and len(last) == 2 and all(map(_lives, last))
    assert not any(map(_lives, last))


@pytest.mark.slow
def test_a_process_that_dies_in_the_middle_of_a_step_is_noticed(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "LlamaForCausalLM", num_hidden_layers=4)
    with engine_of(folder) as engine:
        expected = answers(engine)
    with engine_of(folder, pipeline_parallel_size=2, tensor_parallel_size=2) as engine:
        group = ranks_of(engine).group
        for turn, delay in enumerate((0.01, 0.03, 0.05)):  # of either stage
            threading.Timer(delay, os.kill, (group.pids[turn], signal.SIGKILL)).start()
            assert answers(engine) == expected
            time.sleep(0.1)


@pytest.mark.slow
def test_one_that_dies_while_it_replaces_another_costs_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, "LlamaForCausalLM")
    with engine_of(folder) as engine:
        expected = answers(engine)
    with engine_of(folder, tensor_parallel_size=2) as engine:
        group, start, doomed = ranks_of(engine).group, LocalPlaces.start, list[int]()

        def start_doomed(*args: Any) -> RankProcess:
            process = start(*args)
            if len(doomed) < MAX_LOSSES - 1:
                doomed.append(process.pid)
                os.kill(process.pid, signal.SIGKILL)
            return process

        monkeypatch.setattr(LocalPlaces, "start", start_doomed)
        os.kill(group.pids[0], signal.SIGKILL)
        assert answers(engine) == expected
        assert len(doomed) == MAX_LOSSES - 1


UNCLOSED = """
import gc, os, sys, time
from pathlib import Path
from ranks import build, ranks_of
folder, stages = Path(sys.argv[1]), {"pipeline_parallel_size": 2}
dropped = build(folder, **stages)
kept = build(folder, tensor_parallel_size=2, **stages)
pids = ranks_of(dropped).group.pids
del dropped
gc.collect()
deadline = time.monotonic() + 60
while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
    time.sleep(0.1)
assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
print(*ranks_of(kept).group.pids)
"""


@pytest.mark.slow
def test_an_engine_that_nobody_closes_leaves_no_process_and_no_word(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "LlamaForCausalLM")
    paths = [Path(__file__).parent.parent / "support", *map(Path, sys.path)]
    done = subprocess.run(
        [sys.executable, "-c", UNCLOSED, str(folder)],
        capture_output=True, text=True, timeout=250,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == ""
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 3 and not any(map(_lives, pids))


@pytest.mark.slow
@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ctrl_c_in_the_middle_of_a_step_leaves_no_part_of_it_to_the_next_one(
    tmp_path: Path, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, "LlamaForCausalLM")
    options = {"max_num_batched_tokens": 96, "distributed_timeout_seconds": 5.0}
    with engine_of(folder, **options) as engine:
        expected = answers(engine)
    with engine_of(folder, **options, **{size: 2}) as engine:
        run, num_calls = NativeProgram.__call__, 0

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 2:  # of stages, in the second piece
                raise KeyboardInterrupt
            return run(*args, **kwargs)

        monkeypatch.setattr(NativeProgram, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answers(engine)
        assert ranks_of(engine).group.is_lost  # else the others may wait, as this one will
        assert answers(engine) == expected


@pytest.mark.slow
@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_each_process_keeps_its_packed_weights(tmp_path: Path, size: str) -> None:
    folder, cache = write_model(tmp_path, "OlmoeForCausalLM", **OLMOE), tmp_path / "cache"
    options = {"quantization": "int4", "weights_cache": str(cache)}
    with engine_of(folder, **options) as engine:
        expected = answers(engine)
    kept: list[dict[str, int]] = []
    for _ in range(2):
        with engine_of(folder, **options, **{size: 2}) as engine:
            assert answers(engine) == expected
        kept.append({each.name: each.stat().st_mtime_ns for each in cache.glob("*.packed.*")})
    assert len(kept[0]) == 3 and kept[0] == kept[1]
    for path in cache.glob("*.packed.*"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with engine_of(folder, **options, **{size: 2}) as engine:
        assert answers(engine) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 65}, "at most 64"),
        ({"tensor_parallel_size": 2, "kernels": "reference"}, "kernels='reference' is not avail"),
        (
            {"tensor_parallel_size": 2, "weights_cache": "/x", "expert_memory": "1MiB"},
            "expert_memory='1MiB' is not available",
        ),
        (
            {"tensor_parallel_size": 2, "distributed_executor_backend": "uni"},
            "distributed_executor_backend='uni' is one process",
        ),
        ({"distributed_timeout_seconds": 0}, "distributed_timeout_seconds=0 must be"),
        ({"distributed_timeout_seconds": 0.2}, "must be seconds from 1 to 3600"),
        ({"pipeline_parallel_size": 3}, "LlamaForCausalLM has 2 layers to divide"),
        ({"pipeline_parallel_size": 9, "tensor_parallel_size": 8}, "are too many processes"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size=0 must be"),
        (
            {"pipeline_parallel_size": 2, "distributed_executor_backend": "uni"},
            "pipeline_parallel_size=2 needs more",
        ),
        ({"distributed_executor_backend": "ray"}, "tensor_parallel_size=1 is one process"),
        ({"ray_placement_group": "x"}, "ray_placement_group='x' needs distributed_executor_ba"),
        ({"enable_expert_parallel": True}, "tensor_parallel_size=1 is one"),
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            "LlamaForCausalLM has no experts",
        ),
    ],
)
def test_what_ranks_cannot_do_is_said_before_anything_starts(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    folder = write_model(tmp_path, "LlamaForCausalLM")
    with pytest.raises(ConfigError, match=message), engine_of(folder, **options):
        pass


def test_without_memory_to_share_sockets_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    folder = write_model(tmp_path, "LlamaForCausalLM")
    with (
        pytest.raises(ConfigError, match="give distributed_executor_backend='sockets'"),
        engine_of(folder, tensor_parallel_size=2),
    ):
        pass


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "quire.parallel.ray_places", raising=False)
    folder = write_model(tmp_path, "LlamaForCausalLM")
    given = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    message = r"distributed_executor_backend='ray' needs the package ray.*quire-llm\[ray\]"
    with pytest.raises(ConfigError, match=message), engine_of(folder, **given):
        pass


def test_experts_that_cannot_be_divided_evenly_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "OlmoeForCausalLM", **OLMOE)
    message = r"4 experts cannot be divided among tensor_parallel_size=3 .*\(2, 4\)"
    options = {"tensor_parallel_size": 3, "enable_expert_parallel": True}
    with pytest.raises(ConfigError, match=message), engine_of(folder, **options):
        pass


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

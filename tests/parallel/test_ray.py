"""Ranks on the nodes of a Ray cluster: a real one, whose nodes are processes of this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from certificates import write_certificates
from ranks import OLMOE, answers, engine_of, needs_ranks, ranks_of, write_model
from ray_clusters import ray_cluster

from quire import LLM, SamplingParams, TokensPrompt
from quire.errors import CapacityError, ConfigError

pytestmark = [
    needs_ranks, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("default"),
]  # fmt: skip
RAY = {"distributed_executor_backend": "ray", "distributed_timeout_seconds": 1.0}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster(num_nodes=3) as found:
        yield found


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("LlamaForCausalLM", {}, {"tensor_parallel_size": 2, "dtype": "bfloat16"}),
        (
            "OlmoeForCausalLM", OLMOE,
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "enable_expert_parallel": True,
             "quantization": "int8"},
        ),
    ],
    ids=["TP 2", "PP 2 of EP 2"],
)  # fmt: skip
def test_ranks_on_nodes_of_ray_give_the_bits_of_one_process_and_of_local_ranks(
    cluster: Any, tmp_path: Path, name: str, sizes: dict[str, int], options: dict[str, Any]
) -> None:
    folder = write_model(tmp_path, name, **sizes)
    alone = {each: options[each] for each in options if "parallel" not in each}
    with engine_of(folder, **alone) as engine:
        expected = answers(engine)
    with engine_of(folder, **options) as engine:
        assert answers(engine) == expected
    with engine_of(folder, **options, **RAY) as engine:
        assert answers(engine) == expected
        pids = ranks_of(engine).group.pids
        assert all(_command(pid).count("quire.engine.ranks") for pid in pids)
    assert not any(map(_lives, pids))


def _kill_rank(pid: int, cluster: Any) -> None:
    os.kill(pid, signal.SIGKILL)


def _freeze_rank(pid: int, cluster: Any) -> None:
    os.kill(pid, signal.SIGSTOP)


def _kill_actor(pid: int, cluster: Any) -> None:
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert "RankActor" in _command(parent)
    os.kill(parent, signal.SIGKILL)


def _kill_node(pid: int, cluster: Any) -> None:
    """The raylet of the rank's node, and with it all of the node's workers."""
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    raylet = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
    [node] = [
        node
        for node in cluster.worker_nodes
        if raylet in [each.process.pid for each in node.all_processes["raylet"]]
    ]
    cluster.remove_node(node, allow_graceful=False)


def test_a_rank_of_ray_that_is_lost_is_replaced_and_every_request_goes_on(
    cluster: Any, tmp_path: Path
) -> None:
    folder = write_model(tmp_path, "LlamaForCausalLM")
    with engine_of(folder) as engine:
        expected = answers(engine)
    seen: list[int] = []
    with engine_of(folder, tensor_parallel_size=2, **RAY) as engine:
        group = ranks_of(engine).group
        for strike in (_kill_rank, _freeze_rank, _kill_actor, _kill_node):
            seen += group.pids
            assert answers(engine, _at_step_5(partial(strike, group.pids[0], cluster))) == expected
            deadline_s = time.monotonic() + 60.0
            while seen[-1] in group.pids and time.monotonic() < deadline_s:
                time.sleep(0.1)  # a rank ends some time after its actor or node
                assert answers(engine) == expected
            assert not set(seen) & set(group.pids), strike.__name__
        seen += group.pids
    deadline_s = time.monotonic() + 30.0  # those of the node end with its workers
    while any(map(_lives, seen)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not any(map(_lives, seen)), "a process was left behind"


def test_encrypted_ranks_on_ray_sleep_and_are_started_anew(cluster: Any, tmp_path: Path) -> None:
    folder = write_model(tmp_path, "LlamaForCausalLM")
    with engine_of(folder) as engine:
        expected = answers(engine)
    encrypted = {"distributed_ssl": write_certificates(tmp_path)}
    with engine_of(folder, tensor_parallel_size=2, **RAY, **encrypted) as engine:
        assert answers(engine) == expected
        group = ranks_of(engine).group
        for level in (1, 2):
            pids = group.pids
            assert len(pids) == 1
            engine.sleep(level)
            assert not group.pids and not any(map(_lives, pids)), level
            engine.wake_up()
            assert answers(engine) == expected, level
        # one that is lost after all that is replaced as any other
        pids = group.pids
        assert answers(engine, _at_step_5(partial(os.kill, pids[0], signal.SIGKILL))) == expected
        assert group.pids != pids


def test_ranks_run_in_the_placement_group_that_they_are_given(cluster: Any, tmp_path: Path) -> None:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    folder = write_model(tmp_path, "LlamaForCausalLM")
    options = {
        "load_format": "dummy", "skip_tokenizer_init": True, "kv_cache_memory": "4MiB",
        "num_threads": 1,
    }  # fmt: skip
    prompt = TokensPrompt(prompt_token_ids=[5, 6, 7, 8])
    params = SamplingParams(max_tokens=8, logprobs=2)
    with LLM(str(folder), **options) as llm:
        expected = llm.generate(prompt, params)[0].outputs[0]
    group = ray.util.placement_group([{"CPU": 1.0}] * 2, name="ranks")
    assert group.wait(60)
    sizes = {"tensor_parallel_size": 2, **RAY}
    # Of the driver's own choice: its name. The driver is outside, so that a bundle is left over.
    with LLM(str(folder), **options, **sizes, ray_placement_group="ranks") as llm:
        found = llm.generate(prompt, params)[0].outputs[0]
        assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
        with pytest.raises(CapacityError, match=r"2 bundles of 1 CPUs or more besides .* 3 ranks"):
            LLM(str(folder), **options, **sizes | {"tensor_parallel_size": 4},
                ray_placement_group="ranks")  # fmt: skip
    # The current one: the engine is in one of its bundles, its other rank in the other.
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=1)
    actor = (
        ray.remote(num_cpus=1)(LLM)
        .options(scheduling_strategy=strategy)
        .remote(str(folder), **options, **sizes)
    )
    [output] = ray.get(actor.generate.remote(prompt, params), timeout=120)
    found = output.outputs[0]
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
    ray.kill(actor)
    ray.util.remove_placement_group(group)


def test_what_ray_cannot_do_is_said(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.parallel import ray_places

    folder = write_model(tmp_path, "LlamaForCausalLM")
    given = {"tensor_parallel_size": 2, **RAY}
    with (
        pytest.raises(ConfigError, match="ray_placement_group='none' is not in this cluster"),
        engine_of(folder, **given, ray_placement_group="none"),
    ):
        pass
    monkeypatch.setattr(ray_places, "PLACING_TIMEOUT_S", 1.0)
    with (
        pytest.raises(CapacityError, match="no room for 1 ranks of 16 CPUs each"),
        engine_of(folder, **given, num_threads=16),
    ):
        pass


def test_the_script_of_the_guide_runs(cluster: Any) -> None:
    page = Path(__file__).parents[2] / "docs" / "howto" / "ray.md"
    code = re.findall(r"```py\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[0]
    for before, after in (
        ("/models/my-model", "quire-storyteller"), ("_size=4", "_size=2"), ("=16", "=1"),
    ):  # fmt: skip
        assert before in code
        code = code.replace(before, after)
    ended = subprocess.run(
        [sys.executable, "-c", code], timeout=240, capture_output=True, text=True, check=False,
        env={**os.environ, "RAY_ADDRESS": cluster.address},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert len(ended.stdout.split()) > 5


def test_without_a_cluster_there_is_an_error_and_no_new_one(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    folder = write_model(tmp_path, "LlamaForCausalLM")
    code = (
        "from quire import LLM\n"
        f"LLM({str(folder)!r}, load_format='dummy', skip_tokenizer_init=True, num_threads=1,\n"
        "    tensor_parallel_size=2, distributed_executor_backend='ray')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], timeout=240, capture_output=True, text=True, check=False,
        env={**os.environ, "RAY_ADDRESS": "127.0.0.1:1"},
    )  # fmt: skip
    assert ended.returncode != 0
    assert "needs a running Ray cluster: start one with `ray start --head`" in ended.stderr


def _at_step_5(strike: Callable[[], None]) -> Callable[[], None]:
    num_steps = 0

    def after_step() -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            strike()

    return after_step


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def _lives(pid: int) -> bool:
    """Whether there is such a process, and it has not ended: nobody may have waited for it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"

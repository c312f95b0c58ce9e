"""What a model has beside its layers, in several processes: drafts of models and of heads, images,
kept blocks, sleep and other weights, each with the bits of one process."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import run_all
from ranks import engine_of, needs_ranks, ranks_of
from safetensors.torch import load_file, save_file

from quire.core.params import SamplingParams
from quire.core.scheduler.tiers import RestoreCosts
from quire.engine.loop.engine import Engine
from quire.errors import NotAvailableError
from quire.tiers import companion
from tests.engine.test_tiers import stats_of

pytest.importorskip("transformers")
import draft_heads  # they need both
from guesses import draft_all, model_drafts
from vision_models import PLACEHOLDER, picture, write_qwen

pytestmark = [needs_ranks, pytest.mark.slow]

TP, PP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
PROMPTS = [[7 * place % 89 + 3 for place in range(length)] for length in (3, 41, 41)]
REAL: dict[str, Any] = {"load_format": "auto", "dtype": "float32", "block_size": 8}


def answers(
    engine: Engine, after_step: Callable[[], None] = lambda: None, images: Any = ()
) -> list[Any]:
    """Tokens and log-probabilities, to the bit."""
    prompts: list[Any] = [{"prompt_token_ids": each} for each in PROMPTS]
    for number, prompt in enumerate([*prompts, *images]):
        temperature = 0.8 if number % 2 else 0.0
        params = SamplingParams(
            temperature=temperature, seed=number, max_tokens=10, logprobs=1, ignore_eos=True
        )
        engine.add_request(str(number), prompt, params)
    outputs = run_all(engine, after_step)
    assert all(each.error is None for each in outputs.values())
    found = sorted(outputs.items())
    return [(name, each.outputs[0].token_ids, each.outputs[0].logprobs) for name, each in found]


def change(folder: Path, other: Path) -> None:
    """Write other weights of the same model."""
    shutil.copytree(folder, other)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: each * 1.25 for name, each in tensors.items()}, other / "model.safetensors",
        metadata={"format": "pt"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and a head for it that takes its embedding and its output projection."""
    at: Path = tmp_path_factory.mktemp("target")
    draft_heads.write_eagle(at / "target", at / "eagle", has_embedding=False)
    return at


@pytest.mark.parametrize(
    ("method", "folder", "division"), [("eagle", "eagle", TP), ("draft_model", "target", PP)]
)
def test_drafts_are_right_as_often_and_outlast_a_lost_rank(
    target: Path, method: str, folder: str, division: dict[str, Any]
) -> None:
    drafts = {"method": method, "num_speculative_tokens": 3, "model": str(target / folder)}
    options = {**REAL, "speculative_config": drafts}
    with engine_of(target / "target", **options) as engine:
        expected = answers(draft_all(engine))
        num_right = sum(engine.scheduler.stats.num_right_by_place)
    with engine_of(target / "target", **options, **division) as engine:
        assert answers(draft_all(engine)) == expected
        assert sum(engine.scheduler.stats.num_right_by_place) == num_right
        assert num_right > 0 or method == "eagle"  # a model that drafts for itself is right
        if division is PP:
            return  # one loss is enough: a process takes seconds to start
        group, num_steps = ranks_of(engine).group, 0
        num_drafted = model_drafts(engine).num_drafted

        def strike() -> None:
            nonlocal num_steps, num_drafted
            num_steps += 1
            if num_steps == 4:
                os.kill(group.pids[0], signal.SIGKILL)
                num_drafted = model_drafts(engine).num_drafted

        assert answers(engine, strike) == expected
        assert model_drafts(engine).num_drafted > num_drafted


def test_images_reach_all_ranks_and_stages(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    write_qwen(tmp_path, "Qwen3VL")  # rows behind the first layers as well, and rotations by place
    prompts = [
        {
            "prompt_token_ids": [1, 5, PLACEHOLDER + 1, PLACEHOLDER, PLACEHOLDER + 3, 9],
            "multi_modal_data": {"image": [pillow.fromarray(picture(number, 56, 84))]},
        }
        for number in range(2)
    ]
    options = {**REAL, "max_num_batched_tokens": 128}  # so that stages have pieces
    with engine_of(tmp_path, **options) as engine:
        expected = answers(engine, images=prompts)
    assert expected[3][1:] != expected[4][1:]
    for division in (TP, PP):
        with engine_of(tmp_path, **options, **division) as engine:
            assert answers(engine, images=prompts) == expected


def test_ranks_share_kept_blocks_sleep_and_take_other_weights(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RestoreCosts, "restore_s", lambda self, count: 0.0)
    monkeypatch.setattr(companion, "MAX_DELAY_S", 0.0)
    monkeypatch.setattr(companion, "PROMPT_PAUSE_S", 0.0)
    own, other = target / "target", target / "changed"
    change(own, other)
    options = {**REAL, "kv_cache_dir": str(tmp_path)}
    with engine_of(own, **options) as engine:
        expected = answers(engine)
        while engine.idle():
            pass
    with engine_of(other, **REAL) as engine:
        changed = answers(engine)
    assert changed != expected
    with engine_of(own, **options, **PP) as engine:
        assert answers(engine) == expected
        assert stats_of(engine).num_restored_blocks > 0, "stored by one process, found by none"
        group = ranks_of(engine).group
        with pytest.raises(NotAvailableError, match="give a folder that all of them can read"):
            engine.load_weights({})
        engine.replace_weights(engine.load_weights(str(other)), "2")
        assert answers(engine) == changed
        pids = group.pids
        engine.sleep(2)
        assert not group.pids and not any(os.path.exists(f"/proc/{pid}") for pid in pids)
        engine.wake_up()  # what is loaded again is what was loaded last
        assert answers(engine) == changed

"""Draft heads as published: what they draft is what their definitions say, and answers stay the
same."""

from __future__ import annotations

import importlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from engines import run_all
from guesses import draft_all, model_drafts
from safetensors.torch import load_file, save_file

from quire.config.engine import EngineConfig
from quire.core.params import SamplingParams
from quire.engine.assembly.builder import build_engine
from quire.engine.assembly.loading import check_files
from quire.engine.assembly.preparation import plan_engine
from quire.engine.loop.engine import Engine
from quire.errors import CheckpointError, ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    import draft_heads

_MOST = 4
_RNG = random.Random(3)
_PROMPTS = [[_RNG.randrange(3, 96) for _ in range(length)] for length in (1, 2, 15, 16, 17, 40)]


def _heads() -> Any:
    """Their definitions, which take seconds to import: only where they are used."""
    return importlib.import_module("draft_heads")


_HEADS: dict[str, tuple[str, Callable[[Path], draft_heads.Head]]] = {
    "eagle": ("eagle", lambda at: _heads().write_eagle(at / "target", at / "head")),
    "eagle that shares the embedding": (
        "eagle",
        lambda at: _heads().write_eagle(at / "target", at / "head", has_embedding=False),
    ),
    "eagle3": ("eagle3", lambda at: _heads().write_eagle3(at / "target", at / "head")),
    "eagle3 under longer names": (
        "eagle3",
        lambda at: _heads().write_eagle3(
            at / "target", at / "head", is_normed=True, prefix="model."
        ),
    ),
    "mtp": ("mtp", lambda at: _heads().write_mtp(at / "target")),
}


_AS_OTHERS = ("eagle that shares the embedding", "eagle3 under longer names")
"""Files of another form; read, they are heads that others are as well."""


def _options(method: str, at: Path) -> dict[str, Any]:
    own = {} if method == "mtp" else {"model": str(at / "head")}
    return {"speculative_config": {"method": method, "num_speculative_tokens": _MOST, **own}}


def _engine(at: Path, **options: Any) -> Engine:
    options = {
        "max_num_seqs": 8, "num_threads": 1, "kv_cache_memory": "1MiB", "dtype": "float32",
        "skip_tokenizer_init": True, **options,
    }  # fmt: skip
    return build_engine(EngineConfig(model=str(at / "target"), **options))


def _record(engine: Engine) -> list[tuple[list[int], list[int]]]:
    """The known tokens at which there was a draft, and the draft."""
    drafts, found = model_drafts(engine), list[tuple[list[int], list[int]]]()
    draft = drafts._draft_all

    def recording() -> Any:
        lines = draft()
        found.extend((line.known.tolist(), list(line.drafted)) for line in lines if line.drafted)
        return lines

    drafts._draft_all = recording  # type: ignore[method-assign]
    return found


def _run(engine: Engine, temperature: float, after_step: Any = lambda: None) -> Any:
    for number, prompt in enumerate(_PROMPTS):
        params = SamplingParams(
            temperature=temperature, seed=number, max_tokens=30, ignore_eos=True
        )
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    outputs = run_all(engine, after_step)
    return {name: each.outputs[0].token_ids for name, each in outputs.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "circumstances"),
    [
        *(pytest.param(name, {}, marks=pytest.mark.slow) for name in _AS_OTHERS),
        *((name, {}) for name in _HEADS if name not in _AS_OTHERS),
        *(
            pytest.param(
                name, {"max_num_batched_tokens": 8, "max_num_seqs": 4}, marks=pytest.mark.slow
            )
            for name in _HEADS
            if name not in _AS_OTHERS
        ),
    ],
)
def test_heads_draft_what_their_definitions_say(
    name: str, circumstances: dict[str, Any], tmp_path: Path
) -> None:
    method, write = _HEADS[name]
    head = write(tmp_path)
    engine = draft_all(_engine(tmp_path, **_options(method, tmp_path), **circumstances))
    recorded = _record(engine)
    scheduler, rng = engine.scheduler, random.Random(1)

    def preempt() -> None:
        for sequence in scheduler.running.copy():
            if rng.random() < 0.02:
                scheduler.planner.preempt(sequence)

    # what the head drafts is not what the model samples: most drafts are wrong
    found = [_run(engine, 0.0), _run(engine, 0.0, preempt)]
    plain = _engine(tmp_path, **circumstances)
    assert found == [_run(plain, 0.0)] * 2
    assert len(recorded) > 200
    num_compared = 0
    for known, drafted in rng.sample(recorded, 60):
        expected, margin = head.draft(known, len(drafted))
        if margin > 1e-3:
            num_compared += 1
            assert drafted == expected, (known, margin)
    assert num_compared > 40
    plain.close()
    engine.close()


@pytest.mark.slow_except("eagle3")
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_answers_are_the_same_with_a_head(method: str, tmp_path: Path) -> None:
    _HEADS[method][1](tmp_path)
    plain = _engine(tmp_path, dtype="bfloat16")
    engine = draft_all(_engine(tmp_path, dtype="bfloat16", **_options(method, tmp_path)))
    for temperature in (0.0, 1.0):
        assert _run(engine, temperature) == _run(plain, temperature)
    assert engine.scheduler.stats.num_run_tokens > 100
    plain.close()
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_the_targets_weights_are_replaced_and_the_heads_are_not(
    method: str, tmp_path: Path
) -> None:
    _HEADS[method][1](tmp_path)
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "target", other / "target")
    path = other / "target" / "model.safetensors"
    save_file({name: 1.25 * tensor for name, tensor in load_file(path).items()}, path)
    engine = draft_all(_engine(tmp_path, **_options(method, tmp_path)))
    before, expected = _run(engine, 0.7), _run(_engine(other), 0.7)
    engine.replace_weights(engine.executor.load_weights(str(other / "target")), "next")
    assert _run(engine, 0.7) == expected != before


def _edited(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.slow
@pytest.mark.parametrize("name", _HEADS)
def test_files_of_heads_are_checked_before_they_are_loaded(name: str, tmp_path: Path) -> None:
    method, write = _HEADS[name]
    write(tmp_path)
    config = EngineConfig(model=str(tmp_path / "target"), **_options(method, tmp_path))
    check_files(plan_engine(config))
    if method == "mtp":  # which the target's own files hold
        return
    (tmp_path / "head" / "model.safetensors").write_bytes(b"\x10")
    with pytest.raises(CheckpointError, match=r"the draft model: .*head/model\.safetensors"):
        check_files(plan_engine(config))


def test_heads_for_other_models_are_refused(tmp_path: Path) -> None:
    _heads().write_eagle3(tmp_path / "target", tmp_path / "head")
    options = _options("eagle3", tmp_path)

    def plan() -> None:
        plan_engine(EngineConfig(model=str(tmp_path / "target"), **options))

    plan()
    for values, error, message in (
        ({"target_hidden_size": 64}, ConfigError, "made for another model"),
        ({"vocab_size": 97}, ConfigError, "vocab_size=97"),
        ({"num_hidden_layers": 2}, UnsupportedModelError, "num_hidden_layers"),
        ({"architectures": ["OPTForCausalLM"]}, UnsupportedModelError, "eagle3"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, ConfigError, "3 of the model's 6 layers"),
    ):
        before = (tmp_path / "head" / "config.json").read_text()
        _edited(tmp_path / "head", **values)
        with pytest.raises(error, match=message):
            plan()
        (tmp_path / "head" / "config.json").write_text(before)
    options = _options("mtp", tmp_path)
    with pytest.raises(UnsupportedModelError, match="DeepseekV3ForCausalLM"):
        plan()


def test_a_head_whose_projection_of_states_does_not_fit_is_refused(tmp_path: Path) -> None:
    """It is no part of the declaration that all other tensors are checked against."""

    _heads().write_eagle3(tmp_path / "target", tmp_path / "head")
    path = tmp_path / "head" / "model.safetensors"
    tensors = load_file(path)
    whole = tensors.pop("fc.weight")
    for given, said in (
        (None, r"lacks fc\.weight \[32, 96\]"),
        (whole[:, :-1], r"fc\.weight is \[32, 95\], config\.json implies \[32, 96\]"),
        (whole[0], r"fc\.weight is \[96\]"),
        (whole.long(), r"fc\.weight is stored as I64, not as floating point"),
    ):
        save_file(tensors | ({} if given is None else {"fc.weight": given.contiguous()}), path)
        with pytest.raises(CheckpointError, match=said):
            _engine(tmp_path, **_options("eagle3", tmp_path))


def test_a_head_without_its_tokens_is_refused(tmp_path: Path) -> None:

    _heads().write_eagle3(tmp_path / "target", tmp_path / "head")
    path = tmp_path / "head" / "model.safetensors"
    tensors = load_file(path)
    for offsets in (None, tensors["d2t"][:-1], tensors["d2t"] + 96):
        kept = {name: each for name, each in tensors.items() if name != "d2t"}
        save_file(kept | ({} if offsets is None else {"d2t": offsets.contiguous()}), path)
        with pytest.raises(CheckpointError, match="d2t"):
            _engine(tmp_path, **_options("eagle3", tmp_path))

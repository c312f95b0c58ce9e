"""An adapter's files: what is read of them, what is refused by name, and that versions stay as they were."""

from __future__ import annotations

import gc
import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import TINY, write_adapter, write_whole_adapter
from safetensors.torch import load_file, save_file

from quire.config.engine import EngineConfig
from quire.core.adapters import AdapterOrder
from quire.engine.plan.adapters import plan_adapters
from quire.errors import CheckpointError
from quire.kernels.reference.kernels import ReferenceKernels
from quire.lora import store as store_module
from quire.lora.config import read_config
from quire.lora.identity import content_digest
from quire.lora.layout import (
    AdapterLimits,
    adaptable,
    adapter_bytes,
    check_adapter,
    expert_weights,
)
from quire.lora.store import AdapterStore
from quire.lora.weights import AdapterLoader
from quire.models.declaration import DecoderSpec
from quire.models.pooling import PoolingSpec
from quire.models.registry import declare
from tests.golden.checkpoints import CONFIGS

LAYER = "base_model.model.model.layers.0"


def _change_config(folder: Path, **values: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _change_tensors(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path) | changes
    save_file({name: each for name, each in tensors.items() if each is not None}, path)


@pytest.fixture
def folder(tmp_path: Path, spec: DecoderSpec) -> Path:
    return write_adapter(tmp_path / "adapter", spec)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("use_qalora", True),
        ("lora_bias", "yes"),
        ("bias", "some"),
        ("modules_to_save", ["lm_head"]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("trainable_token_indices", [1, 2]),
        ("layer_replication", [[0, 2]]),
        ("alora_invocation_tokens", []),
        ("megatron_config", {"a": 1}),
        ("init_lora_weights", "pissa"),
        ("peft_type", "IA3"),
        ("task_type", "SEQ_CLS"),
        ("r", 0),
        ("r", 513),
        ("lora_alpha", "many"),
        ("lora_alpha", 10**400),
        ("lora_alpha", float("nan")),
        ("use_rslora", "yes"),
        ("alpha_pattern", {"(.*)+x": 3}),
        ("rank_pattern", {"q_proj": 0}),
        ("something_new", 7),
    ],
)
def test_settings_that_would_change_the_numbers_are_refused_by_name(
    folder: Path, spec: DecoderSpec, key: str, value: object
) -> None:
    check_adapter(folder, spec, AdapterLimits(16))
    _change_config(folder, **{key: value})
    with pytest.raises(CheckpointError, match=key):
        check_adapter(folder, spec, AdapterLimits(16))


def test_settings_of_training_are_taken(folder: Path, spec: DecoderSpec) -> None:
    _change_config(
        folder, lora_dropout=0.3, inference_mode=True, base_model_name_or_path="x", revision="main",
        modules_to_save=None, use_dora=False, layers_pattern=None, loftq_config={}, peft_version="1",
    )  # fmt: skip
    check_adapter(folder, spec, AdapterLimits(16))


def test_scales_follow_the_patterns_and_rslora(tmp_path: Path, spec: DecoderSpec) -> None:
    write_adapter(
        tmp_path, spec, rank=4, use_rslora=True, rank_pattern={"^model.layers.0.mlp.up_proj": 9},
        alpha_pattern={"mlp.up_proj": 6, "layers.1.self_attn.q_proj": 10},
    )  # fmt: skip
    config = read_config(tmp_path)
    found = {
        name: config.scale_of(f"model.layers.{name}")
        for name in ("0.mlp.up_proj", "1.mlp.up_proj", "1.self_attn.q_proj", "0.self_attn.q_proj")
    }
    assert list(found.values()) == [6 / 3, 6 / 2, 10 / 2, 8 / 2]


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.lm_head.lora_A.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        f"{LAYER}.self_attn.q_proj.lora_magnitude_vector",
        f"{LAYER}.mlp.gate.lora_A.weight",
        "base_model.model.lm_head.weight",
    ],
)
def test_tensors_that_belong_nowhere_are_refused_by_name(
    folder: Path, spec: DecoderSpec, name: str
) -> None:
    _change_tensors(folder, {name: torch.ones(2, 2)})
    with pytest.raises(CheckpointError, match=name.split(".")[-3] if "." in name else name):
        check_adapter(folder, spec, AdapterLimits(16))


def test_missing_halves_shapes_and_modules_are_refused(tmp_path: Path, spec: DecoderSpec) -> None:
    q_proj = f"{LAYER}.self_attn.q_proj"
    cases: list[tuple[dict[str, torch.Tensor | None], str]] = [
        ({f"{q_proj}.lora_B.weight": None}, "lora_A alone"),
        ({f"{q_proj}.lora_B.weight": torch.ones(64, 9)}, r"expected \[8, 64\] and \[64, 8\]"),
        ({f"{q_proj}.lora_A.weight": None, f"{q_proj}.lora_B.weight": None}, "no tensors for"),
        ({f"{q_proj}.lora_A.weight": torch.ones(8, 64, dtype=torch.int32)}, "stored as I32"),
    ]
    for number, (changes, message) in enumerate(cases):
        folder = write_adapter(tmp_path / str(number), spec)
        _change_tensors(folder, changes)
        with pytest.raises(CheckpointError, match=message):
            check_adapter(folder, spec, AdapterLimits(16))
    folder = write_adapter(tmp_path / "targets", spec)
    _change_config(folder, target_modules=["q_proj", "gate"])
    with pytest.raises(CheckpointError, match="target_modules names 'gate'"):
        check_adapter(folder, spec, AdapterLimits(16))
    with pytest.raises(CheckpointError, match="rank 8, and max_lora_rank is 4"):
        check_adapter(write_adapter(tmp_path / "rank", spec), spec, AdapterLimits(4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_numbers_that_are_none_are_refused_by_the_name_of_their_tensor(
    tmp_path: Path, spec: DecoderSpec, dtype: torch.dtype
) -> None:
    folder = write_adapter(tmp_path / "adapter", spec, dtype=dtype)
    name = f"{LAYER}.self_attn.v_proj.lora_B.weight"
    up = torch.full((32, 8), torch.finfo(dtype).max, dtype=dtype)
    for value in (torch.finfo(dtype).max, torch.nan, torch.inf, -torch.inf):
        up[-1, -1] = value
        _change_tensors(folder, {name: up})
        if value == torch.finfo(dtype).max:
            check_adapter(folder, spec, AdapterLimits(16))
            continue
        with pytest.raises(CheckpointError, match=f"{name} has numbers that are not finite"):
            check_adapter(folder, spec, AdapterLimits(16))


def test_an_adapter_that_was_trained_for_vectors_is_the_same_one(
    folder: Path, spec: DecoderSpec
) -> None:
    """PEFT wraps the model without its head then, so that names lack a prefix."""
    loader = AdapterLoader(spec, ReferenceKernels(), "float32", AdapterLimits(16))
    before = loader.load(AdapterOrder(content_digest(folder), str(folder)))
    path = folder / "adapter_model.safetensors"
    named = {name.replace("model.model.", "model."): each for name, each in load_file(path).items()}
    assert not named.keys() & load_file(path).keys()
    save_file(named, path)
    _change_config(folder, task_type="FEATURE_EXTRACTION")
    check_adapter(folder, spec, AdapterLimits(16))
    after = loader.load(AdapterOrder(content_digest(folder), str(folder)))
    assert (after.numbers, after.num_bytes) == (before.numbers, before.num_bytes)


def test_folders_without_an_adapter_and_broken_files_are_refused(
    folder: Path, spec: DecoderSpec, tmp_path: Path
) -> None:
    store = AdapterStore(spec, AdapterLimits(16))
    with pytest.raises(CheckpointError, match="not the folder of an adapter"):
        store.version_of(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="not the folder of an adapter"):
        store.version_of(Path("with\0nul"))
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for cut in (0, 7, 100, len(whole) - 1):
        weights.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError):
            store.version_of(folder)
    weights.unlink()
    (folder / "adapter_model.bin").write_bytes(whole)
    with pytest.raises(CheckpointError, match="safetensors"):
        store.version_of(folder)
    os.mkfifo(weights)
    with pytest.raises(CheckpointError, match="regular"):
        store.version_of(folder)
    store.close()


def test_a_version_stays_as_it_was_until_nobody_holds_it(folder: Path, spec: DecoderSpec) -> None:
    store = AdapterStore(spec, AdapterLimits(16))
    first = store.version_of(folder)
    assert store.version_of(folder) is first
    write_adapter(folder, spec, seed=9)  # over the files of the first
    second = store.version_of(folder)
    assert second.digest != first.digest
    assert content_digest(Path(first.folder)) == first.digest
    assert content_digest(Path(second.folder)) == second.digest
    left = Path(first.folder)
    del first
    gc.collect()
    assert not left.exists()
    store.forget(folder)
    left = Path(second.folder)
    del second
    gc.collect()
    assert not left.exists()
    store.close()


def test_copies_of_a_process_that_was_killed_are_deleted_and_those_of_others_are_not(
    folder: Path, spec: DecoderSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    for name in ("quire-adapters-killed", "quire-adapters-older", "another"):
        (place / name / "1").mkdir(parents=True)
    (place / "quire-adapters-killed" / "lock").touch()
    (place / "quire-adapters-link").symlink_to(place / "another")
    (place / "another" / "lock").touch()
    store, other = (AdapterStore(spec, AdapterLimits(16)) for _ in range(2))
    adapter = store.version_of(folder)
    own = {Path(adapter.folder).parent.name, "another"}
    others = {"quire-adapters-older", "quire-adapters-link"}
    assert own | others < {each.name for each in place.iterdir()}
    assert not (place / "quire-adapters-killed").exists()
    other.close()
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: 1)
        store.close()
    assert Path(adapter.folder).is_dir()
    assert {each.name for each in place.iterdir()} == own | others


def test_equal_content_is_one_version_wherever_it_lies(
    folder: Path, spec: DecoderSpec, tmp_path: Path
) -> None:
    store = AdapterStore(spec, AdapterLimits(16))
    shutil.copytree(folder, tmp_path / "copy")
    assert store.version_of(folder) is store.version_of(tmp_path / "copy")
    store.close()


def test_files_that_are_not_what_their_digest_says_are_not_loaded(
    folder: Path, spec: DecoderSpec
) -> None:
    loader = AdapterLoader(spec, ReferenceKernels(), "float32", AdapterLimits(16))
    order = AdapterOrder(content_digest(folder), str(folder))
    packed = loader.load(order)
    assert 0 < packed.num_bytes <= adapter_bytes(spec, 8, "float32")
    write_adapter(folder, spec, seed=3)
    with pytest.raises(CheckpointError, match="no longer what they were"):
        loader.load(order)


def test_folded_weights_take_no_adapters() -> None:
    """Their operation would leave an adapter out."""
    weights = adaptable(declare(CONFIGS["deepseek v2"]))
    names = {part.name.rpartition(".")[2] for parts in weights.values() for part in parts}
    assert {"q_proj", "kv_a_proj_with_mqa", "o_proj"} <= names and "kv_b_proj" not in names


def test_experts_are_counted_apart_and_a_model_without_a_head_has_all_others() -> None:
    mixture = declare(CONFIGS["qwen2 moe"])
    names = {part.name for parts in adaptable(mixture).values() for part in parts}
    assert any(name.endswith("q_proj") for name in names)
    assert any("shared_expert.down_proj" in name for name in names)
    assert any(name.endswith("mlp.gate") for name in names)
    assert not [name for name in names if ".experts." in name]
    stacked = {part.name for parts in expert_weights(mixture).values() for part in parts}
    assert stacked and all(".experts." in name for name in stacked)
    with_experts = adapter_bytes(mixture, 4, "float32", has_experts=True)
    assert with_experts > adapter_bytes(mixture, 4, "float32")
    headless = declare({**TINY, "architectures": ["LlamaModel"]})
    assert len(adaptable(headless)) == len(headless.projections)


def test_forgetting_a_folder_waits_for_no_files(
    folder: Path, spec: DecoderSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server forgets in its event loop, while a thread may be copying gigabytes."""
    began, go_on = threading.Event(), threading.Event()

    def slow(source: Path, target: Path) -> None:
        began.set()
        assert go_on.wait(20.0)
        copy(source, target)

    copy = store_module._copy
    monkeypatch.setattr(store_module, "_copy", slow)
    store = AdapterStore(spec, AdapterLimits(16))
    with ThreadPoolExecutor(2) as pool:
        loading = pool.submit(store.version_of, folder)
        try:
            assert began.wait(20.0)
            pool.submit(store.forget, folder).result(timeout=5.0)
        finally:
            go_on.set()
        assert loading.result(timeout=20.0) is store.version_of(folder)
    store.close()


def test_an_adapter_of_the_head_is_refused_where_texts_are_scored_by_logits(
    tmp_path: Path, spec: DecoderSpec
) -> None:
    """A vector is pooled before the head scores it, where its adapter is not known."""
    whole = write_whole_adapter(tmp_path / "whole", spec)
    check_adapter(whole, spec, AdapterLimits(16))
    with pytest.raises(CheckpointError, match="the adapter changes lm_head"):
        check_adapter(whole, spec, AdapterLimits(16, has_head=False))
    plain = write_adapter(tmp_path / "plain", spec)
    check_adapter(plain, spec, AdapterLimits(16, has_head=False))
    config = EngineConfig(model="m", enable_lora=True)
    for token_ids, has_head in (((), True), ((3, 4), False)):
        pooling = PoolingSpec(task="classify", kind="last", token_ids=token_ids)
        plan = plan_adapters(config, spec, "float32", pooling)
        assert plan is not None and plan.limits.has_head == has_head

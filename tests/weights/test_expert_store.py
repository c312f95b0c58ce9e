"""Experts in a file, and a pool that has some of them: the same bits as with all in memory, and a
file that is not what was written is named."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from quantized_checkpoints import mxfp4_weight
from torch import Tensor

from quire.errors import CapacityError, CheckpointError
from quire.kernels import cpu
from quire.kernels.interface import ExpertChoice, PackedLinear
from quire.models.tensors import LinearSpec, TensorSpec
from quire.program.operations import Routing
from quire.quant.formats import IntegerFormat
from quire.quant.rounding import quantize
from quire.weights.expert_store import SUFFIX, ExpertStore, Mixture
from quire.weights.packed_cache import CacheName

if cpu.IMPORT_ERROR is not None:
    pytest.skip(f"no native kernels: {cpu.IMPORT_ERROR}", allow_module_level=True)

from quire.kernels.cpu.kernels import CpuKernels

HIDDEN, INNER, EXPERTS, LAYERS = 64, 32, 8, 2
KERNELS = CpuKernels()
NAME = CacheName("model", "0123")
FORMATS = ["float32", "bfloat16", "int8", "int4", "mxfp4"]
Layer = tuple[PackedLinear, PackedLinear]


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def _pack(weight: Tensor, form: str, bias: Tensor | None) -> PackedLinear:
    if form == "mxfp4":
        return KERNELS.pack_quantized(mxfp4_weight(weight), bias)
    if form.startswith("int"):
        size = weight.shape[1] if form == "int8" else 8
        held = IntegerFormat(8 if form == "int8" else 4, size, "int8")
        return KERNELS.pack_quantized(quantize(weight, held), bias)
    return KERNELS.pack_linear(weight.to(getattr(torch, form)), bias)


def _layers(form: str) -> list[Layer]:
    """Experts in memory, with biases in the second layer."""
    found = []
    for layer in range(LAYERS):
        up, down = (EXPERTS * 2 * INNER, HIDDEN), (EXPERTS * HIDDEN, INNER)
        biases = [_draw(shape[0], seed=5) if layer else None for shape in (up, down)]
        weights = [_draw(*shape, seed=layer) / 8 for shape in (up, down)]
        first, second = (_pack(*each) for each in zip(weights, (form, form), biases, strict=True))
        found.append((first, second))
    return found


def _parts(name: str, shape: tuple[int, int]) -> tuple[LinearSpec, ...]:
    return tuple(LinearSpec(TensorSpec(f"{name}.{expert}", shape)) for expert in range(EXPERTS))


MIXTURES = [
    Mixture(_parts(f"{n}.up", (2 * INNER, HIDDEN)), _parts(f"{n}.down", (HIDDEN, INNER)), EXPERTS)
    for n in range(LAYERS)
]


def _store(folder: Path, num_bytes: int, least: int = 1) -> ExpertStore:
    return ExpertStore(folder, NAME, MIXTURES, num_bytes=num_bytes, least=least)


def _expert_bytes(layer: Layer) -> int:
    return sum(each.data.nbytes for each in layer) // EXPERTS  # type: ignore[attr-defined]


def _written(folder: Path, layers: list[Layer], num_bytes: int) -> tuple[ExpertStore, list[Layer]]:
    store = _store(folder, num_bytes)
    paged = []
    for mixture, (up, down) in zip(MIXTURES, layers, strict=True):
        paged.append((store.keep(mixture.up, up), store.keep(mixture.down, down)))
    return store, paged


def _choice(num_tokens: int, seed: int) -> ExpertChoice:
    logits = _draw(num_tokens, EXPERTS, seed=seed)
    return KERNELS.choose_experts(logits, Routing(EXPERTS, 3, True))


def _outputs(layers: list[Layer], form: str) -> list[Tensor]:
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
    found = []
    for step, num_tokens in enumerate((1, 40, 2, 1, 1, 9)):
        x = _draw(num_tokens, HIDDEN, seed=step).to(dtype)
        for layer in layers:
            x = KERNELS.apply_experts(x, *layer, _choice(num_tokens, step), "silu")
            found.append(x)
    return found


@pytest.fixture
def restore_threads() -> Iterator[None]:
    before = cpu.num_threads()
    yield
    cpu.set_num_threads(before)


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_in_memory_changes_no_bit(form: str, tmp_path: Path, restore_threads: None) -> None:
    layers = _layers(form)
    want, whole = _outputs(layers, form), LAYERS * EXPERTS
    for num_slots in (1, 3, whole // 4, whole // 2, whole * 3 // 4, whole + 5):
        cpu.set_num_threads(1 + num_slots % 2)
        size = num_slots * (_expert_bytes(layers[0]) + 64)
        store, paged = _written(tmp_path / str(num_slots), layers, size)
        assert store.pool is not None
        store.pool.fill()
        got = _outputs(paged, form)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        counts = store.pool.counts
        assert (counts.num_misses == 0) == (num_slots >= whole)
        assert counts.bytes_read % _expert_bytes(layers[0]) == 0
        assert counts.bytes_read // _expert_bytes(layers[0]) >= min(num_slots, whole)


def test_experts_that_are_chosen_often_stay(tmp_path: Path) -> None:
    """Two favourites, and one of the others in turn: but for the first steps, one miss a step."""
    layers = _layers("float32")
    store, paged = _written(tmp_path, layers, 4 * (_expert_bytes(layers[0]) + 64))
    assert store.pool is not None
    x = _draw(1, HIDDEN)
    for step in range(60):
        ids = torch.tensor([[6, 7, step % 6]])
        KERNELS.apply_experts(x, *paged[0], ExpertChoice(ids, torch.ones(1, 3) / 3), "silu")
        if step == 19:
            before = store.pool.counts
    after = store.pool.counts
    assert after.num_misses - before.num_misses <= 40
    assert after.num_hits - before.num_hits >= 80


def test_a_second_start_reads_the_file(tmp_path: Path) -> None:
    layers = _layers("int8")
    size = 5 * (_expert_bytes(layers[0]) + 64)
    _, paged = _written(tmp_path, layers, size)
    want = _outputs(paged, "int8")
    (path,) = tmp_path.iterdir()
    assert path.name == f"model-0123{SUFFIX}" and path.stat().st_mode & 0o777 == 0o600
    before = path.stat().st_mtime_ns
    weights = _store(tmp_path, size).over(None)  # type: ignore[arg-type]
    found = [(weights.packed(each.up), weights.packed(each.down)) for each in MIXTURES]
    got = _outputs(found, "int8")  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert path.stat().st_mtime_ns == before


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "has other bytes than were written": lambda path: _flip(path, path.stat().st_size // 2),
    "is cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_file_that_changes_meanwhile_is_named(what: str, tmp_path: Path) -> None:
    layers = _layers("float32")
    store, paged = _written(tmp_path, layers, 2 * (_expert_bytes(layers[0]) + 64))
    (path,) = tmp_path.iterdir()
    want, whole = _outputs(paged, "float32"), path.read_bytes()
    DAMAGE[what](path)
    with pytest.raises(
        CheckpointError, match=rf"model-0123{SUFFIX}: expert \d of mixture \d {what}"
    ):
        _outputs(paged, "float32")
    path.write_bytes(whole)  # no slot was left with other bytes
    got = _outputs(paged, "float32")
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert store.pool is not None


def test_a_file_that_is_damaged_at_the_start_is_named(tmp_path: Path) -> None:
    layers = _layers("float32")
    size = 2 * LAYERS * EXPERTS * _expert_bytes(layers[0])
    _written(tmp_path, layers, size)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    _flip(path, len(whole) // 2)
    pool = _store(tmp_path, size).pool
    assert pool is not None
    with pytest.raises(CheckpointError, match=f"{tmp_path}: .*{SUFFIX}: expert .* has other bytes"):
        pool.fill()
    for damaged in (whole[:-9], whole[: len(whole) // 2], b"", whole[:200] + b"x" + whole[201:]):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=SUFFIX):
            _store(tmp_path, size)
    path.write_bytes(whole)
    _flip(path, len(whole) - 3)  # of the checksums
    with pytest.raises(CheckpointError, match="not what was written; delete the file"):
        _store(tmp_path, size)


def test_what_is_not_completed_leaves_nothing(tmp_path: Path) -> None:
    (up, _), *_ = _layers("float32")
    store = _store(tmp_path, 1 << 20)
    store.keep(MIXTURES[0].up, up)
    assert len(list(tmp_path.iterdir())) == 1
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    """As far as a limit on the size of files lets the system say so."""
    layers = _layers("float32")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = layers[0][0].data.nbytes  # type: ignore[attr-defined]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, before[1]))
    try:
        with pytest.raises(CheckpointError, match=rf"cannot be kept in {tmp_path}/.*{SUFFIX}: "):
            _written(tmp_path, layers, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    _, paged = _written(tmp_path, layers, 1 << 20)
    assert torch.equal(_outputs(paged, "float32")[-1], _outputs(layers, "float32")[-1])


def test_two_starts_may_write_one_file_at_the_same_time(tmp_path: Path) -> None:
    layers = _layers("float32")
    size = 3 * (_expert_bytes(layers[0]) + 64)
    stores = [_store(tmp_path, size) for _ in range(2)]
    paged: list[list[Layer]] = [[], []]
    for mixture, (up, down) in zip(MIXTURES, layers, strict=True):
        for store, found in zip(stores, paged, strict=True):
            found.append((store.keep(mixture.up, up), store.keep(mixture.down, down)))
    want = _outputs(layers, "float32")
    for found in paged:
        got = _outputs(found, "float32")
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert list(tmp_path.iterdir()) == [NAME.path(tmp_path, SUFFIX)]


def test_what_a_killed_start_left_is_removed_and_no_running_one_is(tmp_path: Path) -> None:
    layers = _layers("float32")
    running = _store(tmp_path, 1 << 20)
    running.keep(MIXTURES[0].up, layers[0][0])
    (locked,) = tmp_path.iterdir()
    left = tmp_path / f"{NAME.path(tmp_path, SUFFIX).stem}abandoned"
    left.write_bytes(bytes(100))
    for path in (locked, left):
        os.utime(path, (0, 0))
    _written(tmp_path, layers, 1 << 20)
    assert set(tmp_path.iterdir()) == {NAME.path(tmp_path, SUFFIX), locked}
    running.close()


def test_a_pool_that_holds_too_few_is_refused(tmp_path: Path) -> None:
    layers = _layers("float32")
    _written(tmp_path, layers, 1 << 20)
    with pytest.raises(CapacityError, match=r"expert_memory holds 2 experts .* needs 3 of a layer"):
        _store(tmp_path, 2 * (_expert_bytes(layers[0]) + 64), least=3)

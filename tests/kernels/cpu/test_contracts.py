"""The extension refuses what is outside its contract before it reads or writes: codes, sizes,
addresses, indices, numbers.

Each function is called with the arguments of a call that works, of which one is wrong. Through
`_native` itself, since the checks in Python stand before it and would refuse most of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from sampling_cases import make_filters, make_keys, make_logits, make_rows
from torch import Tensor

from quire.kernels import cpu
from quire.kernels.sampling import ScaledRows

if cpu.IMPORT_ERROR is not None:
    pytest.skip("the native extension is not built", allow_module_level=True)

from quire.kernels.cpu import _native
from quire.kernels.cpu.linear import CpuLinear, PackedLayout, pack_linear
from quire.kernels.cpu.program import NO_FIELDS
from quire.kernels.cpu.sampling import NativeSampling

HUGE = 2**62
X, OUT, W = torch.randn(4, 32), torch.zeros(4, 32), torch.randn(32)
PAIRS, HALF = torch.randn(4, 64), torch.zeros(4, 32)
POSITIONS, ANGLES = torch.arange(4), torch.randn(8, 2, 4)
HEADS = torch.randn(4, 2, 16)
CACHES = [torch.zeros(3, 2, 8, 16) for _ in range(2)]
SLOTS = torch.arange(4)
STARTS, LENGTHS = torch.tensor([0, 4], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
TABLE = torch.zeros(1, 1, dtype=torch.int32)
IDS = torch.tensor([0, 1, 2, 3])
SUMS = torch.zeros(4, 48)
LOGITS = torch.randn(4, 50)
VALUES = torch.zeros(4)
PEAKS, SCALES = LOGITS.max(dim=1).values, torch.ones(4)
SHARES, FLOORS, TOP = (
    torch.ones(4, dtype=torch.float64),
    torch.full((4,), float("-inf")),
    torch.full((4,), 5),
)
SEVEN = torch.zeros(7, dtype=torch.int32)
STARTS64 = torch.zeros(5, dtype=torch.int64)
ROWS = (LOGITS, 4, 50, IDS, PEAKS, SCALES, 4)


@cache
def _packed(num_outputs: int, num_inputs: int) -> CpuLinear:
    return pack_linear(torch.randn(num_outputs, num_inputs))


def _linear() -> _native.LinearWeight:
    return _packed(48, 32).native


def _head_weight() -> _native.LinearWeight:
    return _packed(32, 12).native


CALLS: dict[str, tuple[Any, ...]] = {
    "rms_norm": (X, 0, W, 0, OUT, 0, 0, 4, 32, 1e-5, 0.0),
    "layer_norm": (X, W, 0, OUT, 0, 0, 4, 32, 1e-5),
    "is_finite": (X, 0, 128),
    "activate": (X, OUT, 0, 0, 128),
    "gated": (PAIRS, HALF, 0, 0, 4, 32),
    "rope": (HEADS, POSITIONS, ANGLES, 0, 4, 32, 2, 16, 4, 8, False, 0),
    "write_kv": (HEADS, HEADS, *CACHES, SLOTS, 0, 0, 4, 32, 32, 2, 16, 3, 8),
    "copy_blocks": (CACHES[0], 3, 1024, torch.tensor([0]), torch.tensor([1]), 1),
    "paged_attention": (
        HEADS,
        torch.zeros(4, 2, 16),
        0,
        *CACHES,
        0,
        4,
        32,
        2,
        2,
        16,
        3,
        8,
        STARTS,
        LENGTHS,
        1,
        TABLE,
        1,
        0.25,
        0,
        0.0,
        0,
        16,
        0,
    ),
    "head_linear": (_head_weight, 2, 16, HEADS, 0, 4, torch.zeros(4, 2, 20)),
    "linear": (_linear, X, 0, 4, SUMS, 0),
    "linear_gated": (_linear, 0, X, 0, 4, torch.zeros(4, 24), 0),
    "linear_peaks": (_linear, X, 0, 4, torch.zeros(4, dtype=torch.int64), VALUES),
    "sampling_peaks": (LOGITS, 4, 50, torch.zeros(4, dtype=torch.int64), VALUES),
    "sampling_penalise": (
        LOGITS.clone(),
        4,
        50,
        IDS,
        4,
        SEVEN,
        7,
        STARTS64,
        STARTS64[:4],
        SCALES,
        VALUES,
        VALUES,
    ),
    "sampling_cuts": (
        *ROWS,
        TOP,
        SHARES,
        FLOORS,
        torch.zeros(4),
        torch.zeros(4, dtype=torch.int64),
    ),
    "sampling_draw": (*ROWS, 0, 0, IDS, IDS, torch.zeros(4, dtype=torch.int64)),
    "sampling_score": (*ROWS, 0, 0, IDS, 1, *(torch.zeros(4, dtype=torch.int64) for _ in range(3))),
    "sampling_noise": (1, 2, 50, torch.zeros(50)),
    "probe_floats": (1,),
    "shared_prefixes": (STARTS, LENGTHS, 1, TABLE, 1, 8, 0, 4),
}


ANY_NUMBER = {
    ("sampling_noise", 0), ("sampling_noise", 1), ("shared_prefixes", 7),
    # Addresses that may be absent, where the tensor's own would be checked as any other.
    ("rms_norm", 1), ("rms_norm", 3), ("layer_norm", 2), ("paged_attention", 21), ("paged_attention", 23),
    ("sampling_draw", 7), ("sampling_draw", 8), ("sampling_score", 7), ("sampling_score", 8),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _weights_end_with_the_tests() -> Iterator[None]:
    """pytest keeps this module to the end of the process, where the extension reports whatever of
    its objects still lives."""
    yield
    _packed.cache_clear()


def _call(name: str, arguments: Sequence[Any]) -> Any:
    given = [each() if callable(each) else each for each in arguments]
    given = [each.data_ptr() if isinstance(each, Tensor) else each for each in given]
    return getattr(_native, name)(*given)


@pytest.mark.parametrize("name", CALLS)
def test_the_calls_themselves_work(name: str) -> None:
    _call(name, CALLS[name])


@pytest.mark.parametrize("name", CALLS)
def test_wrong_numbers_and_addresses_are_refused(name: str) -> None:
    """A number, whatever it means, cannot be negative or astronomical;
    an address cannot be null or odd where it is needed."""
    right = CALLS[name]
    for at, each in enumerate(right):
        if isinstance(each, Tensor):
            wrong = [each.data_ptr() + 1] if each.element_size() > 1 and each.numel() else []
            wrong += [0] if each.numel() else []
            if name == "copy_blocks" and at == 0:
                wrong = [0]  # blocks are bytes
        elif isinstance(each, bool) or not isinstance(each, int) or (name, at) in ANY_NUMBER:
            continue
        else:
            wrong = [-1, HUGE]
        for value in wrong:
            with pytest.raises((ValueError, TypeError, IndexError)):
                _call(name, [*right[:at], value, *right[at + 1 :]])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_numbers_that_must_be_finite_and_positive(bad: float) -> None:
    for name, at in (("rms_norm", 9), ("layer_norm", 8), ("paged_attention", 20)):
        with pytest.raises(ValueError, match=r"is not finite|is negative"):
            _call(name, [*CALLS[name][:at], bad, *CALLS[name][at + 1 :]])
    scales = SCALES.clone()
    scales[2] = bad
    for name in ("sampling_cuts", "sampling_draw", "sampling_score"):
        with pytest.raises(ValueError, match="scale is"):
            _call(name, [*CALLS[name][:5], scales, *CALLS[name][6:]])


def test_a_max_logit_below_its_row_s_largest_logit_is_refused() -> None:
    """Distances above zero have no bucket and no weight: before,
    they were written in front of the histogram."""
    native = NativeSampling()
    for vocab_size in (5, 64, 200, 4099):
        logits = make_logits(3, vocab_size)
        rows = make_rows(logits)
        low = ScaledRows(rows.row, rows.max_logit - 40.0, rows.scale.clamp(min=0.5))
        count = rows.row.numel()
        with pytest.raises(ValueError, match="is below"):
            native.thresholds(logits, low, make_filters(count, vocab_size, 1))
        with pytest.raises(ValueError, match="is below"):
            native.score(logits, low, None, torch.zeros(count, dtype=torch.int64))
        # the best by distance and noise is the same from any max_logit
        native.draw(logits, low, None, make_keys(count))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_heads_beyond_the_largest_are_refused_by_writes_too(dtype: torch.dtype) -> None:
    """The quantized row is built in an array of the largest head."""
    from quire.kernels.cpu.attention import write_kv

    heads = torch.zeros(1, 1, 580)
    cache = torch.zeros(2, 1, 4, 584, dtype=torch.int8).view(dtype)
    with pytest.raises(ValueError, match="the head size is 580, not from 1 to 576"):
        write_kv(heads, heads, cache, cache.clone(), torch.tensor([0]))


def test_outputs_that_overlap_with_inputs_are_refused() -> None:
    memory = torch.zeros(4, 64)
    inside = memory.view(-1)[16:]
    overlapping: list[tuple[str, list[tuple[int, Any]]]] = [
        ("rms_norm", [(0, memory), (4, inside)]),
        ("layer_norm", [(0, memory), (3, inside)]),
        ("activate", [(0, memory), (1, inside)]),
        ("gated", [(0, memory), (1, inside)]),
        ("linear", [(1, memory), (4, inside)]),
        ("paged_attention", [(0, memory), (1, inside)]),
        ("head_linear", [(3, memory), (6, inside)]),
    ]
    for name, places in overlapping:
        arguments = list(CALLS[name])
        for at, tensor in places:
            arguments[at] = tensor
        with pytest.raises(ValueError, match="overlaps"):
            _call(name, arguments)
    _call("activate", [X.clone(), *CALLS["activate"][1:]])
    _call("activate", [memory, memory, *CALLS["activate"][2:]])  # in place is fine


def test_rows_and_blocks_named_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="named twice"):
        _call(
            "sampling_penalise",
            [
                *CALLS["sampling_penalise"][:3],
                torch.tensor([0, 1, 1, 2]),
                *CALLS["sampling_penalise"][4:],
            ],
        )
    with pytest.raises(ValueError, match="two go to block 1"):
        _call("copy_blocks", [CACHES[0], 3, 1024, torch.tensor([0, 2]), torch.tensor([1, 1]), 2])


def test_weights_without_memory_are_refused() -> None:
    bare = PackedLayout("f32", 48, 32, 32).native()
    with pytest.raises(ValueError, match="attached to no memory"):
        _call("linear", [bare, *CALLS["linear"][1:]])
    with pytest.raises(ValueError, match="attached to no memory"):
        _native.Lookup(bare)
    for wrong in (0, _packed(48, 32).data.data_ptr() + 1):
        with pytest.raises(ValueError, match="the address"):
            bare.attach(wrong, 0)
    with pytest.raises(ValueError, match="cannot be"):
        _native.LinearWeight("f32", 2**40, 2**40, 2**40, False, False)


def test_scales_that_are_not_finite_are_refused() -> None:
    layout = PackedLayout("int8", 16, 32, 32)
    packed = CpuLinear(layout, torch.zeros(layout.num_bytes, dtype=torch.uint8))
    values, scales = torch.zeros(16, 32, dtype=torch.int8), torch.ones(16, 1)
    for bad in (float("nan"), float("inf")):
        scales[3] = bad
        with pytest.raises(ValueError, match="is not finite"):
            _native.pack_quantized(packed.native, values.data_ptr(), scales.data_ptr(), 0)


def _norm(width: int = 32) -> _native.NormWeight:
    return _native.NormWeight(
        weight=W.data_ptr(), bias=0, dtype=0, width=width, eps=1e-5, offset=0.0, is_layer=False
    )


KEPT: list[CpuLinear] = []


def _weight(num_outputs: int, num_inputs: int) -> _native.LinearWeight:
    KEPT.append(pack_linear(torch.randn(num_outputs, num_inputs)))
    return KEPT[-1].native


def _lookup() -> _native.Lookup:
    return _native.Lookup(W.data_ptr(), 0, 2, 16)


EMBED, SCALE, ADD, NORM, LINEAR, GATED_LINEAR, ACTIVATE, PREPARE_HEADS, ATTEND, SELECT, SCATTER = (
    range(11)
)
HEAD_LINEAR, ROTATE_TAILS, WRITE_LATENT = 15, 16, 17
TAILS: dict[str, Any] = {"rope": ANGLES.data_ptr(), "rope_half": 4}
Places = list[tuple[int, int]]
OPERATIONS: dict[int, tuple[Places, Places, dict[str, Any]]] = {
    EMBED: ([], [(0, 16)], {"table": _lookup()}),
    SCALE: ([(0, 16)], [(0, 16)], {"factor": 2.0}),
    ADD: ([(0, 16), (16, 16)], [(0, 16)], {}),
    NORM: ([(0, 32), (32, 32)], [(0, 32), (32, 32)], {"norm": _norm()}),
    LINEAR: ([(0, 32)], [(32, 32)], {"weight": _weight(64, 32), "first_output": 16}),
    GATED_LINEAR: ([(0, 32)], [(32, 32)], {"weight": _weight(64, 32)}),
    ACTIVATE: ([(0, 16)], [(0, 16)], {"activation": 2}),
    PREPARE_HEADS: ([(0, 64)], [(0, 64)], {"heads": (2, 1, 16), "cache": 0}),
    ATTEND: ([(0, 64)], [(64, 32)], {"heads": (2, 1, 16), "cache": 0}),
    SELECT: ([(0, 16)], [(16, 16)], {}),
    SCATTER: ([(0, 16), (16, 16)], [(-1, 16)], {}),
    HEAD_LINEAR: ([(0, 32)], [(32, 40)], {"weight": _weight(32, 12), "heads": (2, 0, 16)}),
    ROTATE_TAILS: ([(0, 32)], [(0, 32)], {"heads": (2, 0, 16), **TAILS}),
    WRITE_LATENT: (
        [(0, 40)], [(0, 40)], {"heads": (0, 1, 40), "norm": _norm(), "cache": 0, **TAILS},
    ),
}  # fmt: skip
WRONG_FIELDS: list[tuple[int, dict[str, Any]]] = [
    *((PREPARE_HEADS, wrong) for wrong in (
        {"heads": (3, 1, 16)}, {"heads": (2, 2, 16)}, {"heads": (2, 1, 0)}, {"heads": (2, 1, 513)},
        {"rope_half": 9}, {"cache": -2}, {"rope": 3, "rope_half": 4}, {"norm": _norm(5)},
        {"key_norm": _norm()},
    )),
    *((ATTEND, wrong) for wrong in (
        {"heads": (2, 0, 16)}, {"heads": (3, 2, 16)}, {"scale": float("nan")}, {"soft_cap": -1.0},
        {"window": -1}, {"cache": -1, "heads": (1, 1, 16)},
    )),
    (EMBED, {"table": None}), (SCALE, {"factor": float("inf")}), (NORM, {"norm": None}),
    (NORM, {"norm": _norm(16)}), (LINEAR, {"weight": None}), (LINEAR, {"first_output": 8}),
    (LINEAR, {"first_output": 48}), 
    (ACTIVATE, {"activation": 4}), (ACTIVATE, {"activation": 5}), (GATED_LINEAR, {"activation": 5}),
    (ATTEND, {"value_size": 17}), (ATTEND, {"value_size": 8}), (ATTEND, {"value_size": -1}),
    *((HEAD_LINEAR, wrong) for wrong in (
        {"heads": (3, 0, 16)}, {"heads": (2, 0, 15)}, {"weight": None}, {"weight": _weight(16, 12)},
        {"weight": _weight(32, 17)}, {"weight": _weight(64, 12)},
    )),
    *((ROTATE_TAILS, wrong) for wrong in (
        {"rope": 0}, {"rope_half": 9}, {"heads": (3, 0, 16)}, {"heads": (2, 0, 8)},
    )),
    *((WRITE_LATENT, wrong) for wrong in (
        {"rope": 0}, {"rope_half": 3}, {"cache": -1}, {"norm": None}, {"heads": (0, 2, 40)},
        {"heads": (0, 1, 36)},
    )),
    (ATTEND, {"sinks": 3}), (ATTEND, {"cache": -1, "sinks": 64}),
    (GATED_LINEAR, {"weight": _weight(48, 32)}),
]  # fmt: skip
WRONG_VALUES: list[tuple[int, Places, Places]] = [
    (EMBED, [], [(0, 32)]), (EMBED, [(0, 16)], [(16, 16)]), (SCALE, [(0, 16)], [(8, 16)]),
    (ADD, [(0, 16)], [(0, 16)]), (ADD, [(0, 16), (16, 16)], [(8, 16)]),
    (NORM, [(0, 32), (32, 32)], [(0, 32), (0, 32)]), (NORM, [(0, 16)], [(0, 16)]),
    (LINEAR, [(0, 32)], [(16, 32)]), (LINEAR, [(0, 16)], [(32, 32)]),
    (LINEAR, [(0, 32)], [(32, 65)]), (GATED_LINEAR, [(0, 32)], [(16, 32)]),
    (ACTIVATE, [(0, 16)], [(0, 8)]), (PREPARE_HEADS, [(0, 64)], [(64, 64)]),
    (PREPARE_HEADS, [(-2, 64)], [(-2, 64)]), (ATTEND, [(0, 31)], [(64, 32)]),
    (ATTEND, [(0, 64)], [(32, 32)]), (ATTEND, [(0, 64)], [(-1, 32)]),
    (SELECT, [(0, 16)], [(8, 16)]), (SCATTER, [(0, 16), (16, 16)], [(16, 16)]), (13, [], []),
    (HEAD_LINEAR, [(0, 32)], [(32, 32)]), (HEAD_LINEAR, [(0, 32)], [(16, 40)]),
    (ROTATE_TAILS, [(0, 32)], [(32, 32)]), (WRITE_LATENT, [(0, 40)], [(64, 40)]),
    (18, [], []),
]  # fmt: skip


def test_operations_that_would_leave_their_values_are_refused() -> None:
    operations = _native.Operations(dtype=0, width=16)
    for kind, (inputs, outputs, fields) in OPERATIONS.items():
        operations.add(kind, False, inputs, outputs, **NO_FIELDS | fields)
    for kind, wrong in WRONG_FIELDS:
        inputs, outputs, fields = OPERATIONS[kind]
        with pytest.raises(ValueError, match="Operations"):
            operations.add(kind, False, inputs, outputs, **NO_FIELDS | fields | wrong)
    for kind, inputs, outputs in WRONG_VALUES:
        with pytest.raises(ValueError, match="Operations"):
            operations.add(
                kind, False, inputs, outputs, **NO_FIELDS | OPERATIONS.get(kind, ([], [], {}))[2]
            )
    with pytest.raises(ValueError, match="rows that are wanted alone"):
        narrow = _native.Operations(dtype=0, width=16)
        narrow.add(SELECT, True, *OPERATIONS[SELECT][:2], **NO_FIELDS)
        _native.Program(narrow, narrow, 8)


def test_loading_is_begun_with_whole_targets_only() -> None:
    data = torch.zeros(32, 32)
    wrong: list[Callable[[_native.Loading], None]] = [
        lambda loading: loading.add(0, 0, False, 32, 32),
        lambda loading: loading.add(data.data_ptr() + 1, 0, False, 32, 32),
        lambda loading: loading.add(data.data_ptr(), 2, False, 32, 32),
        lambda loading: loading.add(data.data_ptr(), 0, False, HUGE, HUGE),
    ]
    for add in wrong:
        with pytest.raises(ValueError):
            add(_native.Loading(data))
    loading = _native.Loading(data)
    loading.add(data.data_ptr(), 0, False, 32, 32)
    for part in ((-1, 0, 32, 0), (0, -1, 32, 0), (0, 0, 33, 0), (0, 0, 32, 3)):
        with pytest.raises(ValueError):
            loading.add_part(*part)
    with pytest.raises(ValueError, match="do not make up all of its rows"):
        loading.start("")
    with pytest.raises(ValueError, match="number of threads"):
        loading.finish(100_000)


@pytest.mark.parametrize("count", [0, -1, 1025, 100_000])
def test_numbers_of_threads_are_bounded(count: int) -> None:
    with pytest.raises(ValueError, match="at least 1 and at most 1024"):
        cpu.set_num_threads(count)

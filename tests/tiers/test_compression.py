"""Blocks at a byte an element: as near as the form allows, whatever the values."""

from __future__ import annotations

import pytest
import torch

from quire.common.kv_formats import ByteForm
from quire.tiers.compression import Compression, Payload, Source, shared_row_len

FORMS: tuple[ByteForm, ...] = ("int8", "fp8")
ROW_LEN = 64


def rows_of(scale: float, source: Source) -> torch.Tensor:
    rows = scale * torch.randn(40, ROW_LEN, generator=torch.Generator().manual_seed(1))
    return rows.to(getattr(torch, source))


def payload_of(rows: torch.Tensor) -> Payload:
    payload: Payload = rows.reshape(-1).view(torch.uint8).numpy()
    return payload


def restored(compression: Compression, rows: torch.Tensor) -> torch.Tensor:
    packed = compression.pack(payload_of(rows))
    assert packed.nbytes == rows.numel() + 4 * len(rows)
    found = torch.from_numpy(compression.unpack(packed).copy())
    return found.view(rows.dtype).view(rows.shape)


@pytest.mark.parametrize("source", ["bfloat16", "float32"])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 3e4])
def test_int8_is_off_by_half_a_step_of_its_row(source: Source, scale: float) -> None:
    rows = rows_of(scale, source)
    found = restored(Compression("int8", source, ROW_LEN), rows)
    largest = rows.float().abs().amax(1, keepdim=True)
    rounding = 2.0**-8 if source == "bfloat16" else 1e-6
    error = (found.float() - rows.float()).abs()
    assert (error <= largest * (0.5 / 127 + rounding)).all()
    assert error.max() > 0


@pytest.mark.parametrize("source", ["bfloat16", "float32"])
def test_fp8_is_what_torch_makes_of_it(source: Source) -> None:
    rows = rows_of(1.0, source)
    scales = rows.float().abs().amax(1, keepdim=True) / 448.0
    near = (rows.float() / scales).to(torch.float8_e4m3fn).float() * scales
    found = restored(Compression("fp8", source, ROW_LEN), rows).float()
    # the other way where a value is nearly in the middle: it is rounded twice
    assert ((found - near).abs() <= 0.01 * near.abs() + 1e-6).float().mean() > 0.99
    assert ((found - rows.float()).abs() <= rows.float().abs() / 15 + scales * 2.0**-9).all()


@pytest.mark.parametrize("form", FORMS)
def test_zeros_stay_zeros_and_what_is_idle_may_be_anything(form: ByteForm) -> None:
    rows = rows_of(1.0, "float32")
    rows[3] = 0.0
    rows[5] = float("nan")
    rows[7, 2] = float("inf")
    found = restored(Compression(form, "float32", ROW_LEN), rows)
    assert (found[3] == 0).all()
    sound = [number for number in range(40) if number not in (5, 7)]
    assert (found[sound] - rows[sound]).abs().max() < 0.3


@pytest.mark.parametrize("form", FORMS)
def test_what_was_restored_is_packed_to_the_same(form: ByteForm) -> None:
    """So that going out and coming back once more changes nothing."""
    compression = Compression(form, "float32", ROW_LEN)
    first = restored(compression, rows_of(1.0, "float32"))
    assert torch.allclose(restored(compression, first), first, rtol=1e-6, atol=0.0)


def test_rows_of_several_lengths_share_their_largest_part() -> None:
    assert shared_row_len([128]) == 128 and shared_row_len([128, 96, 64]) == 32

"""Which sampling kernels run, and that falling back is explained."""

from __future__ import annotations

import pytest

from quire.kernels import cpu
from quire.kernels.reference.sampling import ReferenceSampling
from quire.sampling import select_sampling


def test_the_reference_serves_other_devices_and_says_why() -> None:
    kernels, reasons = select_sampling("cuda:0")
    assert isinstance(kernels, ReferenceSampling)
    assert any("CPU only" in reason for reason in reasons)


@pytest.mark.skipif(cpu.IMPORT_ERROR is not None, reason="the native extension is not built")
def test_the_native_kernels_are_preferred() -> None:
    kernels, reasons = select_sampling("cpu")
    assert (kernels.name, reasons) == ("cpu", [])


def test_a_missing_extension_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "IMPORT_ERROR", "no such module")
    kernels, reasons = select_sampling("cpu")
    assert kernels.name == "reference" and "no such module" in reasons[0]

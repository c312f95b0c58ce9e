"""The stub file of the extension says what is in it,
and a module of another build is told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.kernels import cpu
from quire.kernels.cpu.declarations import differences

STUB = Path(cpu.__file__).with_name("_native.pyi").read_text()


@pytest.mark.usefixtures("native")
def test_the_stub_file_is_true() -> None:
    import quire.kernels.cpu._native as native

    assert differences(native, STUB) == []
    assert {name for name in dir(native) if not name.startswith("_")} <= set(
        STUB.replace("(", " ").replace(":", " ").split()
    )


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    ("more", "found"),
    [
        ("def tomorrow(x: int, /) -> None: ...", ["no tomorrow"]),
        ("MAX_TOMORROW: int", ["no MAX_TOMORROW"]),
        (
            "class Tomorrow:\n    def __init__(self, x: int) -> None: ...",
            ["no Tomorrow", "no Tomorrow.__init__"],
        ),
        ("class KVCache:\n    def tomorrow(self) -> None: ...", ["no KVCache.tomorrow"]),
    ],
)
def test_what_is_new_is_missed(more: str, found: list[str]) -> None:
    import quire.kernels.cpu._native as native

    assert differences(native, f"{STUB}\n\n{more}\n") == found


@pytest.mark.usefixtures("native")
def test_another_number_of_parameters_is_noticed() -> None:
    import quire.kernels.cpu._native as native

    line = "def is_finite(x: int, dtype: int, count: int, /) -> bool: ..."
    assert line in STUB
    assert differences(
        native, STUB.replace(line, line.replace("count: int", "count: int, stride: int"))
    ) == ["another is_finite"]

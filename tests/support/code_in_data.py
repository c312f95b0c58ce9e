"""A guard for the whole suite: Quire's own code unpickles nothing, whatever a test makes it read.

The interpreter announces each class that an unpickler is about to find. Where a function of the
package is on the stack, it is refused; what test tools do among themselves (pytest's workers talk
in their own way) is their affair.
"""

from __future__ import annotations

import sys
from pathlib import Path

import quire

_PACKAGE = str(Path(quire.__file__).parent)


class CodeInDataError(RuntimeError):
    """Quire was about to find a class that data named."""


def _refuse(event: str, _: tuple[object, ...]) -> None:
    if event != "pickle.find_class":
        return
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            raise CodeInDataError(f"{frame.f_code.co_filename}:{frame.f_lineno} unpickles")
        frame = frame.f_back  # type: ignore[assignment]


def watch() -> None:
    """From now on, for good: such a hook cannot be taken away."""
    sys.addaudithook(_refuse)

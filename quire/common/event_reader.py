"""Server-sent events, as a client reads them."""

from __future__ import annotations

from collections.abc import Callable


class EventReader:
    """Server-sent events out of the pieces of a body: gives each event's data to `take`.

    Follows the WHATWG's definition as far as `data` goes; other fields and comments are skipped.
    """

    __slots__ = ("_left", "_lines", "_take")

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self._left = b""
        self._lines: list[bytes] = []

    def __call__(self, piece: bytes) -> None:
        """Take the next bytes, split anywhere."""
        data = self._left + piece if self._left else piece
        if b"\r" in data:
            is_cut = data.endswith(b"\r")  # perhaps half of a line end
            data = (data[:-1] if is_cut else data).replace(b"\r\n", b"\n").replace(b"\r", b"\n") + (
                b"\r" if is_cut else b""
            )
        *lines, self._left = data.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._lines.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._lines:
                self._take(self._lines[0] if len(self._lines) == 1 else b"\n".join(self._lines))
                self._lines.clear()

"""What a tenant may use up in a minute, of requests or of tokens: a bucket that holds a minute's
worth and fills all the time.

Owns the arithmetic and OpenAI's headers of it. Never refuses: the caller decides.
"""

from __future__ import annotations

_MINUTE_S = 60.0


class Allowance:
    """One bucket. `per_minute` None is unlimited, and then nothing is counted."""

    def __init__(self, per_minute: int | None, now_s: float) -> None:
        self.per_minute = per_minute
        self._left = float(per_minute or 0)
        self._at_s = now_s

    def left(self, now_s: float) -> float:
        """Return what may be used now; below 0 after an answer that was longer than what was
        left."""
        if self.per_minute is not None:
            self._left = min(
                float(self.per_minute),
                self._left + max(0.0, now_s - self._at_s) * self.per_minute / _MINUTE_S,
            )
            self._at_s = now_s
        return self._left

    def use(self, amount: float) -> None:
        """Book it; a negative amount is given back."""
        self._left -= amount

    def wait_s(self, amount: float, now_s: float) -> float:
        """Return seconds until `amount` may be used; 0 for now."""
        if self.per_minute is None:
            return 0.0
        return max(0.0, amount - self.left(now_s)) * _MINUTE_S / self.per_minute

    def headers(self, what: str, now_s: float) -> dict[str, str]:
        """Return OpenAI's rate headers: the limit, what remains of it,
        and the time until all of it does."""
        if self.per_minute is None:
            return {}
        left = self.left(now_s)
        return {
            f"x-ratelimit-limit-{what}": str(self.per_minute),
            f"x-ratelimit-remaining-{what}": str(max(0, int(left))),
            f"x-ratelimit-reset-{what}": duration(self.wait_s(self.per_minute, now_s)),
        }


def duration(seconds: float) -> str:
    """Return a time as OpenAI writes it: `17ms`, `7.66s`, `6m0s`; never 0 for what is not."""
    milliseconds = -int(-seconds * 1000 // 1)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g}s"
    minutes, rest = divmod(-(-milliseconds // 1000), 60)
    return f"{minutes}m{rest}s"

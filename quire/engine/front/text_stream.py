"""One sequence's text as it grows: detokenizer, then stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.params import SamplingParams
from quire.text.detokenizer import Detokenizer
from quire.text.stop import StopMatcher, StopStrings
from quire.text.tokenizer import Tokenizer


class TextStream:
    """Turns tokens into text that is safe to show. Without a tokenizer (or `detokenize=False`)
    the text stays empty."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        stop: StopStrings,
    ) -> None:
        """`stop` are those of `params`, shared by all answers."""
        self._parts: list[str] = []
        """The text that has not been taken, in pieces:
        a growing string would be copied at each token."""
        self.num_chars = 0
        """Of all that is or was safe to show."""
        self._min_tokens = params.min_tokens
        self.num_tokens = 0
        """Tokens taken."""
        self._detokenizer: Detokenizer | None = None
        self._stop: StopMatcher | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
            self._stop = stop.matcher()

    @property
    def text(self) -> str:
        """All that is safe to show, but for what was taken."""
        if len(self._parts) != 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0]

    def take(self) -> str:
        """Return the same, which is then forgotten here."""
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else "".join(parts)

    def append(self, token_id: int) -> str | None:
        """Take one token; returns the stop string that it completes, if it does."""
        self.num_tokens += 1
        if self._detokenizer is None:
            return None
        return self._show(self._detokenizer.append((token_id,)))

    def flush(self) -> str | None:
        """Show what was held back, as the sequence has ended.
        Returns a stop string that only now became complete."""
        if self._detokenizer is None:
            return None
        matched = self._show(self._detokenizer.flush())
        if self._stop is not None and matched is None:
            self._add(self._stop.flush())
        return matched

    def _show(self, text: str) -> str | None:
        if self._stop is None or self.num_tokens <= self._min_tokens:
            self._add(text)  # text before `min_tokens` is no part of any stop string
            return None
        shown, matched = self._stop.feed(text)
        self._add(shown)
        return matched

    def _add(self, text: str) -> None:
        self._parts.append(text)
        self.num_chars += len(text)

"""Token ids to text, a few tokens at a time, byte-exact at every split.

Owns the state between two pieces of streamed text: bytes of an unfinished character, and whether
the text has begun. Never decodes a token twice, so the cost is O(1) per token however long the
output; never looks at stop strings.

The reference. Let `full = tokenizer.decode(prompt + output)`. Every character of `full` comes from
the bytes of one or several tokens, and is the output's when at least one of these bytes is an
output token's. The pieces, concatenated, are exactly the output's characters of `full`. Where the
prompt ends between two characters, that is `full.removeprefix(tokenizer.decode(prompt))`. Where it
ends within a character that the output completes, the whole character belongs to the output, and
nothing else of the prompt appears. Without a prompt it is `tokenizer.decode(output)`.

Two consequences of following the library to the letter:

- Byte-level BPE: an ill-formed byte sequence becomes one U+FFFD for each maximal ill-formed part
  (Unicode 15, section 3.9), as soon as it is known to be ill-formed.
- Byte fallback (`<0xNN>` tokens): a run of byte tokens is text only if the *whole run* is
  well-formed, and otherwise one U+FFFD for each byte. Whether a run is well-formed is not known
  before its end, so a run is held back until then.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable, Sequence
from typing import Final

from quire.text.tokenizer import Tokenizer

_REPLACEMENT: Final = "\ufffd"
_MAX_PENDING: Final = 3  # the longest incomplete UTF-8 character


class Detokenizer:
    """The streamed text of one sequence; see the module for the text that it equals.

    `skip_special_tokens` leaves special tokens out, as in `Tokenizer.decode`.
    `spaces_between_special_tokens` matters only to tokenizers that put a space between words: False
    sets added tokens that follow each other without one.

    Raises UnsupportedModelError when the tokenizer has a decoder that cannot be followed token by
    token.
    """

    __slots__ = (
        "_is_spaced",
        "_num_prompt_bytes",
        "_pending",
        "_rules",
        "_run",
        "_skipped",
        "_started",
        "_strip_left",
        "_tokenizer",
        "_was_added",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._rules = tokenizer.decoder_rules
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._is_spaced = spaces_between_special_tokens or skip_special_tokens
        self._pending = b""  # of a byte-level tokenizer: the unfinished character
        self._run = bytearray()  # of a tokenizer with byte tokens: the unfinished run of them
        self._num_prompt_bytes = 0  # how many of these are the prompt's
        self._started = False  # whether any token has contributed
        self._strip_left = self._rules.strip_len
        self._was_added = False
        self._enter(prompt_token_ids)

    def append(self, token_ids: Iterable[int]) -> str:
        """Return the new text that these output tokens complete, possibly empty."""
        tokenizer, skipped = self._tokenizer, self._skipped
        if self._rules.kind == "bytes":
            piece = tokenizer.token_bytes
            return self._feed_bytes(
                b"".join([piece(token) for token in token_ids if token not in skipped])
            )
        return "".join([self._feed_token(token) for token in token_ids if token not in skipped])

    def flush(self) -> str:
        """Return the rest of the text at the end of the output: what is held back,
        ill-formed as it may be."""
        if self._rules.kind != "bytes":
            return self._end_run()
        pending, self._pending = self._pending, b""
        is_prompt, self._num_prompt_bytes = self._num_prompt_bytes > 0, 0
        return "" if is_prompt else pending.decode(errors="replace")

    def copy(self) -> Detokenizer:
        """Return an independent detokenizer in the same state, for a fork of the sequence;
        O(bytes held back)."""
        fork = object.__new__(Detokenizer)
        for name in Detokenizer.__slots__:
            setattr(fork, name, getattr(self, name))
        fork._run = self._run.copy()
        return fork

    # The prompt.

    def _enter(self, prompt: Sequence[int]) -> None:
        """Reach the state after the prompt from its two ends: its start until the text has begun,
        then its last bytes.
        """
        if self._rules.is_start_sensitive:
            for token in prompt:
                self.append((token,))
                if self._started and self._strip_left == 0:
                    break
            else:
                self._num_prompt_bytes = len(self._run)
                return
        unfinished = self._unfinished_bytes(prompt)
        if self._rules.kind == "bytes":
            self._pending = unfinished
        else:
            self._run = bytearray(unfinished)
        self._num_prompt_bytes = len(unfinished)

    def _unfinished_bytes(self, prompt: Sequence[int]) -> bytes:
        """Return the bytes at the prompt's end whose text is not decided: an incomplete character,
        or a run of byte tokens."""
        is_byte_level = self._rules.kind == "bytes"
        pieces: list[bytes] = []
        num_bytes = 0
        for token in reversed(prompt):
            if token in self._skipped:
                continue
            piece = self._tokenizer.token_piece(token)
            if piece is None:
                continue
            if isinstance(piece, str) or (is_byte_level and num_bytes >= _MAX_PENDING):
                self._was_added = self._was_added if pieces else self._tokenizer.is_added(token)
                break
            pieces.append(piece)
            num_bytes += len(piece)
        run = b"".join(reversed(pieces))
        return _incomplete_tail(run) if is_byte_level else run

    # One UTF-8 stream (byte-level BPE).

    def _feed_bytes(self, data: bytes) -> str:
        if not data:
            return ""
        is_broken = self._num_prompt_bytes > 0 and _is_ill_formed(self._pending + data[:1])
        self._num_prompt_bytes = 0
        data = self._pending + data
        text, num_used = utf_8_decode(data, "replace", False)
        self._pending = data[num_used:]
        if is_broken:  # the first U+FFFD stands for bytes of the prompt alone
            text = text[1:]
        return text

    # Text tokens with byte tokens among them.

    def _feed_token(self, token: int) -> str:
        piece = self._tokenizer.token_piece(token)
        if piece is None:
            return ""
        if not self._started and self._rules.drop_first:
            piece = self._tokenizer.first_token_piece(token)
        if isinstance(piece, bytes):
            self._started = True
            self._run += piece
            return ""
        if self._rules.kind == "join":
            piece = self._space_before(token) + piece
        self._started = True
        return self._end_run() + self._strip(piece)

    def _space_before(self, token: int) -> str:
        is_added = self._tokenizer.is_added(token)
        is_tight = is_added and self._was_added and not self._is_spaced
        self._was_added = is_added
        return "" if is_tight or not self._started else " "

    def _end_run(self) -> str:
        """Return the output's text of the run of byte tokens that ends here."""
        if not self._run:
            return ""
        run, num_prompt = bytes(self._run), self._num_prompt_bytes
        self._run, self._num_prompt_bytes = bytearray(), 0
        try:
            text = run.decode()
            num_before = len(utf_8_decode(run[:num_prompt], "strict", False)[0])
        except UnicodeDecodeError:
            text, num_before = _REPLACEMENT * len(run), num_prompt
        self._strip(text[:num_before])
        return self._strip(text[num_before:])

    # The start of the text.

    def _strip(self, text: str) -> str:
        """Remove what the decoder strips at the start of the whole text;
        `text` is the next part of it."""
        while self._strip_left and text:
            if text[0] != self._rules.strip_char:
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text


def _is_ill_formed(data: bytes) -> bool:
    """Return whether no continuation makes `data` well-formed UTF-8."""
    try:
        utf_8_decode(data, "strict", False)
    except UnicodeDecodeError:
        return True
    return False


def _incomplete_tail(data: bytes) -> bytes:
    """Return the incomplete character at the end of a UTF-8 stream,
    of which `data` is at least the last three bytes."""
    for length in range(1, min(_MAX_PENDING, len(data)) + 1):
        if data[-length] >= 0xC0:  # a lead byte
            tail = data[-length:]
            return tail[utf_8_decode(tail, "replace", False)[1] :]
        if data[-length] < 0x80:
            break
    return b""

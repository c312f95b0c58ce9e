"""A vocabulary that a test can read: single bytes, a few longer tokens, one end of sequence,
one id without text."""

from __future__ import annotations

from quire.grammar.backend import Vocabulary

EOS, UNUSED, TRUE, QUOTES = 256, 257, 258, 259
TOKENS = [*(bytes([byte]) for byte in range(256)), b"<eos>", b"", b"true", b'""']


def byte_vocabulary() -> Vocabulary:
    """The tokens above."""
    return Vocabulary(TOKENS, frozenset({EOS}), (EOS,))

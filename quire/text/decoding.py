"""How a tokenizer turns tokens back into text, read from the `decoder` of its `tokenizer.json`.

Owns the one description (`DecoderRules`) from which both the exact bytes of a token and the
incremental detokenizer follow. It decides nothing about special tokens or prompts, and holds no
state.

Three kinds cover the generative tokenizers in use: byte-level BPE (GPT-2, Llama 3, Qwen),
SentencePiece conversions with byte fallback (Llama 2, Phi-3, Gemma, Mistral) and plain words joined
by spaces. A decoder outside these is refused by name, because a guess would corrupt streamed text
silently.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from quire.errors import UnsupportedModelError

Piece = str | bytes
"""What one token contributes: bytes that are decoded together with their neighbours,
or finished text."""


def _byte_alphabet() -> dict[str, int]:
    """Return the printable stand-in of each byte in byte-level BPE (Radford et al., GPT-2, 2019:
    `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF: Final = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class DecoderRules:
    """A decoder reduced to what each token contributes and what happens at the start of the text.

    kind: "bytes" (byte-level BPE: all tokens are bytes of one UTF-8 stream), "text" (tokens are
    text, `<0xNN>` tokens are bytes when `has_byte_fallback`), or "join" (words with one space
    between). replacements: (old, new) pairs applied to the text of each token, in order.
    drop_first: characters removed altogether from the first token of a text ("" for none).
    strip_char, strip_len: up to `strip_len` of `strip_char` are removed at the start of the whole
    text.
    """

    kind: Literal["bytes", "text", "join"]
    replacements: tuple[tuple[str, str], ...] = ()
    has_byte_fallback: bool = False
    drop_first: str = ""
    strip_char: str = ""
    strip_len: int = 0

    @property
    def is_start_sensitive(self) -> bool:
        """Whether the first tokens of a text decode differently from later ones."""
        return self.kind == "join" or bool(self.drop_first) or self.strip_len > 0

    def piece(self, token: str) -> Piece:
        """Return the contribution of a token that is not the first of its text."""
        if self.kind == "bytes":
            return _decode_byte_level(token)
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.has_byte_fallback:
            byte = _fallback_byte(token)
            if byte is not None:
                return byte
        return token

    def first_piece(self, token: str) -> Piece:
        """Return the contribution of the first token of a text, before `strip_char`."""
        return (
            self.piece(token.replace(self.drop_first, "")) if self.drop_first else self.piece(token)
        )


def _decode_byte_level(token: str) -> bytes:
    """Return bytes of a byte-level token; a token with a character outside the
    alphabet stands for its own UTF-8."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()


def _fallback_byte(token: str) -> bytes | None:
    """Return the byte that a token `<0xNN>` stands for, or None."""
    if len(token) != 6 or not token.startswith("<0x") or token[5] != ">":
        return None
    try:
        return bytes.fromhex(token[3:5])
    except ValueError:
        return None


def read_decoder(decoder: dict[str, Any] | None) -> DecoderRules:
    """Compile the JSON of a decoder.

    Raises UnsupportedModelError for a decoder, or an order of decoders, that cannot be followed
    token by token.
    """
    if decoder is None:
        return DecoderRules("join")
    stages = list(_flatten(decoder))
    if [stage["type"] for stage in stages] == ["ByteLevel"]:
        return DecoderRules("bytes")
    return _read_text_stages(stages)


def _flatten(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the stages of a decoder, nested sequences unrolled."""
    if decoder["type"] == "Sequence":
        for stage in decoder["decoders"]:
            yield from _flatten(stage)
    else:
        yield decoder


def _read_text_stages(stages: list[dict[str, Any]]) -> DecoderRules:
    replacements: list[tuple[str, str]] = []
    found: dict[str, Any] = {}
    is_fused = False
    for stage in stages:
        name = stage["type"]
        old = stage.get("pattern", {}).get("String") if name == "Replace" else None
        if name == "Replace" and old and not is_fused and "has_byte_fallback" not in found:
            replacements.append((old, stage["content"]))
        elif name == "ByteFallback" and not is_fused:
            found["has_byte_fallback"] = True
        elif name == "Fuse":
            is_fused = True
        elif name == "Strip" and is_fused and not stage["stop"] and "strip_len" not in found:
            found |= {"strip_char": stage["content"], "strip_len": stage["start"]}
        elif name == "Metaspace" and len(stages) == 1:
            replacements.append((stage["replacement"], " "))
            if stage.get("prepend_scheme", "always") != "never":
                found["drop_first"] = stage["replacement"]
        else:
            raise UnsupportedModelError(_refusal(stage, stages))
    return DecoderRules("text", replacements=tuple(replacements), **found)


def _refusal(stage: dict[str, Any], stages: list[dict[str, Any]]) -> str:
    chain = " -> ".join(str(each["type"]) for each in stages)
    return (
        f"the tokenizer's decoder {chain} cannot be followed token by token: stage {stage} "
        "is not implemented here; "
        "supported are ByteLevel, Metaspace, and Replace/ByteFallback/Fuse/Strip as "
        "SentencePiece conversions use. "
        "Use skip_tokenizer_init=True and token ids instead"
    )

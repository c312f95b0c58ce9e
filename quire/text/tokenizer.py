"""Text to token ids and back, for a model folder's `tokenizer.json`.

Owns the tokenizer of one model: encoding with and without special tokens, plain decoding, and the
exact bytes of each token. Streaming is the detokenizer's. Safe to share between threads once made;
nothing here changes after construction.

Special tokens in a client's text. A tokenizer has *control* tokens, which structure a prompt, and
ordinary added tokens, which abbreviate text (runs of spaces, HTML tags).
`encode(parse_special=False)` never gives a control token for text that merely spells one:
`<|im_end|>` becomes the pieces of that text. Controls are: every token marked special; the named
ones (`eos_token`, ...) and their usual spellings (`</s>`, ...); those spelt `<|...|>`; and
bracketed ones that a chat template of the model writes itself, such as `<tool_call>`. See
`guard.py` for how it is done, and `control_level` for the two degrees.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from quire.errors import CheckpointError, InvalidParameterError, RequestError
from quire.text.backend import contained, encode_bare, load_backend
from quire.text.decoding import DecoderRules, Piece, read_decoder
from quire.text.files import TextConfig, read_text_config, read_tokenizer_json
from quire.text.guard import Guard

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

STRICT_LEVEL: Final = 2
LENIENT_LEVEL: Final = 1
_MAX_AFFIXES: Final = 64
_CONVENTIONAL: Final = frozenset({"<s>", "</s>", "<unk>", "<pad>", "<bos>", "<eos>", "<mask>"})


class Tokenizer:
    """The tokenizer of one model, from the text of a `tokenizer.json` and what the files beside it
    say.

    special_token_ids: the ids that `decode` skips. control_level: text of each control token to 2
    (only a template may mean it) or 1 (an assistant's message may, too). guard: the encoder that
    reads control tokens only where it is told to.
    """

    def __init__(self, tokenizer_json: str, config: TextConfig | None = None) -> None:
        self.config = config or TextConfig()
        self._backend = load_backend(tokenizer_json)
        with contained(CheckpointError, "tokenizer.json cannot be used"):
            _declare_special_tokens(self._backend, self.config)
            self._added: dict[int, AddedToken] = self._backend.get_added_tokens_decoder()
            self.special_token_ids = frozenset(
                token_id for token_id, token in self._added.items() if token.special
            )
            self.control_level = _control_levels(self._added.values(), self.config)
            controls = {token.content: token_id for token_id, token in self._added.items()}
            controls = {
                text: token_id for text, token_id in controls.items() if text in self.control_level
            }
            self.guard = Guard(self._backend, tokenizer_json, controls)
            self._prefix, self._suffix = self._find_affixes()
        self._tokens: dict[int, str | None] = {}
        self._pieces: dict[int, Piece | None] = {}
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Read a model folder. Raises ModelNotFoundError or CheckpointError."""
        folder = Path(path)
        return cls(read_tokenizer_json(folder), read_text_config(folder))

    # Ids.

    @cached_property
    def vocab_size(self) -> int:
        """One above the largest token id (a model's logits may have more columns,
        which have no text)."""
        return max(
            self._backend.get_vocab_size(with_added_tokens=True),
            *(each + 1 for each in self._added),
            0,
        )

    @cached_property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @cached_property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the default chat template, if the model has one."""
        return self.config.chat_templates.get("default")

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token by its text in the vocabulary, or None."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    @property
    def backend(self) -> Backend:
        """The tokenizer of the `tokenizers` library, to be read and not to be changed."""
        return self._backend

    @property
    def affixes(self) -> tuple[list[int], list[int]]:
        """What `encode` puts before and after a text."""
        return self._prefix, self._suffix

    def is_added(self, token_id: int) -> bool:
        """Return whether the token was added beside the model's own vocabulary (special or not)."""
        return token_id in self._added

    # Text to ids.

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Return token ids of a text.

        `add_special_tokens` puts before and after it what the tokenizer's post-processor adds
        (a BOS, usually). `parse_special` reads control tokens in the text as the tokens that they
        spell: for prompts that a programmer wrote, never for text of users. Raises
        InvalidParameterError for text that is not Unicode (a lone surrogate).
        """
        check_unicode(text)
        ids = encode_bare(self._backend, text) if parse_special else self.guard.encode(text)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def encode_secret(self, text: str) -> list[int]:
        """Return token ids of a text that may have the guard's secret names in it, without BOS or
        EOS."""
        check_unicode(text)
        return self.guard.encode(text)

    def beginning(self, text: str, num_tokens: int) -> str:
        """Return so much of a user's text as has at most so many tokens, without BOS or EOS."""
        check_unicode(text)
        return self.guard.beginning(text, num_tokens)

    @cached_property
    def control_lengths(self) -> Mapping[str, tuple[int, ...]]:
        """First character of control tokens to their lengths, longest first."""
        lengths: dict[str, set[int]] = {}
        for text in self.control_level:
            lengths.setdefault(text[0], set()).add(len(text))
        return {char: tuple(sorted(each, reverse=True)) for char, each in lengths.items()}

    # Ids to text.

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, exactly as the `tokenizers` library gives it; ids without a
        token contribute nothing.

        Text is never "cleaned up" (no spaces are removed before punctuation), whatever
        `tokenizer_config.json` says.
        """
        with contained(RequestError, "the model's tokenizer cannot decode these tokens"):
            text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
            return text

    @cached_property
    def decoder_rules(self) -> DecoderRules:
        """How tokens become text one by one. Raises UnsupportedModelError for a
        decoder that does not work so."""
        with contained(CheckpointError, "tokenizer.json cannot be used"):
            decoder = self._backend.decoder
            return read_decoder(
                None if decoder is None else json.loads(bytes(decoder.__getstate__()))
            )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes that a token contributes to a text when it is not the first, b""
        for an id without a token.
        """
        data = self._bytes.get(token_id)
        if data is None:
            piece = self.token_piece(token_id)
            data = piece.encode() if isinstance(piece, str) else piece or b""
            self._bytes[token_id] = data
        return data

    def read_bytes(self, token_id: int) -> bytes:
        """Return what `token_bytes` does, and keep nothing: for a walk over the whole
        vocabulary."""
        token = self._backend.id_to_token(token_id)
        piece = None if token is None else self.decoder_rules.piece(token)
        return piece.encode() if isinstance(piece, str) else piece or b""

    def raw_token(self, token_id: int) -> str | None:
        """Return a token as the vocabulary writes it (`Ġcat`, `▁cat`, `<0x0A>`),
        or None for an id without a token."""
        if token_id not in self._tokens:
            self._tokens[token_id] = (
                self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
            )
        return self._tokens[token_id]

    def token_piece(self, token_id: int) -> Piece | None:
        """Return what a token contributes when it is not the first of a text,
        or None for an id without a token."""
        try:
            return self._pieces[token_id]
        except KeyError:
            token = self.raw_token(token_id)
            piece = self._pieces[token_id] = (
                None if token is None else self.decoder_rules.piece(token)
            )
            return piece

    def first_token_piece(self, token_id: int) -> Piece:
        """Return what a token contributes as the first of a text. The id must have a token."""
        token = self.raw_token(token_id)
        assert token is not None, token_id
        return self.decoder_rules.first_piece(token)

    # Construction.

    def _named_id(self, role: str) -> int | None:
        text = self.config.named_tokens.get(role)
        return None if text is None else self.token_to_id(text)

    def _find_affixes(self) -> tuple[list[int], list[int]]:
        """Return the ids that the post-processor puts before and after a text.

        Without a post-processor, `add_bos_token` and `add_eos_token` of the configuration decide;
        with one they do not, as in transformers.
        """
        if self._backend.post_processor is None:
            bos, eos = self.bos_token_id, self.eos_token_id
            prefix = [bos] if self.config.add_bos_token and bos is not None else []
            return prefix, [eos] if self.config.add_eos_token and eos is not None else []
        bare: list[int] = self._backend.encode("a", add_special_tokens=False).ids
        full: list[int] = self._backend.encode("a", add_special_tokens=True).ids
        if len(full) > len(bare) + _MAX_AFFIXES:
            raise CheckpointError(
                f"tokenizer.json has a post-processor that adds more than {_MAX_AFFIXES} "
                "tokens to a text"
            )
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        raise CheckpointError(
            "tokenizer.json has a post-processor that changes the text's own tokens: not supported"
        )


def _declare_special_tokens(backend: Backend, config: TextConfig) -> None:
    """Mark the tokens that the configuration declares special,
    adding those that the vocabulary lacks."""
    from tokenizers import AddedToken

    texts = dict.fromkeys([*config.named_tokens.values(), *config.extra_special_tokens])
    present = {
        token.content for token in backend.get_added_tokens_decoder().values() if token.special
    }
    missing = [
        AddedToken(text, normalized=False, special=True) for text in texts if text not in present
    ]
    backend.add_special_tokens(missing)


def _control_levels(added: Iterable[AddedToken], config: TextConfig) -> dict[str, int]:
    """Return the control tokens: text to the degree of trust that it takes to mean the token.

    2: only a template, never a message. 1: also an assistant's message, since the model may have
    written it as a token.
    """
    templates = "\n".join(config.chat_templates.values())
    named = {*config.named_tokens.values(), *_CONVENTIONAL}
    levels = {}
    for token in added:
        text = token.content
        if token.special or text in named or (text.startswith("<|") and text.endswith("|>")):
            levels[text] = STRICT_LEVEL
        elif _is_bracketed(text) and text in templates:
            levels[text] = LENIENT_LEVEL
    return levels


def check_unicode(text: str) -> None:
    """Raises InvalidParameterError for a lone surrogate, which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameterError(
            f"the text is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X} "
            f"at position {error.start}"
        ) from None


def _is_bracketed(text: str) -> bool:
    """Return whether a token looks like markup: a name between two pieces of ASCII punctuation."""
    ends: Iterable[Any] = (text[:1], text[-1:])
    is_enclosed = all(
        end.isascii() and end.isprintable() and not end.isalnum() and end != " " for end in ends
    )
    return len(text) > 2 and is_enclosed and any(char.isalnum() for char in text)

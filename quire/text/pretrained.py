"""A model's tokenizer with the methods and the results of transformers' fast tokenizers.

For programs that know those: names, defaults and values are transformers', down to special tokens,
which are read wherever a text spells them. (The engine's own tokenizer keeps users' text apart from
them, see `quire.text.tokenizer`.) Never changed by a call, and safe to share between threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

from quire.errors import InvalidParameterError
from quire.text.chat import ChatTemplate
from quire.text.tokenizer import Tokenizer, check_unicode

NAMED_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
NO_LENGTH: Final = int(1e30)
"""What transformers says where a tokenizer names no longest text."""
_IGNORED: Final = frozenset(
    {"verbose", "clean_up_tokenization_spaces", "spaces_between_special_tokens"}
)


class BatchEncoding(dict[str, Any]):
    """Token ids and what goes with them, by name; names are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def data(self) -> dict[str, Any]:
        """Itself."""
        return self

    def to(self, device: Any) -> BatchEncoding:
        """Return the same with every tensor on a device."""
        return BatchEncoding(
            {name: each.to(device) if hasattr(each, "to") else each for name, each in self.items()}
        )


class _Shape(NamedTuple):
    """What is done with the ids of one call."""

    add_special_tokens: bool = True
    padding: bool | str = False
    truncation: bool | str | None = None
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    padding_side: str | None = None
    return_tensors: str | None = None
    return_attention_mask: bool | None = None
    return_token_type_ids: bool | None = None
    return_special_tokens_mask: bool = False
    return_offsets_mapping: bool = False
    return_length: bool = False


class _EncodedText(NamedTuple):
    """One text's tokens."""

    ids: list[int]
    types: list[int]
    specials: list[int]
    offsets: list[tuple[int, int]]


class PretrainedTokenizer:
    """The tokenizer of one model.

    tokenizer: the model's. name: the folder or hub name that it goes by.
    """

    is_fast = True
    pad_token_type_id = 0
    model_input_names = ("input_ids", "attention_mask")

    def __init__(self, tokenizer: Tokenizer, name: str = "") -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend
        self.name_or_path = name
        config = tokenizer.config
        self.chat_template = tokenizer.chat_template
        self.padding_side = config.padding_side
        self.truncation_side = config.truncation_side
        self.model_max_length = config.model_max_length or NO_LENGTH

    def __repr__(self) -> str:
        return (
            f"PretrainedTokenizer(name_or_path={self.name_or_path!r}, vocab_size={self.vocab_size})"
        )

    # The vocabulary.

    @cached_property
    def vocab_size(self) -> int:
        """Tokens without those that were added beside the model's vocabulary."""
        return int(self._backend.get_vocab_size(with_added_tokens=False))

    def __len__(self) -> int:
        """Return tokens with those that were added."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def get_vocab(self) -> dict[str, int]:
        """Return every token's text to its id."""
        vocab: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocab

    @property
    def vocab(self) -> dict[str, int]:
        """The same."""
        return self.get_vocab()

    @property
    def max_token_id(self) -> int:
        """The largest id."""
        return self._tokenizer.vocab_size - 1

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Id to record of the added tokens."""
        added: dict[int, Any] = self._backend.get_added_tokens_decoder()
        return dict(sorted(added.items()))

    @property
    def added_tokens_encoder(self) -> dict[str, int]:
        """Text to id of the added tokens."""
        return {token.content: token_id for token_id, token in self.added_tokens_decoder.items()}

    def get_added_vocab(self) -> dict[str, int]:
        """Return the same."""
        return self.added_tokens_encoder

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Named tokens (`bos_token`, ...) by their roles."""
        named = self._tokenizer.config.named_tokens
        return {role: named[role] for role in NAMED_TOKENS if role in named}

    @property
    def all_special_tokens(self) -> list[str]:
        """Named tokens, then the further ones that the configuration declares."""
        texts = [*self.special_tokens_map.values(), *self._tokenizer.config.extra_special_tokens]
        return list(dict.fromkeys(texts))

    @property
    def all_special_ids(self) -> list[int]:
        """Their ids."""
        return [self._id_of(text) for text in self.all_special_tokens]  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        """`bos_token`, `eos_token_id` and so on: None where the model has none."""
        role = name.removesuffix("_id")
        if role not in NAMED_TOKENS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        text = self._tokenizer.config.named_tokens.get(role)
        return text if role == name or text is None else self._tokenizer.token_to_id(text)

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """Return the id of a token, or of each; that of the unknown token, or None,
        for what is no token."""
        return (
            self._id_of(tokens)
            if isinstance(tokens, str)
            else [self._id_of(token) for token in tokens]
        )

    def convert_ids_to_tokens(
        self, ids: int | Iterable[int], skip_special_tokens: bool = False
    ) -> Any:
        """Return the vocabulary's text of an id, or of each; None for an id without a token."""
        if isinstance(ids, int):
            return self._backend.id_to_token(ids)
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        return [self._backend.id_to_token(int(each)) for each in ids if int(each) not in skipped]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Return the text that tokens of the vocabulary stand for."""
        decoder = self._backend.decoder
        return " ".join(tokens) if decoder is None else str(decoder.decode(tokens))

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """Return tokens that a text gets before and after it."""
        if self._backend.post_processor is not None:
            return int(self._backend.num_special_tokens_to_add(pair))
        return sum(map(len, self._tokenizer.affixes))

    def get_chat_template(self, chat_template: str | None = None, tools: object = None) -> str:
        """Return the Jinja source that `apply_chat_template` uses: given itself or by name,
        or the model's."""
        named = self._tokenizer.config.chat_templates
        if chat_template is not None:
            return named.get(chat_template, chat_template)
        source = (
            named.get("tool_use")
            if tools is not None and "tool_use" in named
            else self.chat_template
        )
        if source is None:
            raise InvalidParameterError(
                "this model has no chat template; give one as chat_template", param="chat_template"
            )
        return source

    # Text to ids.

    def __call__(self, text: Any = None, text_pair: Any = None, **options: Any) -> BatchEncoding:
        """Return token ids and attention mask of a text, or of each of a list of texts.
        Options are transformers'."""
        shape = _shape(options)
        is_batch = isinstance(text, list | tuple)
        texts = list(text) if is_batch else [text]
        pairs = list(text_pair) if is_batch and text_pair is not None else [text_pair] * len(texts)
        if len(pairs) != len(texts):
            raise InvalidParameterError(
                f"{len(pairs)} text_pairs for {len(texts)} texts", param="text_pair"
            )
        made = [
            self._truncated(self._encoded(*each, shape), shape)
            for each in zip(texts, pairs, strict=True)
        ]
        return self._assembled(made, shape, is_batch=is_batch)

    def encode(self, text: Any, text_pair: Any = None, **options: Any) -> Any:
        """Return token ids of a text, with the special tokens around it unless
        `add_special_tokens=False`."""
        if isinstance(text, list) and text and all(isinstance(each, int) for each in text):
            return list(text)
        return self(text, text_pair, **options)["input_ids"]

    def batch_encode(self, texts: Sequence[str], **options: Any) -> BatchEncoding:
        """`__call__` for several texts."""
        return self(list(texts), **options)

    encode_plus = __call__
    batch_encode_plus = batch_encode

    def tokenize(
        self, text: str, pair: str | None = None, add_special_tokens: bool = False, **options: Any
    ) -> list[str]:
        """Return the vocabulary's texts of a text's tokens."""
        ids = self(text, pair, add_special_tokens=add_special_tokens, **options)["input_ids"]
        tokens: list[str] = self.convert_ids_to_tokens(ids)
        return tokens

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Return messages as the model's template writes them: text with `tokenize=False`, else
        `__call__` of it.

        Options that `__call__` knows go there, all others to the template.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidParameterError(
                "continue_final_message and add_generation_prompt contradict each other; "
                "give one of them",
                param="continue_final_message",
            )
        encoding = {name: options.pop(name) for name in list(options) if name in _Shape._fields}
        template = ChatTemplate(
            self.get_chat_template(chat_template, tools), self._tokenizer.config.named_tokens
        )
        is_batch = bool(conversation) and not isinstance(conversation[0], Mapping)
        rendered = [
            template.render(
                each,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                documents=documents,
                template_kwargs=options,
            )
            for each in (conversation if is_batch else [conversation])
        ]
        texts: Any = ["".join((each,)) for each in rendered]
        texts = texts if is_batch else texts[0]
        if not tokenize:
            return texts
        encoded = self(
            texts, **{"add_special_tokens": False, **encoding, **(tokenizer_kwargs or {})}
        )
        return encoded if return_dict else encoded["input_ids"]

    # Ids to text.

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **ignored: Any) -> Any:
        """Return the text of token ids, or of each of a list of such lists."""
        _check_ignored(ignored)
        ids = _as_list(token_ids)
        if ids and isinstance(ids[0], list):
            return [self._decoded(each, skip_special_tokens) for each in ids]
        return self._decoded(ids, skip_special_tokens)

    def batch_decode(
        self, sequences: Any, skip_special_tokens: bool = False, **ignored: Any
    ) -> list[str]:
        """Return the text of each list of token ids."""
        _check_ignored(ignored)
        return [self._decoded(_as_list(each), skip_special_tokens) for each in sequences]

    def pad(
        self, encoded_inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]], **options: Any
    ) -> BatchEncoding:
        """Return token ids that were encoded before, brought to one length.
        Options are those of `__call__`."""
        if isinstance(encoded_inputs, Mapping):
            rows = [_as_list(each) for each in encoded_inputs["input_ids"]]
        else:
            rows = [_as_list(each["input_ids"]) for each in encoded_inputs]
        shape = _shape({"padding": True, **options})
        return self._assembled(
            [_EncodedText(row, [0] * len(row), [0] * len(row), []) for row in rows],
            shape,
            is_batch=True,
        )

    # Inside.

    def _id_of(self, token: str) -> int | None:
        token_id = self._tokenizer.token_to_id(token)
        return self.unk_token_id if token_id is None else token_id

    def _decoded(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def _encoded(self, text: object, pair: object, shape: _Shape) -> _EncodedText:
        for each in (text, pair):
            if not isinstance(each, str) and (each is not pair or each is not None):
                raise InvalidParameterError(
                    f"a text must be str, not {type(each).__name__}", param="text"
                )
        assert isinstance(text, str)
        check_unicode(text)
        own = self._backend.post_processor is not None and shape.add_special_tokens
        made = self._backend.encode(text, pair, add_special_tokens=own)
        parts = _EncodedText(made.ids, made.type_ids, made.special_tokens_mask, made.offsets)
        if own or not shape.add_special_tokens:
            return parts
        before, after = self._tokenizer.affixes
        num = (len(before), len(after))
        return _EncodedText(
            [*before, *parts.ids, *after],
            [0] * num[0] + parts.types + [0] * num[1],
            [1] * num[0] + parts.specials + [1] * num[1],
            [(0, 0)] * num[0] + parts.offsets + [(0, 0)] * num[1],
        )

    def _truncated(self, text: _EncodedText, shape: _Shape) -> _EncodedText:
        """Cut to `max_length`, special tokens around the text kept."""
        limit = self.model_max_length if shape.max_length is None else shape.max_length
        is_wanted = shape.truncation not in (None, False, "do_not_truncate")
        excess = len(text.ids) - limit
        if not is_wanted or excess <= 0:
            return text
        ends = self._num_around(text) if shape.add_special_tokens else (0, 0)
        first, last = ends[0], len(text.ids) - ends[1]
        cut = (
            slice(first, first + excess)
            if self.truncation_side == "left"
            else slice(last - excess, last)
        )
        if excess > last - first:
            raise InvalidParameterError(
                f"max_length={limit} leaves no room for special tokens", param="max_length"
            )
        ids, types, specials, offsets = (
            list(text.ids),
            list(text.types),
            list(text.specials),
            list(text.offsets),
        )
        del ids[cut], types[cut], specials[cut], offsets[cut]
        return _EncodedText(ids, types, specials, offsets)

    @staticmethod
    def _num_around(text: _EncodedText) -> tuple[int, int]:
        """Special tokens at the beginning and at the end that belong to no text."""
        num = len(text.specials)
        before = next((place for place, flag in enumerate(text.specials) if not flag), num)
        after = next((place for place, flag in enumerate(reversed(text.specials)) if not flag), num)
        return before, after

    def _assembled(
        self, texts: list[_EncodedText], shape: _Shape, *, is_batch: bool
    ) -> BatchEncoding:
        width = self._width([len(text.ids) for text in texts], shape)
        side = shape.padding_side or self.padding_side
        columns: dict[str, list[Any]] = {
            "input_ids": [self._filled(t.ids, width, self.pad_token_id, side) for t in texts]
        }
        if shape.return_token_type_ids:
            columns["token_type_ids"] = [self._filled(text.types, width, 0, side) for text in texts]
        if shape.return_attention_mask is not False:
            columns["attention_mask"] = [
                self._filled([1] * len(text.ids), width, 0, side) for text in texts
            ]
        if shape.return_special_tokens_mask:
            columns["special_tokens_mask"] = [
                self._filled(text.specials, width, 1, side) for text in texts
            ]
        if shape.return_offsets_mapping:
            columns["offset_mapping"] = [
                self._filled(text.offsets, width, (0, 0), side) for text in texts
            ]
        if shape.return_length:
            columns["length"] = [len(each) for each in columns["input_ids"]]
        if shape.return_tensors is not None:
            return BatchEncoding(
                {name: _tensor(rows, shape.return_tensors) for name, rows in columns.items()}
            )
        return BatchEncoding(
            columns if is_batch else {name: rows[0] for name, rows in columns.items()}
        )

    def _width(self, lengths: list[int], shape: _Shape) -> int:
        """Return the length that every row is filled up to; 0 for each its own."""
        if shape.padding in (False, "do_not_pad") or not lengths:
            return 0
        if self.pad_token_id is None:
            raise InvalidParameterError(
                "padding needs a pad token, and this tokenizer has none", param="padding"
            )
        width = max(lengths)
        if shape.padding == "max_length":
            limit = self.model_max_length if shape.max_length is None else shape.max_length
            width = max(width, limit) if limit < NO_LENGTH else width
        multiple = shape.pad_to_multiple_of or 1
        return -(-width // multiple) * multiple

    @staticmethod
    def _filled(row: Sequence[Any], width: int, value: Any, side: str) -> list[Any]:
        fill = [value] * max(0, width - len(row))
        return [*fill, *row] if side == "left" else [*row, *fill]


def _shape(options: Mapping[str, Any]) -> _Shape:
    known = {name: value for name, value in options.items() if name in _Shape._fields}
    _check_ignored({name: value for name, value in options.items() if name not in known})
    return _Shape(**known)


def _check_ignored(options: Mapping[str, Any]) -> None:
    """Raise InvalidParameterError for an option that has an effect;
    those that are neutral have no effect."""
    for name, value in options.items():
        if name not in _IGNORED and value not in (None, False, 0):
            raise InvalidParameterError(f"the tokenizer has no option {name}={value!r}", param=name)


def _as_list(token_ids: Any) -> list[Any]:
    """Return ids as a list: of an int, a list, an array or a tensor."""
    if isinstance(token_ids, int):
        return [token_ids]
    return token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)


def _tensor(rows: list[Any], kind: str) -> Any:
    if len({len(row) for row in rows if isinstance(row, list)}) > 1:
        raise InvalidParameterError(
            "rows of several lengths make no tensor; set padding=True", param="return_tensors"
        )
    if kind == "np":
        import numpy

        return numpy.array(rows)
    if kind == "pt":
        import torch

        return torch.tensor(rows)
    raise InvalidParameterError(
        f"return_tensors={kind!r} is not available; choose 'pt' or 'np'", param="return_tensors"
    )

"""Encoding in which text that spells a control token stays text, unless the caller says that it is
the token.

Owns a second encoder over the same model, in which every control token goes by a secret name. Text
of users cannot spell these names (128 random bits, drawn per process), so it can never become a
control token; the caller replaces the spellings that are meant by the secret names before encoding,
and everything else about the tokenizer (what is matched first, spaces stripped around special
tokens, normalisation of the parts between them) stays as it is, because it is one call of the same
library over the whole text.

The model and its merges are shared with the first encoder, so a guard costs no memory to speak of.
Only where the model's own vocabulary could assemble a control token from plain text (Unigram
models; BPE with `ignore_merges` or with merges that end in one) a second model is built from a copy
of `tokenizer.json` in which the model does not know them either.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.errors import CheckpointError
from quire.text.backend import beginning_of, encode_bare, load_backend

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


class Guard:
    """The guarded encoder of one tokenizer.

    backend: the tokenizer as it is. tokenizer_json: the text it was made from. controls: text to id
    of the tokens that are guarded.
    """

    def __init__(self, backend: Backend, tokenizer_json: str, controls: Mapping[str, int]) -> None:
        nonce = secrets.token_hex(16)
        self._controls = dict(controls)
        self._secret_names = {
            text: f"\ue000{nonce}{token_id}\ue001" for text, token_id in controls.items()
        }
        base = backend
        if any(_is_spelt_by_model(backend, text, token_id) for text, token_id in controls.items()):
            base = _without_controls(tokenizer_json, self._secret_names)
        self._backend = self._rename(base, backend)
        self._id_of = self._map_ids(backend)

    def secret_name(self, text: str) -> str:
        """Return what to write in place of a control token's text so that it is encoded as the
        token."""
        return self._secret_names[text]

    def encode(self, text: str) -> list[int]:
        """Return token ids of a text; control tokens only where the text has their secret names.
        Adds no BOS or EOS."""
        id_of = self._id_of
        return [id_of.get(token_id, token_id) for token_id in encode_bare(self._backend, text)]

    def beginning(self, text: str, num_tokens: int) -> str:
        """Return so much of a text as has at most so many tokens; see `beginning_of`."""
        return beginning_of(self._backend, text, num_tokens)

    def _rename(self, base: Backend, backend: Backend) -> Backend:
        """Return a tokenizer over the model of `base` with the added tokens of `backend`,
        the controls under secret names."""
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Backend

        renamed = Backend(base.model)
        if backend.normalizer is not None:
            renamed.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            renamed.pre_tokenizer = backend.pre_tokenizer
        tokens = []
        for _, token in sorted(backend.get_added_tokens_decoder().items()):
            secret_name = self._secret_names.get(token.content)
            if secret_name is not None:
                flags = {
                    "lstrip": token.lstrip,
                    "rstrip": token.rstrip,
                    "single_word": token.single_word,
                }
                token = AddedToken(secret_name, normalized=False, special=True, **flags)
            tokens.append(token)
        renamed.add_tokens(tokens)
        return renamed

    def _map_ids(self, backend: Backend) -> dict[int, int]:
        """Return the ids that differ between this encoder, whose added tokens are numbered anew,
        and the tokenizer's own."""
        text_of = {secret_name: text for text, secret_name in self._secret_names.items()}
        mapping = {}
        for own_id, token in self._backend.get_added_tokens_decoder().items():
            true_id = backend.token_to_id(text_of.get(token.content, token.content))
            if true_id is None:
                raise CheckpointError(
                    f"tokenizer.json does not give an id to its added token {token.content!r}"
                )
            if true_id != own_id:
                mapping[own_id] = true_id
        return mapping


def _is_spelt_by_model(backend: Backend, text: str, token_id: int) -> bool:
    """Return whether the model alone, without added tokens,
    can turn plain text into this control token."""
    if len(text) == 1 or backend.model.token_to_id(text) != token_id:
        # a single character that is also ordinary text cannot be written any other way
        return False
    kind = type(backend.model).__name__
    if kind != "BPE" or getattr(backend.model, "ignore_merges", False):
        return True
    return any(token.id == token_id for token in backend.model.tokenize(text))


def _without_controls(tokenizer_json: str, secret_names: Mapping[str, str]) -> Backend:
    """Return the tokenizer with its control tokens renamed in the model's vocabulary, ids
    unchanged, and no merge into them.
    """
    content: dict[str, Any] = json.loads(tokenizer_json)
    model = content["model"]
    hidden = {text: name for text, name in secret_names.items() if len(text) > 1}
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: [[piece, score], ...]
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in vocab]
    else:
        model["vocab"] = {hidden.get(piece, piece): token_id for piece, token_id in vocab.items()}
    if "merges" in model:
        pairs = [
            tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair)
            for pair in model["merges"]
        ]
        model["merges"] = [
            list(pair) for pair in pairs if not hidden.keys() & {*pair, "".join(pair)}
        ]
    if model.get("unk_token") in hidden:
        model["unk_token"] = hidden[model["unk_token"]]
    content |= {"added_tokens": [], "post_processor": None}
    return load_backend(json.dumps(content))

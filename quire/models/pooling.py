"""What becomes of a text's hidden states, as plain records: pooling, layers on top, normalisation.

Says what a model does; `quire.nn.pooler` does it. Sequence classification is the same with other
names: the last layer's outputs are logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

from quire.common.frozen_record import FrozenRecord
from quire.models.declaration import DenseSpec, PoolingKind

POOLING_KINDS: tuple[PoolingKind, ...] = get_args(PoolingKind)
OutputActivation = Literal["none", "sigmoid", "softmax"]
OF_WHOLE: frozenset[PoolingKind] = frozenset(POOLING_KINDS) - {"last"}
"""Kinds that need other hidden states than the last token's."""


class QueryExpansion(FrozenRecord):
    """Queries are filled up with a token up to a length, and its vectors count."""

    length: int
    token: str | None
    """None: the tokenizer's mask token."""
    is_attended: bool
    """Whether tokens attend to the added ones; these attend to the query's in any case."""
    is_fixed: bool
    """Whether longer queries are cut to the length."""


class LateInteraction(FrozenRecord):
    """How vectors of tokens are compared (ColBERT, arXiv:2004.12832): the sum, over a query's
    tokens, of the highest product with any of a document's (MaxSim)."""

    skip_words: tuple[str, ...] = ()
    """Tokens whose vectors do not count in documents."""
    skips_queries: bool = False
    """Nor in queries."""
    expansion: QueryExpansion | None = None
    query_len: int | None = None
    """Longest query, where the folder says so."""
    is_mean: bool = False
    """The mean over a query's tokens in place of the sum."""
    is_marked: bool = False
    """As PyLate and ColBERT have it: a prompt is one token of the vocabulary behind the tokenizer's
    first, words that are not in the vocabulary stand for the unknown token, and where there is no
    mask token, that of the text's end fills queries up."""


class PoolingSpec(FrozenRecord):
    """From hidden states to vectors, or to the logits of classes."""

    task: Literal["embed", "classify"]
    kind: PoolingKind
    layers: tuple[DenseSpec, ...] = ()
    """After pooling, in order."""
    is_normalized: bool = False
    """Vectors have length 1."""
    token_ids: tuple[int, ...] = ()
    """The logits of the language model's head for these tokens take the place of the layers'."""
    is_difference: bool = False
    """One logit: that of the last of `token_ids` above that of the first."""
    is_per_token: bool = False
    """Whether each token has a vector, or classes, and the text has none; `kind` is of no use."""
    late: LateInteraction | None = None
    """How vectors of tokens are compared, where the model makes these."""
    activation: OutputActivation = "none"
    """From logits to probabilities."""
    labels: tuple[str, ...] = ()
    """Of the classes; empty where they have no names."""
    matryoshka: bool | tuple[int, ...] = False
    """Whether the first elements of a vector are a vector; the lengths that are, where the model
    names them.
    """
    prompts: Mapping[str, str] = MappingProxyType({})
    """Texts to put before an input, by name."""
    default_prompt: str | None = None
    """The name of the one that is put before inputs that ask for none."""
    counts_prompt: bool = True
    """Whether a prompt's own tokens are pooled, too."""
    max_len: int | None = None
    """Longest input in tokens, where the folder says so."""
    sources: tuple[tuple[str, str], ...] = ()
    """What was decided, and by which file."""

    def num_outputs(self, hidden_size: int) -> int:
        """Elements of a vector, or classes."""
        if self.token_ids:
            return 1 if self.is_difference else len(self.token_ids)
        return self.layers[-1].linear.num_outputs if self.layers else hidden_size

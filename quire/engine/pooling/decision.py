"""How a model pools: decided from the user's options and the model's files, each decision with its
source.

Imports no torch. A model pools where its architecture can do nothing else, where its folder says so
(the layout of sentence-transformers), or where the user asks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.common.frozen_record import replace
from quire.config.engine import EngineConfig
from quire.engine.assembly.model_files import ModelFiles
from quire.errors import ConfigError, UnsupportedModelError
from quire.models.declaration import DecoderSpec, PoolingKind
from quire.models.pooling import LateInteraction, OutputActivation, PoolingSpec
from quire.models.registry import COLBERT
from quire.text.tokenizer import Tokenizer
from quire.weights.folder import has_modules
from quire.weights.sentence_transformers import (
    StoredPooling,
    StoredTexts,
    read_colbert,
    read_modules,
    read_texts,
)

logger = logging.getLogger(__name__)

_KINDS: dict[str, PoolingKind] = {"CLS": "cls", "LAST": "last", "MEAN": "mean"}
_POOLER_KEYS = {
    "pooling_type",
    "seq_pooling_type",
    "use_activation",
    "normalize",
    "activation",
    "query_expansion",
}


def read_stored(folder: Path, spec: DecoderSpec) -> StoredPooling | None:
    """Return how a folder says to pool; None where it does not. Raises a QuireError."""
    stored = read_modules(folder) if has_modules(folder) else None
    if stored is None and spec.architecture == COLBERT:
        stored = read_colbert(folder, spec.hidden_size)
    return stored


def pooling_of(
    config: EngineConfig,
    files: ModelFiles,
    spec: DecoderSpec,
    stored: StoredPooling | None,
    own: Mapping[str, Any],
) -> PoolingSpec:
    """Decide for a model that is to pool; `own` are the keys of its config that say how. Raises a
    QuireError."""
    return _Decision(config, files, spec, stored, own).pooling()


class _Decision:
    """What a `PoolingSpec` is made of."""

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        spec: DecoderSpec,
        stored: StoredPooling | None,
        own: Mapping[str, Any],
    ) -> None:
        self._config, self._files, self._spec, self._stored = config, files, spec, stored
        self._own = own
        self._wishes = dict(config.pooler_config or {})
        self._sources: list[tuple[str, str]] = []

    def pooling(self) -> PoolingSpec:
        """Decide."""
        unknown = sorted(set(self._wishes) - _POOLER_KEYS)
        if unknown:
            raise ConfigError(
                f"pooler_config has {', '.join(map(repr, unknown))}; known keys are "
                f"{', '.join(sorted(_POOLER_KEYS))}"
            )
        convert = self._config.convert
        is_classifier = self._spec.classifier is not None or bool(
            self._own.get("classifier_from_token")
        )
        if convert in ("classify", "reward") and not is_classifier:
            raise ConfigError(
                f"convert={convert!r}, but {self._spec.architecture} has no layer for classes; "
                "load a checkpoint of ...ForSequenceClassification, or name the tokens that are "
                "the classes: hf_overrides={'classifier_from_token': ['no', 'yes']}"
            )
        if is_classifier and convert != "embed":
            return self._classifier()
        return self._embedder()

    def _classifier(self) -> PoolingSpec:
        labels = self._labels()
        classifier = self._spec.classifier
        if classifier is None or self._own.get("classifier_from_token"):
            return self._token_classifier()
        num_labels = classifier.layers[-1].linear.num_outputs
        how = "each token" if classifier.is_per_token else classifier.kind
        self._sources.append(("pooling", f"{how}: as {self._spec.architecture}"))
        return self._spec_of(
            task="classify",
            kind=self._kind(classifier.kind),
            layers=classifier.layers,
            is_per_token=classifier.is_per_token,
            activation=self._activation("sigmoid" if num_labels == 1 else "softmax"),
            labels=labels,
        )

    def _token_classifier(self) -> PoolingSpec:
        """Classes are the logits of tokens; of two, the last one's above the first one's is the
        score.
        """
        given = self._own.get("classifier_from_token")
        names = [str(name) for name in given] if isinstance(given, list) else []
        tokenizer = Tokenizer.from_folder(self._files.folder)
        token_ids = [tokenizer.token_to_id(name) for name in names]
        if len(names) < 2 or None in token_ids:
            raise ConfigError(
                f"classifier_from_token={names} must name two or more tokens of the "
                "model's vocabulary"
            )
        is_difference = bool(self._own.get("is_original_qwen3_reranker")) and len(names) == 2
        self._sources.append(("classes", f"the logits of {', '.join(names)}: hf_overrides"))
        return self._spec_of(
            task="classify",
            kind="last",
            token_ids=tuple(each for each in token_ids if each is not None),
            is_difference=is_difference,
            activation=self._activation("sigmoid" if is_difference else "softmax"),
            labels=() if is_difference else tuple(names),
        )

    def _embedder(self) -> PoolingSpec:
        stored = self._stored
        if stored is not None and stored.late is not None:
            return self._token_embedder(stored, stored.late)
        if stored is not None:
            self._sources.append(("pooling", f"{stored.kind}: {stored.kind_source}"))
            self._sources.append(
                ("normalize", f"{'on' if stored.is_normalized else 'off'}: modules.json")
            )
            return self._spec_of(
                task="embed",
                kind=self._kind(stored.kind),
                layers=stored.layers,
                is_normalized=self._is_activated(stored.is_normalized),
                counts_prompt=stored.counts_prompt,
            )
        default: PoolingKind = "cls" if self._spec.is_encoder else "last"
        kind = self._kind(default)
        if not _wished_kind(self._wishes):
            logger.warning(
                "%s has no modules.json that says how to pool: %s, normalized; "
                "pooler_config={'pooling_type': ...} says otherwise",
                self._files.folder, kind,
            )  # fmt: skip
            self._sources.append(("pooling", f"{kind}, normalized: a default, no file says"))
        return self._spec_of(task="embed", kind=kind, is_normalized=self._is_activated(True))

    def _token_embedder(self, stored: StoredPooling, late: LateInteraction) -> PoolingSpec:
        """Of late interaction: a vector for each token."""
        self._sources.append(("pooling", f"each token: {stored.kind_source}"))
        expands = self._wishes.get("query_expansion", True)
        if late.expansion is not None:
            if expands and not late.expansion.is_attended:
                self._check_unattended(late.expansion.length)
            says = f"to {late.expansion.length} tokens: the folder" if expands else "off: given"
            self._sources.append(("query expansion", says))
        return self._spec_of(
            task="embed",
            kind="cls",
            is_per_token=True,
            late=late if expands else replace(late, expansion=None),
            layers=stored.layers,
            is_normalized=self._is_activated(stored.is_normalized),
        )

    def _check_unattended(self, length: int) -> None:
        """Refuse queries whose added tokens no token attends to, where attention has no form for
        it."""
        windows = [each.window for each in self._spec.attentions if each.window is not None]
        shortest = min(windows, default=length)
        if not self._spec.is_encoder or length > shortest:
            raise UnsupportedModelError(
                f"{self._files.folder} fills queries up to {length} tokens with some that no token "
                "attends to, which is supported in encoders, up to the length of their windows; "
                "pooler_config={'query_expansion': False} compares queries as they are, with other "
                "scores"
            )

    def _spec_of(self, **fields: Any) -> PoolingSpec:
        texts = read_texts(self._files.folder) if has_modules(self._files.folder) else StoredTexts()
        if self._stored is not None and self._stored.texts is not None:
            texts = self._stored.texts
        lengths = self._own.get("matryoshka_dimensions")
        matryoshka: bool | tuple[int, ...] = bool(self._own.get("is_matryoshka"))
        if isinstance(lengths, list) and all(isinstance(each, int) for each in lengths):
            matryoshka = tuple(lengths)
        return PoolingSpec(
            matryoshka=matryoshka,
            prompts=texts.prompts,
            default_prompt=texts.default_prompt,
            max_len=texts.max_len,
            sources=tuple(self._sources),
            **fields,
        )

    def _kind(self, default: PoolingKind) -> PoolingKind:
        wish = _wished_kind(self._wishes)
        if wish is None:
            return default
        if wish not in _KINDS:
            raise ConfigError(
                f"pooler_config: pooling_type={wish!r} is not available; use {', '.join(_KINDS)}"
            )
        self._sources.append(("pooling", f"{_KINDS[wish]}: given"))
        return _KINDS[wish]

    def _is_activated(self, default: bool) -> bool:
        for key in ("use_activation", "normalize", "activation"):
            if self._wishes.get(key) is not None:
                return bool(self._wishes[key])
        return default

    def _activation(self, default: OutputActivation) -> OutputActivation:
        """As the config says: of a regression none, of several labels at once the sigmoid."""
        config = self._files.config
        kinds: dict[str, OutputActivation] = {
            "regression": "none",
            "multi_label_classification": "sigmoid",
            "single_label_classification": default,
        }
        section = config.get("sentence_transformers")
        named = section.get("activation_fn") if isinstance(section, Mapping) else None
        named = named or config.get("sbert_ce_default_activation_function")
        if named is not None:
            name = str(named).rpartition(".")[2]
            functions: dict[str, OutputActivation] = {"Identity": "none", "Sigmoid": "sigmoid"}
            if name not in functions:
                raise UnsupportedModelError(
                    f"config.json: the activation function {str(named)[:80]!r} is not supported; "
                    "supported: Identity and Sigmoid"
                )
            return functions[name] if self._is_activated(True) else "none"
        found = kinds.get(str(config.get("problem_type")), default)
        return found if self._is_activated(True) else "none"

    def _labels(self) -> tuple[str, ...]:
        names = self._files.config.get("id2label")
        if not isinstance(names, Mapping):
            return ()
        try:
            return tuple(str(names[key]) for key in sorted(names, key=int))
        except ValueError:
            raise UnsupportedModelError("config.json: id2label must be numbered") from None


def _wished_kind(wishes: Mapping[str, Any]) -> str | None:
    wish = wishes.get("pooling_type") or wishes.get("seq_pooling_type")
    return None if wish is None else str(wish).upper()

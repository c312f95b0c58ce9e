"""From a model's `config.json` to its declaration:
the one table of the architectures that Quire implements."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module

from quire.common.frozen_record import replace
from quire.errors import UnsupportedModelError
from quire.models.config_reader import ConfigReader
from quire.models.declaration import ClassifierSpec, DecoderSpec, DenseSpec
from quire.models.dimensions import TOKEN_CLASSIFICATION, read_num_labels
from quire.models.tensors import linear

Declare = Callable[[ConfigReader], DecoderSpec]


def _family(module: str, function: str | None = None) -> Declare:
    """Defer a family's import until a model of it is declared: all of them take 50 ms of every
    process that loads one model."""

    def declare_family(config: ConfigReader) -> DecoderSpec:
        declare_it: Declare = getattr(import_module(name), function or f"declare_{module}")
        return declare_it(config)

    name = declare_family.__module__ = f"quire.models.{module}"
    return declare_family


COLBERT = "HF_ColBERT"
"""BERT with a projection of each token's state: checkpoints of ColBERT's own program."""
DECODERS: dict[str, Declare] = {
    "DeepseekV2": _family("deepseek_v2"),
    "DeepseekV3": _family("deepseek_v3"),
    "Gemma2": _family("gemma2"),
    "Gemma3": _family("gemma3"),
    "GptOss": _family("gpt_oss"),
    "Llama": _family("llama"),
    "Mistral": _family("mistral"),
    "Mixtral": _family("mixtral"),
    "Olmo2": _family("olmo2"),
    "Olmoe": _family("olmoe"),
    "Phi3": _family("phi3"),
    "Qwen2": _family("qwen2"),
    "Qwen2Moe": _family("qwen2_moe"),
    "Qwen3": _family("qwen3"),
    "Qwen3Moe": _family("qwen3_moe"),
    "SmolLM3": _family("smollm3"),
}
"""Families of decoders: each generates text, makes vectors without its head (`...Model`), and
classifies with another one."""
ENCODERS: dict[str, Declare] = {
    "Bert": _family("bert"),
    "DistilBert": _family("bert", "declare_distilbert"),
    "MPNet": _family("bert", "declare_mpnet"),
    "ModernBert": _family("modernbert"),
    "Roberta": _family("bert", "declare_roberta"),
    "XLMRoberta": _family("bert", "declare_roberta"),
}
"""Families of encoders, which make vectors and classify."""


def _headless(declare_family: Declare) -> Declare:
    """A decoder whose checkpoint has no output projection."""
    return lambda config: replace(declare_family(config), head=None)


def _projecting(declare_family: Declare) -> Declare:
    """An encoder whose checkpoint has the projection of late interaction beside it, which is read
    as what pooling puts on top."""

    def declare_projecting(config: ConfigReader) -> DecoderSpec:
        spec = declare_family(config)
        return replace(spec, unused=(*spec.unused, "linear."))

    return declare_projecting


def _classifying(declare_family: Declare) -> Declare:
    """A decoder with a layer for classes on the last token, or on each, as transformers has it."""

    def declare_classifier(config: ConfigReader) -> DecoderSpec:
        spec, num_labels = declare_family(config), read_num_labels(config)
        assert num_labels is not None
        is_per_token = config.architecture.endswith(TOKEN_CLASSIFICATION)
        has_bias = is_per_token and config.flag("token_classification_bias", True)
        config.ignore("classifier_dropout", "hidden_dropout")  # training
        layer = DenseSpec(linear("score", spec.hidden_size, num_labels, has_bias=has_bias))
        classifier = ClassifierSpec("last", (layer,), is_per_token=is_per_token)
        return replace(spec, head=None, classifier=classifier)

    return declare_classifier


ARCHITECTURES: dict[str, Declare] = {
    **{f"{name}ForCausalLM": each for name, each in DECODERS.items()},
    "GPT2LMHeadModel": _family("gpt2"),
    "Gemma3ForConditionalGeneration": _family("gemma3_vl"),
    "LlavaForConditionalGeneration": _family("llava"),
    "LlavaNextForConditionalGeneration": _family("llava", "declare_llava_next"),
    "Qwen2VLForConditionalGeneration": _family("qwen2_vl"),
    "Qwen2_5_VLForConditionalGeneration": _family("qwen2_vl", "declare_qwen2_5_vl"),
    "Qwen3VLForConditionalGeneration": _family("qwen3_vl"),
}
"""Models that generate text."""
POOLING_ARCHITECTURES: dict[str, Declare] = {
    **{f"{name}Model": _headless(each) for name, each in DECODERS.items()},
    **{f"{name}ForSequenceClassification": _classifying(each) for name, each in DECODERS.items()},
    **{
        f"{name}{ending}": each
        for name, each in ENCODERS.items()
        for ending in (
            "Model",
            "ForMaskedLM",
            "ForSequenceClassification",
            TOKEN_CLASSIFICATION,
        )
    },
    **{f"{name}{TOKEN_CLASSIFICATION}": _classifying(each) for name, each in DECODERS.items()},
    "Gemma3TextModel": _headless(_family("gemma3")),
    "NomicBertModel": _family("nomic_bert"),
    COLBERT: _projecting(_family("bert")),
}
"""Models that only make vectors of texts, or classes."""


def declare(config: Mapping[str, object]) -> DecoderSpec:
    """Declare the decoder that a parsed `config.json` describes.

    Raises UnsupportedModelError naming the architecture, or the key and its value, that Quire does
    not implement.
    """
    architecture = _architecture(config)
    declare_family = ARCHITECTURES.get(architecture) or POOLING_ARCHITECTURES.get(architecture)
    if declare_family is None:
        raise UnsupportedModelError(
            f"the architecture {architecture[:120]!r} is not supported; the nearest supported: "
            f"{', '.join(_nearest(architecture[:120]))} (families: {', '.join(families())})"
        )
    reader = ConfigReader(config, architecture)
    if reader.has("quantization_config"):
        raise reader.refuse(
            "quantization_config", "checkpoints of float32, bfloat16 or float16 weights"
        )
    reader.require("is_encoder_decoder", False)
    reader.require("add_cross_attention", False)
    spec = declare_family(reader)
    reader.finish()
    return spec


def families() -> list[str]:
    """Return the names of architectures without what they are for, in alphabetical order."""
    names = (*ARCHITECTURES, *POOLING_ARCHITECTURES)
    return sorted(
        {re.sub(r"(For[A-Z]\w*|LMHeadModel|TextModel|Model)$", "", each) for each in names}
    )


def _nearest(architecture: str) -> list[str]:
    return get_close_matches(architecture, [*ARCHITECTURES, *POOLING_ARCHITECTURES], 3, 0.0)


def _architecture(config: Mapping[str, object]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise UnsupportedModelError(
            f"config.json has architectures={repr(names)[:120]}; Quire needs one, of the families "
            f"{', '.join(families())}"
        )
    return names[0]

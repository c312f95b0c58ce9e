"""From a model's `config.json` to its declaration:
the one table of the architectures that Quire implements."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches

from quire.errors import UnsupportedModelError
from quire.models.bert import declare_bert, declare_distilbert, declare_mpnet, declare_roberta
from quire.models.config_reader import ConfigReader
from quire.models.declaration import ClassifierSpec, DecoderSpec, DenseSpec
from quire.models.deepseek_v2 import declare_deepseek_v2
from quire.models.deepseek_v3 import declare_deepseek_v3
from quire.models.dimensions import TOKEN_CLASSIFICATION, read_num_labels
from quire.models.gemma2 import declare_gemma2
from quire.models.gemma3 import declare_gemma3
from quire.models.gemma3_vl import declare_gemma3_vl
from quire.models.gpt2 import declare_gpt2
from quire.models.gpt_oss import declare_gpt_oss
from quire.models.llama import declare_llama
from quire.models.llava import declare_llava, declare_llava_next
from quire.models.mistral import declare_mistral
from quire.models.mixtral import declare_mixtral
from quire.models.modernbert import declare_modernbert
from quire.models.nomic_bert import declare_nomic_bert
from quire.models.olmo2 import declare_olmo2
from quire.models.olmoe import declare_olmoe
from quire.models.phi3 import declare_phi3
from quire.models.qwen2 import declare_qwen2
from quire.models.qwen2_moe import declare_qwen2_moe
from quire.models.qwen2_vl import declare_qwen2_5_vl, declare_qwen2_vl
from quire.models.qwen3 import declare_qwen3
from quire.models.qwen3_moe import declare_qwen3_moe
from quire.models.qwen3_vl import declare_qwen3_vl
from quire.models.smollm3 import declare_smollm3
from quire.models.tensors import linear

Declare = Callable[[ConfigReader], DecoderSpec]

DECODERS: dict[str, Declare] = {
    "DeepseekV2": declare_deepseek_v2,
    "DeepseekV3": declare_deepseek_v3,
    "Gemma2": declare_gemma2,
    "Gemma3": declare_gemma3,
    "GptOss": declare_gpt_oss,
    "Llama": declare_llama,
    "Mistral": declare_mistral,
    "Mixtral": declare_mixtral,
    "Olmo2": declare_olmo2,
    "Olmoe": declare_olmoe,
    "Phi3": declare_phi3,
    "Qwen2": declare_qwen2,
    "Qwen2Moe": declare_qwen2_moe,
    "Qwen3": declare_qwen3,
    "Qwen3Moe": declare_qwen3_moe,
    "SmolLM3": declare_smollm3,
}
"""Families of decoders: each generates text, makes vectors without its head (`...Model`), and
classifies with another one."""
ENCODERS: dict[str, Declare] = {
    "Bert": declare_bert,
    "DistilBert": declare_distilbert,
    "MPNet": declare_mpnet,
    "ModernBert": declare_modernbert,
    "Roberta": declare_roberta,
    "XLMRoberta": declare_roberta,
}
"""Families of encoders, which make vectors and classify."""


def _headless(declare_family: Declare) -> Declare:
    """A decoder whose checkpoint has no output projection."""
    return lambda config: replace(declare_family(config), head=None)


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
    "GPT2LMHeadModel": declare_gpt2,
    "Gemma3ForConditionalGeneration": declare_gemma3_vl,
    "LlavaForConditionalGeneration": declare_llava,
    "LlavaNextForConditionalGeneration": declare_llava_next,
    "Qwen2VLForConditionalGeneration": declare_qwen2_vl,
    "Qwen2_5_VLForConditionalGeneration": declare_qwen2_5_vl,
    "Qwen3VLForConditionalGeneration": declare_qwen3_vl,
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
    "Gemma3TextModel": _headless(declare_gemma3),
    "NomicBertModel": declare_nomic_bert,
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

"""From a model's `config.json` to its declaration:
the one table of the architectures that Quire implements."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.errors import UnsupportedModelError
from quire.models.config_reader import ConfigReader
from quire.models.declaration import DecoderSpec
from quire.models.gemma2 import declare_gemma2
from quire.models.gemma3 import declare_gemma3
from quire.models.gpt2 import declare_gpt2
from quire.models.llama import declare_llama
from quire.models.mistral import declare_mistral
from quire.models.olmo2 import declare_olmo2
from quire.models.phi3 import declare_phi3
from quire.models.qwen2 import declare_qwen2
from quire.models.qwen3 import declare_qwen3
from quire.models.smollm3 import declare_smollm3

ARCHITECTURES: dict[str, Callable[[ConfigReader], DecoderSpec]] = {
    "Gemma2ForCausalLM": declare_gemma2,
    "Gemma3ForCausalLM": declare_gemma3,
    "GPT2LMHeadModel": declare_gpt2,
    "LlamaForCausalLM": declare_llama,
    "MistralForCausalLM": declare_mistral,
    "Olmo2ForCausalLM": declare_olmo2,
    "Phi3ForCausalLM": declare_phi3,
    "Qwen2ForCausalLM": declare_qwen2,
    "Qwen3ForCausalLM": declare_qwen3,
    "SmolLM3ForCausalLM": declare_smollm3,
}


def declare(config: Mapping[str, object]) -> DecoderSpec:
    """Declare the decoder that a parsed `config.json` describes.

    Raises UnsupportedModelError naming the architecture, or the key and its value, that Quire does
    not implement.
    """
    architecture = _architecture(config)
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"the architecture {architecture[:120]!r} is not supported; supported: "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    reader = ConfigReader(config, architecture)
    if reader.has("quantization_config"):
        raise reader.refuse(
            "quantization_config", "checkpoints of float32, bfloat16 or float16 weights"
        )
    reader.require("is_encoder_decoder", False)
    reader.require("add_cross_attention", False)
    spec = ARCHITECTURES[architecture](reader)
    reader.finish()
    return spec


def _architecture(config: Mapping[str, object]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise UnsupportedModelError(
            f"config.json has architectures={repr(names)[:120]}; Quire needs one, out of "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    return names[0]

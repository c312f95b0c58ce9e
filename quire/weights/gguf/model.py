"""From a GGUF file's metadata to the config and the weight names that Quire's declarations speak
of.

Owns the differences between llama.cpp's conventions and Hugging Face's: names, baked-in RoPE
factors, rows of queries and keys reordered for neighbouring pairs (Llama), norm weights stored
around one (Gemma). Imports no torch.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.declaration import DecoderSpec
from quire.models.tensors import TensorSpec
from quire.weights.gguf import sparse
from quire.weights.gguf.file import GgufFile
from quire.weights.gguf.metadata import Metadata

ARCHITECTURES: Final[Mapping[str, str]] = {
    "deepseek2": "DeepseekV2ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
_NAMES: Final = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
_EXPERT_NAMES: Final = {
    "mlp.gate": "ffn_gate_inp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "block_sparse_moe.gate": "ffn_gate_inp",
}  # fmt: skip
_EXPERT: Final = re.compile(r"\w+\.experts\.(\d+)\.(\w+)")
_ROLES: Final = {
    "gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down",
    "w2": "down",
}  # fmt: skip
_GEMMA_NAMES: Final = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_OWN_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "deepseek2": sparse.DEEPSEEK_NAMES,
    "gemma2": _GEMMA_NAMES,
    "gemma3": _GEMMA_NAMES,
    "gpt-oss": sparse.GPT_OSS_NAMES,
}
_TOP_NAMES: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_WHOLE: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")
_LATENT: Final = "self_attn.kv_b_proj"
_FREQUENCIES: Final = "rope_freqs.weight"
_UNUSED: Final = frozenset({_FREQUENCIES})
_FLOAT_NAMES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Gemma 2 27B and Gemma 3 27B scale queries by hidden_size / heads; the files do not say so,
# llama.cpp knows it by depth.
_GEMMA_SCALED_BY_WIDTH: Final = {"gemma2": 46, "gemma3": 62}


class StoredPlace(NamedTuple):
    """Where a tensor lies in the file."""

    name: str
    shape: tuple[int, ...]
    """Of the stored tensor."""
    first_row: int
    is_turned: bool = False
    """The rows from the first on are the tensor's inputs."""


@dataclass(frozen=True)
class GgufModel:
    """A file whose architecture is understood."""

    file: GgufFile
    architecture: str
    """As llama.cpp calls it."""

    @classmethod
    def of(cls, file: GgufFile) -> GgufModel:
        """Raises UnsupportedModelError for another architecture than `ARCHITECTURES`."""
        name = file.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"{file.path} has general.architecture={name!r}; supported: "
                f"{', '.join(ARCHITECTURES)}"
            )
        return cls(file, name)

    @cached_property
    def data(self) -> Metadata:
        """The metadata of its architecture."""
        return Metadata(self.file, self.architecture)

    @property
    def config(self) -> dict[str, object]:
        """What a Hugging Face `config.json` would say."""
        config = self._sizes() | self._rope() | self._family()
        config["tie_word_embeddings"] = "output.weight" not in self.file.tensors
        for role in ("bos", "eos"):
            token_id = self.file.metadata.get(f"tokenizer.ggml.{role}_token_id")
            if isinstance(token_id, int):
                config.setdefault(f"{role}_token_id", token_id)
        return config

    def stored_name(self, tensor: TensorSpec) -> str:
        """Return the name of the stored tensor that holds it."""
        return self.place_of(tensor).name

    def place_of(self, tensor: TensorSpec) -> StoredPlace:
        """Return where a tensor lies: all experts of a layer are in one, one after the other."""
        shape, first_row = tensor.stored_shape, tensor.first_row
        match = _LAYER.fullmatch(tensor.name)
        if match is None:
            return self._place_outside(tensor)
        layer, module, kind = match.groups()
        if expert := _EXPERT.fullmatch(module):
            return self._place_of_expert(tensor, f"blk.{layer}", expert, kind)
        if module == _LATENT and f"blk.{layer}.attn_k_b.weight" in self.file.tensors:
            return self._place_of_head(tensor, f"blk.{layer}")
        if module == "mlp.shared_expert_gate":
            shape = shape[1:]
        names = {**_NAMES, **_EXPERT_NAMES, **_OWN_NAMES.get(self.architecture, {})}
        return StoredPlace(f"blk.{layer}.{names[module]}.{kind}", shape, first_row)

    def _place_outside(self, tensor: TensorSpec) -> StoredPlace:
        """Of layers, or of the usual names."""
        whole = _WHOLE.fullmatch(tensor.name)
        if whole is not None:
            name = f"blk.{whole[1]}.{sparse.WHOLE_NAMES[whole[2]]}"
        else:
            module, _, kind = tensor.name.rpartition(".")
            name = f"{_TOP_NAMES[module]}.{kind}"
        return StoredPlace(name, tensor.stored_shape, tensor.first_row)

    def _place_of_expert(
        self, tensor: TensorSpec, at: str, expert: re.Match[str], kind: str
    ) -> StoredPlace:
        count, shape, role = self.data.integer("expert_count"), tensor.stored_shape, expert[2]
        if self.architecture == "gpt-oss":  # whose checkpoints have gate and up row by row in turn
            shape = tensor.shape
            role = role if role == "down_proj" else ("gate_proj", "up_proj")[tensor.first_row]
        name = f"{at}.ffn_{_ROLES[role]}_exps.{kind}"
        num_rows = shape[0] if kind == "weight" else 1
        return StoredPlace(name, (count, *shape), int(expert[1]) * num_rows)

    def _place_of_head(self, tensor: TensorSpec, at: str) -> StoredPlace:
        """Of a head's part of what makes keys and values of latents: the two lie apart, and keys
        are stored as they are multiplied by when they are folded."""
        count = self.data.integer("attention.head_count")
        num_rows, rank = tensor.shape
        head, row = divmod(tensor.first_row, tensor.stored_shape[0] // count)
        if row == 0:
            return StoredPlace(
                f"{at}.attn_k_b.weight", (count, rank, num_rows), head * rank, is_turned=True
            )
        return StoredPlace(f"{at}.attn_v_b.weight", (count, num_rows, rank), head * num_rows)

    @property
    def has_shifted_norms(self) -> bool:
        """Norm weights are stored around one, where checkpoints have them around zero."""
        return self.architecture.startswith("gemma")

    def is_reordered(self, tensor: TensorSpec) -> bool:
        """Return whether each head's rows alternate between the two halves that RoPE pairs."""
        return (
            self.architecture == "llama"
            and re.search(r"\.self_attn\.[qk]_proj\.", tensor.name) is not None
        )

    def check(self, spec: DecoderSpec) -> None:
        """Check that the file has the declaration's tensors in their shapes, and no others. Raises
        CheckpointError."""
        places = map(self.place_of, spec.tensors)
        expected = {place.name: place.shape for place in places}
        tensors = self.file.tensors
        wrong = [
            f"lacks {name} {list(shape)}" for name, shape in expected.items() if name not in tensors
        ]
        wrong += [
            f"has {name} {list(tensors[name].shape)}, its metadata implies {list(shape)}"
            for name, shape in expected.items()
            if name in tensors and tensors[name].shape != shape
        ]
        wrong += [
            f"has {name}, which {spec.architecture} does not use"
            for name in tensors
            if name not in {*expected, *_UNUSED}
        ]
        if wrong:
            more = f" (and {len(wrong) - 4} more such things)" if len(wrong) > 4 else ""
            raise CheckpointError(f"{self.file.path} {'; '.join(wrong[:4])}{more}")

    def _sizes(self) -> dict[str, object]:
        hidden = self.data.integer("embedding_length")
        num_heads = self.data.integer("attention.head_count")
        head_dim = self.data.integer("attention.key_length", hidden // max(1, num_heads))
        is_latent = self.architecture == "deepseek2"
        if not is_latent and self.data.integer("attention.value_length", head_dim) != head_dim:
            raise self.data.refuse("attention.value_length", f"attention.key_length, {head_dim}")
        hf_name = ARCHITECTURES[self.architecture]
        is_mixtral = self.architecture == "llama" and self.data.integer("expert_count", 0) > 0
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None:
            raise CheckpointError(f"{self.file.path} lacks token_embd.weight")
        return {
            "architectures": ["MixtralForCausalLM" if is_mixtral else hf_name],
            "dtype": _FLOAT_NAMES.get(embedding.encoding.name, "bfloat16"),
            "hidden_size": hidden,
            "intermediate_size": self.data.integer("feed_forward_length"),
            "num_hidden_layers": self.data.integer("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self.data.integer("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "vocab_size": embedding.shape[0],
            "max_position_embeddings": self.data.integer("context_length"),
            "rms_norm_eps": self.data.number("attention.layer_norm_rms_epsilon"),
            **(sparse.deepseek_sizes(self.data) if is_latent else {}),
        }

    def _family(self) -> dict[str, object]:
        """Keys that one family has alone."""
        if self.architecture == "gpt-oss":
            return sparse.gpt_oss_config(self.data)
        if self.architecture == "deepseek2":
            return sparse.deepseek_config(self.data)
        if self.data.integer("expert_count", 0):
            return self._experts()
        if self.architecture == "llama":
            has = self.file.tensors.__contains__
            return {
                "attention_bias": has("blk.0.attn_q.bias"),
                "mlp_bias": has("blk.0.ffn_up.bias"),
            }
        window = self.file.metadata.get(f"{self.architecture}.attention.sliding_window")
        if self.architecture == "phi3":
            return {} if not window else {"sliding_window": window}
        if not self.has_shifted_norms:
            return {}
        is_wide = self.data.integer("block_count") == _GEMMA_SCALED_BY_WIDTH[self.architecture]
        width = self.data.integer("embedding_length") // max(
            1, self.data.integer("attention.head_count")
        )
        caps = (
            ("attn_logit_softcapping", "final_logit_softcapping")
            if self.architecture == "gemma2"
            else ()
        )
        return {
            "query_pre_attn_scalar": width
            if is_wide
            else self.data.integer("attention.key_length"),
            "sliding_window": self.data.integer("attention.sliding_window"),
            **{name: self.data.number(name) for name in caps},
        }

    def _experts(self) -> dict[str, object]:
        """llama.cpp knows by the architecture whether chosen experts' weights are normalised."""
        key = "num_local_experts" if self.architecture == "llama" else "num_experts"
        config: dict[str, object] = {
            key: self.data.integer("expert_count"),
            "num_experts_per_tok": self.data.integer("expert_used_count"),
        }
        if self.architecture in ("qwen2moe", "qwen3moe"):
            config["norm_topk_prob"] = self.architecture == "qwen3moe"
            config["moe_intermediate_size"] = self.data.integer("expert_feed_forward_length")
        if self.architecture == "qwen2moe":
            inner = self.data.integer("expert_shared_feed_forward_length")
            config["shared_expert_intermediate_size"] = inner
        return config

    def _rope(self) -> dict[str, object]:
        theta: dict[str, object] = {"rope_theta": self.data.number("rope.freq_base", 10000.0)}
        sizes = self._sizes()
        head_dim = sizes.get("qk_rope_head_dim", sizes["head_dim"])
        if (
            self.data.integer("rope.dimension_count", head_dim if isinstance(head_dim, int) else 1)
            != head_dim
        ):
            raise self.data.refuse("rope.dimension_count", f"the head size, {head_dim}")
        if _FREQUENCIES in self.file.tensors:
            return theta | {"rope_scaling": self._baked_rope()}
        kind = self.file.metadata.get(f"{self.architecture}.rope.scaling.type", "none")
        if kind == "none":
            return theta
        if kind not in ("linear", "yarn"):
            raise self.data.refuse("rope.scaling.type", "none, linear or yarn")
        scaling: dict[str, object] = {
            "rope_type": kind,
            "factor": self.data.number("rope.scaling.factor"),
        }
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = self.data.integer(
                "rope.scaling.original_context_length"
            )
            scaling |= sparse.yarn_extras(self.data)
        return theta | {"rope_scaling": scaling}

    def _baked_rope(self) -> dict[str, object]:
        """Return a divisor of every frequency, which is what LongRoPE is with one list for all
        lengths (Llama 3.1's scaling)."""
        tensor = self.file.tensors[_FREQUENCIES]
        half = self.data.integer("rope.dimension_count") // 2
        if tensor.encoding.name != "F32" or tensor.shape != (half,):
            raise CheckpointError(
                f"{self.file.path} has {_FREQUENCIES} {list(tensor.shape)}; expected F32 [{half}]"
            )
        try:
            with self.file.path.open("rb") as file:
                file.seek(tensor.offset)
                factors = list(struct.unpack(f"<{half}f", file.read(tensor.num_bytes)))
        except (OSError, struct.error) as error:
            raise CheckpointError(
                f"{self.file.path}: {_FREQUENCIES} cannot be read: {error}"
            ) from None
        length = self.data.integer("context_length")
        lists = {
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "factor": 1.0,
        }
        return {"rope_type": "longrope", "original_max_position_embeddings": length, **lists}

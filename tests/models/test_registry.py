"""Reading `config.json`: real files, refusals that name the key,
and odd values that must never crash the reader."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire.errors import UnsupportedModelError
from quire.models.registry import ARCHITECTURES, declare

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 199,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
LATENT: dict[str, object] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}
GPT2: dict[str, object] = {
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "vocab_size": 199,
}
# Parameters of the published models, in billions.
KNOWN_SIZES = {
    "meta-llama--Llama-3.1-8B.json": 8.030261248,
    "meta-llama--Meta-Llama-3.1-405B.json": 405.8533888,
    "Qwen--Qwen3-0.6B.json": 0.59604992,
    "mlc_presets/qwen2_0_5b.json": 0.494032768,
    "mlc_presets/mistral_7b_v03.json": 7.248023552,
    "mlc_presets/gemma2_2b.json": 2.614341888,
    "mlc_presets/gemma3_1b_it.json": 0.999885952,
    "mlc_presets/phi-4.json": 3.83602176,
    "mlc_presets/gpt2.json": 0.124439808,
    "mlc_presets/olmo2_13b.json": 13.7161984,
    "mlc_presets/smollm2_135m.json": 0.134515008,
    "mistralai--Mixtral-8x7B-v0.1.json": 46.702792704,
    "mlc_presets/qwen2moe.json": 14.315784192,
    "Qwen--Qwen3-30B-A3B.json": 30.532122624,
    "nvidia--DeepSeek-V3.1-NVFP4.json": 671.026419200,
}


def _with(base: dict[str, object], **changes: object) -> dict[str, object]:
    return {**base, **changes}


def _every_family() -> list[dict[str, object]]:
    llama_like = [
        _with(LLAMA, architectures=[name]) for name in ARCHITECTURES if name != "GPT2LMHeadModel"
    ]
    return [*llama_like, GPT2]


@pytest.mark.slow
def test_every_real_config_is_read_or_refused_by_name(shared: Path) -> None:
    folder = shared / "data/tokenizers/model_configs"
    files = sorted(folder.glob("*.json")) + sorted((folder / "mlc_presets").glob("*.json"))
    assert len(files) >= 140
    read = []
    for path in files:
        config = json.loads(path.read_text())
        try:
            declare(config)
        except UnsupportedModelError as error:
            named = [str(name) for name in config.get("architectures") or ["architectures"]]
            assert any(name in str(error) for name in named), path
        else:
            read.append(path.relative_to(folder).as_posix())
    assert len(read) >= 47
    assert set(KNOWN_SIZES) <= set(read)


@pytest.mark.slow_except("[!n]*")
@pytest.mark.parametrize("file", KNOWN_SIZES)
def test_parameters_of_known_models(shared: Path, file: str) -> None:
    config = json.loads((shared / "data/tokenizers/model_configs" / file).read_text())
    assert declare(config).num_parameters == round(KNOWN_SIZES[file] * 1e9)


def test_queries_of_deepseek_v2_lite_come_straight_of_the_stream(shared: Path) -> None:
    """Its config says so with null; without the key they have a vector of 1536, as V2's have."""
    path = shared / "data/tokenizers/model_configs/mlc_presets/deepseek_v2_lite.json"
    config = json.loads(path.read_text())
    assert declare(config | {"q_lora_rank": None}).num_parameters == 15_706_484_224
    assert declare(config) == declare(config | {"q_lora_rank": 1536})


def test_an_unknown_architecture_is_told_the_nearest_and_the_families() -> None:
    with pytest.raises(UnsupportedModelError) as raised:
        declare({"architectures": ["DeepseekV32ForCausalLM"]})
    message = str(raised.value)
    assert message.startswith(
        "the architecture 'DeepseekV32ForCausalLM' is not supported; the nearest supported: "
        "DeepseekV3ForCausalLM, DeepseekV2ForCausalLM, "
    )
    assert "families: Bert, DeepseekV2, DeepseekV3, DistilBert, " in message
    assert len(message) < 600


def test_floats_of_gpt_oss_are_bfloat16_unless_its_config_says_otherwise(shared: Path) -> None:
    path = shared / "data/tokenizers/model_configs/openai--gpt-oss-20b.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    assert declare(config).dtype == "bfloat16"
    assert declare(config | {"torch_dtype": "float32"}).dtype == "float32"


def test_a_long_unknown_architecture_takes_no_time() -> None:
    with pytest.raises(UnsupportedModelError, match="families"):
        declare({"architectures": ["A" * 100_000]})


@pytest.mark.parametrize("architectures", [None, [], ["A", "B"], "LlamaForCausalLM", [3], {}])
def test_malformed_architectures_are_refused(architectures: object) -> None:
    with pytest.raises(UnsupportedModelError, match="architectures="):
        declare({"architectures": architectures})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, "rope_scaling.rope_type='mrope'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "spin": 3}},
            "rope_scaling.spin=3",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling='linear'"),
        (
            {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
            "rope_parameters.rope_type='spiral'",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantization_config=.*gptq",
        ),
        ({"hidden_act": "relu2"}, "hidden_act='relu2'"),
        ({"attention_bias": "yes"}, "attention_bias='yes'"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types=.*linear_attention"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"num_experts": 8}, "num_experts=8"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads="),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"num_attention_heads": 5}, "num_attention_heads=5"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        ({"hidden_size": "64"}, "hidden_size='64'"),
        ({"hidden_size": None}, "hidden_size"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype='float8_e4m3fn'"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder=True"),
        ({"rope_interleaved": True}, "rope_interleaved=True"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
    ],
)
def test_refusals_name_key_and_value(changes: dict[str, object], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"LlamaForCausalLM: .*{named}"):
        declare(_with(LLAMA, **changes))


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        (
            "MistralForCausalLM",
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 2},
            "sliding_window=None",
        ),
        (
            "MistralForCausalLM",
            {"sliding_window": 24, "layer_types": ["full_attention"] * 2},
            "layer_types=",
        ),
        ("Qwen2ForCausalLM", {"layer_types": ["sliding_attention"] * 2}, "sliding_window="),
        ("Qwen2ForCausalLM", {"attention_bias": True}, "attention_bias=True"),
        (
            "Gemma2ForCausalLM",
            {"sliding_window": 24, "sliding_window_size": 48},
            "sliding_window_size=48",
        ),
        (
            "Gemma3ForCausalLM",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention=True",
        ),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling="),
        (
            "Phi3ForCausalLM",
            {"partial_rotary_factor": 0.3, "head_dim": 10},
            "partial_rotary_factor=0.3",
        ),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers="),
        ("MixtralForCausalLM", {"num_local_experts": 0}, "num_local_experts=0"),
        ("MixtralForCausalLM", {"num_local_experts": 10**6}, "num_local_experts=1000000"),
        (
            "MixtralForCausalLM",
            {"num_experts_per_tok": 9},
            "num_experts_per_tok=9; supported: at most the 8 of num_local_experts",
        ),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("Qwen2MoeForCausalLM", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [2]}, "mlp_only_layers=.2.; .*from 0 to 1"),
        ("Qwen3MoeForCausalLM", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
        *(
            (f"{name}ForCausalLM", LATENT | changes, named)
            for name, changes, named in (
                ("DeepseekV2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'; supported: g"),
                ("DeepseekV2", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'; .*softmax"),
                ("DeepseekV2", {"norm_topk_prob": True}, "norm_topk_prob=True"),
                ("DeepseekV3", {"topk_method": "greedy"}, "topk_method='greedy'; .*noaux_tc"),
                ("DeepseekV3", {"scoring_func": "softmax"}, "scoring_func='softmax'; .*sigmoid"),
                ("DeepseekV3", {"n_group": 3}, "n_group=3; .*divisors of the 8 experts"),
                ("DeepseekV3", {"n_group": 8}, "n_group=8; .*that leave 2 or more to a group"),
                ("DeepseekV3", {"topk_group": 5}, "topk_group=5; .*at most the 4 of n_group"),
                ("DeepseekV3", {"num_experts_per_tok": 5}, "at most the 4 experts of topk_group"),
                ("DeepseekV3", {"num_experts_per_tok": 9}, "at most the 8 of n_routed_experts"),
                ("DeepseekV3", {"n_routed_experts": 10**6}, "n_routed_experts=1000000"),
                ("DeepseekV3", {"num_key_value_heads": 2}, "num_key_value_heads=2"),
                ("DeepseekV3", {"qk_rope_head_dim": 15}, "qk_rope_head_dim=15; .*even"),
                ("DeepseekV3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
                ("DeepseekV3", {"index_topk": 2048}, "index_topk=2048"),
            )
        ),
    ],
)
def test_refusals_of_the_other_families(
    architecture: str, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{architecture}: .*{named}"):
        declare(_with(LLAMA, architectures=[architecture], **changes))


def test_harmless_and_absent_keys_do_not_matter() -> None:
    noise = {
        "auto_map": {"AutoModelForCausalLM": "evil.py--Model"},
        "transformers_version": "9.9",
        "unsloth_version": "2025.1",
        "_name_or_path": "somewhere",
        "task_specific_params": {"a": 1},
        "use_cache": False,
        "sliding_window": None,
        "use_moe": False,
        "pruned_heads": {},
        "image_token_id": 7,
        "attention_dropout": 0.1,
    }
    assert declare(_with(LLAMA, **noise)) == declare(LLAMA)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_odd_values_are_read_or_refused_and_never_crash(part: int) -> None:
    odd: list[object] = [
        None,
        True,
        -1,
        0,
        1,
        3,
        0.0,
        1e-300,
        1e308,
        10**400,
        float("inf"),
        "x",
        [],
        [None],
        {},
        {"a": 1},
    ]
    keys = [
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "head_dim",
        "layer_types",
        "sliding_window",
        "hidden_act",
    ]
    keys += [
        "query_pre_attn_scalar",
        "final_logit_softcapping",
        "no_rope_layers",
        "n_inner",
        "tie_word_embeddings",
    ]
    refused = 0
    for base in _every_family():
        for key in [*base, *keys]:
            for value in odd[part::4]:
                try:
                    declare(_with(base, **{key: value})).flops_per_token()
                except UnsupportedModelError:
                    refused += 1
    assert refused > 250


def test_odd_rope_values_are_read_or_refused_and_never_crash() -> None:
    odd: list[object] = [None, True, -1, 0, 1, 1e-300, 1e308, "x", [], [1.0], [0] * 8, {}]
    full = {
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "beta_fast": 32,
        "attention_factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0] * 8,
        "rope_theta": 1e4,
    }
    refused = 0
    for rope_type in ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "su"):
        for key in full:
            for value in odd:
                scaling = {**full, "rope_type": rope_type, key: value}
                try:
                    declare(_with(LLAMA, rope_scaling=scaling))
                except UnsupportedModelError:
                    refused += 1
    assert refused > 100


def test_reading_a_config_does_not_import_torch() -> None:
    """The command line must refuse a model within two seconds."""
    code = (
        f"import sys; from quire.models.registry import declare; declare({LLAMA!r}); "
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parent.parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0

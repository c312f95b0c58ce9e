"""Tiny models that read images, as transformers makes them and as configs, and pictures for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

EDGE, PATCH = 28, 7
NUM_TOKENS = (EDGE // PATCH) ** 2
PLACEHOLDER = 252
PROCESSOR = {"size": {"shortest_edge": EDGE}, "crop_size": {"height": EDGE, "width": EDGE}}
VISION: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "image_size": EDGE,
    "patch_size": PATCH,
}
TEXT: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
LLAVA: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": PLACEHOLDER,
    "eos_token_id": 2,
    "torch_dtype": "float32",
    "text_config": TEXT,
    "vision_config": VISION,
}


def picture(seed: int, height: int = 40, width: int = 30) -> np.ndarray:
    """RGB noise [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


CHAT_TEMPLATE = """{% for message in messages %}{{ message['role'].upper() + ': ' }}\
{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}\
{% endfor %}{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}\
{{ part['text'] + ' ' }}{% endfor %}{% endfor %}{% if add_generation_prompt %}\
{{ 'ASSISTANT:' }}{% endif %}"""
"""LLaVA's own, but for what it does with whole strings: as there, images come first."""


def write_tokenizer(
    folder: Path,
    specials: tuple[str, ...] = ("<image>",),
    merges: tuple[tuple[str, str], ...] = (),
    template: str = CHAT_TEMPLATE,
) -> None:
    """Save a tokenizer whose tokens are bytes, what `merges` makes of them, and, from the placeholder
    on, special tokens in place of others."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["".join(pair) for pair in merges]
    names = ["<s>", "</s>", *alphabet[: PLACEHOLDER - 2 - len(merged)], *merged]
    tokenizer = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name in ("<s>", "</s>", *specials):
        tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False)])
    assert tokenizer.token_to_id(specials[0]) == PLACEHOLDER
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))


def data_url(pixels: np.ndarray) -> str:
    """A picture as a data URL."""
    import base64
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


SIGLIP = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 30, "width": 30}}
"""Processor of the tower below: the last two rows and columns of pixels are no whole patch."""


def siglip_config() -> Any:
    """SigLIP's tower of that size."""
    from transformers import SiglipVisionConfig

    sizes = {key: VISION[key] for key in VISION if key not in ("model_type", "image_size")}
    return SiglipVisionConfig(**sizes, image_size=30)


GRIDS = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
NEXT = {
    **PROCESSOR,
    "image_processor_type": "LlavaNextImageProcessor",
    "image_grid_pinpoints": GRIDS,
}
"""Processor of a model that reads images in tiles."""


def write_llava_next(folder: Path) -> Any:
    """Save a LLaVA-NeXT as `write_llava` saves a LLaVA."""
    from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration

    kind: Any = (LlavaNextConfig, LlavaNextForConditionalGeneration)
    return write_llava(folder, processor=NEXT, kind=kind, image_grid_pinpoints=GRIDS)


def write_llava(
    folder: Path, *, processor: Any = PROCESSOR, kind: Any = None, **overrides: Any
) -> Any:
    """Save a LLaVA of random weights, large enough that an image decides what is answered, with its
    processor's settings; returns transformers' model."""
    import torch
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig
    from transformers import LlavaForConditionalGeneration as Llava

    torch.manual_seed(3)
    vision = {key: value for key, value in VISION.items() if key != "model_type"}
    text = {key: value for key, value in TEXT.items() if key != "model_type"}
    sections = {"vision_config": CLIPVisionConfig(**vision), "text_config": LlamaConfig(**text)}
    make_config, make_model = kind or (LlavaConfig, Llava)
    config = make_config(**{**sections, "image_token_index": PLACEHOLDER, **overrides})
    model: Any = make_model(config)
    model.eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(0.0, 0.3 if "embed" in name else 0.15)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


PLACE = 2 * PATCH
"""Edge of what gets a place in the models below."""
OWN_SIZES: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": PATCH,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 2 * PLACE**2,
    "max_pixels": 24 * PLACE**2,
}
"""Processor of a model whose images keep their own sizes."""
QWEN_TEXT: dict[str, Any] = {
    **{key: TEXT[key] for key in TEXT if key not in ("model_type", "head_dim")},
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
}
QWEN_VISION: dict[str, dict[str, Any]] = {
    "Qwen2VL": {
        "depth": 3,
        "embed_dim": 32,
        "hidden_size": 64,
        "mlp_ratio": 2,
        "num_heads": 2,
        "patch_size": PATCH,
    },
    "Qwen2_5_VL": {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": PATCH,
        "window_size": 2 * PLACE,
        "fullatt_block_indexes": [1, 3],
    },
    "Qwen3VL": {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": PATCH,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 2],
    },
}
"""Towers by family."""


def _qwen_rope(family: str) -> dict[str, Any]:
    interleaved = {"mrope_interleaved": True} if family == "Qwen3VL" else {}
    return {"rope_type": "default", "mrope_section": [2, 3, 3], **interleaved}


def _qwen_text(family: str) -> dict[str, Any]:
    """Rows of two blocks of Qwen3-VL's tower are added, and its heads have a size of their own."""
    own = {"num_hidden_layers": 3, "head_dim": 16} if family == "Qwen3VL" else {}
    return {key: QWEN_TEXT[key] for key in QWEN_TEXT if key != "rope_scaling"} | own


def qwen_config(family: str) -> dict[str, Any]:
    """A config as these models were published: the decoder's keys beside the tower's section, in
    Qwen3-VL in one of their own."""
    text = {**_qwen_text(family), "rope_scaling": _qwen_rope(family)}
    return {
        **({"text_config": text} if family == "Qwen3VL" else text),
        "architectures": [f"{family}ForConditionalGeneration"],
        "image_token_id": PLACEHOLDER,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        "vision_config": QWEN_VISION[family],
    }


def write_qwen(folder: Path, family: str) -> Any:
    """Save one of these models of random weights as `write_llava` saves a LLaVA. It never answers
    with a place of an image, which transformers would look for."""
    import torch
    import transformers

    torch.manual_seed(4)
    rope = {**_qwen_rope(family), "rope_theta": 1e6}
    text = _qwen_text(family)
    config = getattr(transformers, f"{family}Config")(
        text_config={**text, "rope_parameters": rope},
        vision_config=QWEN_VISION[family],
        image_token_id=PLACEHOLDER,
        vision_start_token_id=PLACEHOLDER + 1,
        video_token_id=PLACEHOLDER + 2,
        vision_end_token_id=PLACEHOLDER + 3,
    )
    model: Any = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    model.eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name and "ln_q" not in name:
                weight.normal_(0.0, 0.3 if "embed_tokens" in name else 0.15)
        model.lm_head.weight[PLACEHOLDER:] = 0.0
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(OWN_SIZES))
    return model


GEMMA_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": EDGE, "width": EDGE},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 2,
    "do_pan_and_scan": None,
}
"""Processor of the model below, as published ones are written."""
GEMMA_FRAME = (PLACEHOLDER + 1, PLACEHOLDER + 2)
GEMMA_PLACES = 4
"""Means of two by two patches."""
GEMMA_TEXT: dict[str, Any] = {
    **{key: TEXT[key] for key in TEXT if key not in ("model_type", "hidden_act")},
    "num_hidden_layers": 4,
    "tie_word_embeddings": True,
    "sliding_window": 7,
    "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "image_token_index": PLACEHOLDER,
    "boi_token_index": GEMMA_FRAME[0],
    "eoi_token_index": GEMMA_FRAME[1],
    "mm_tokens_per_image": GEMMA_PLACES,
    "eos_token_id": [2],
    "torch_dtype": "float32",
    "text_config": {"model_type": "gemma3_text", **GEMMA_TEXT},
    "vision_config": {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
}
"""A config as these models were published; the first layers attend to seven positions."""


def write_gemma3(folder: Path, **overrides: Any) -> Any:
    """Save a Gemma 3 with images of random weights as `write_llava` saves a LLaVA. It answers with
    no place of an image."""
    import torch
    from transformers import (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma3TextConfig,
        SiglipVisionConfig,
    )

    torch.manual_seed(5)
    sizes: dict[str, Any] = {key: VISION[key] for key in VISION if key != "model_type"}
    sizes["vision_use_head"] = False
    config = Gemma3Config(
        text_config=Gemma3TextConfig(**{**GEMMA_TEXT, **overrides}),
        vision_config=SiglipVisionConfig(**sizes),
        image_token_index=PLACEHOLDER,
        boi_token_index=GEMMA_FRAME[0],
        eoi_token_index=GEMMA_FRAME[1],
        mm_tokens_per_image=GEMMA_PLACES,
    )
    model: Any = Gemma3ForConditionalGeneration(config)
    model.eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(0.0, 0.3 if "embed" in name else 0.15)
        model.get_input_embeddings().weight[PLACEHOLDER:] = 0.0
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(GEMMA_PROCESSOR))
    return model


GEMMA_TOKENS = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
GEMMA_TEMPLATE = """{% for message in messages %}{{ message['role'] + '\n' }}\
{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for part in message['content'] %}\
{% if part['type'] == 'image' %}{{ '<start_of_image>' }}\
{% else %}{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"""
"""Gemma 3's own, but for the marks of turns."""


def write_gemma3_tokenizer(folder: Path) -> None:
    """Save a tokenizer that, like Gemma's, has tokens of several lines' ends."""
    newline = "\u010a"
    merges = ((newline, newline), (2 * newline, newline))
    write_tokenizer(folder, GEMMA_TOKENS, merges, GEMMA_TEMPLATE)

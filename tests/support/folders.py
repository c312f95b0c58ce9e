"""Folders of pooling models, in the layout of sentence-transformers: random weights, real
tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

TEXTS = [
    "What is the capital of France?",
    "Paris is the capital of France.",
    "A",
    "The weather is lovely today, and it will be as lovely tomorrow " * 4,
    "He drove to the stadium.",
]

_TINY = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
_MODELS: dict[str, dict[str, Any]] = {
    "bert": _TINY | {"intermediate_size": 96, "max_position_embeddings": 256},
    "xlm-roberta": _TINY
    | {"intermediate_size": 96, "max_position_embeddings": 258, "pad_token_id": 1},
    "qwen3": _TINY
    | {
        "intermediate_size": 96,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
    }
    | {"max_position_embeddings": 256},
    "mistral": _TINY
    | {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}
    | {"max_position_embeddings": 256},
}
_MODELS["gemma3_text"] = _MODELS["mistral"] | {
    "num_hidden_layers": 3, "sliding_window": 16, "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "use_bidirectional_attention": True,
}  # fmt: skip
_MODELS["modernbert"] = _TINY | {
    "intermediate_size": 96, "max_position_embeddings": 256, "local_attention": 16,
}  # fmt: skip
_SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def randomize(model: Any) -> Any:
    """Random weights, of norms and biases too."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            std = 0.2 if parameter.ndim == 1 else 0.1
            parameter.copy_((parameter if parameter.ndim == 1 else 0) + std * noise)
    return model.eval()


def _wordpiece() -> Any:
    """A tokenizer as BERT's, trained on the texts."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers.trainers import WordPieceTrainer

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(TEXTS, WordPieceTrainer(vocab_size=150, special_tokens=_SPECIALS))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer, {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}


def _unigram() -> Any:
    """A tokenizer as XLM-RoBERTa's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from tokenizers.trainers import UnigramTrainer

    names = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = UnigramTrainer(vocab_size=100, special_tokens=names, unk_token="<unk>")
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def _byte_level() -> Any:
    """A tokenizer as Qwen's, with the end of text that Qwen3-Embedding puts behind every text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from tokenizers.trainers import BpeTrainer

    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    corpus = [*TEXTS, *["yes", "no"] * 50]
    trainer = BpeTrainer(vocab_size=330, special_tokens=names, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>",
        pair="$A <|endoftext|> $B <|endoftext|>",
        special_tokens=[("<|endoftext|>", 0)],
    )
    return tokenizer, {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}


_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "bert": _wordpiece,
    "xlm-roberta": _unigram,
    "qwen3": _byte_level,
    "mistral": _byte_level,
    "gemma3_text": _byte_level,
    "modernbert": _wordpiece,
}


def make_folder(
    folder: Path,
    family: str,
    *,
    auto: str = "AutoModel",
    pooling: str | None = None,
    is_normalized: bool = True,
    dense: Sequence[tuple[int, bool, str]] = (),
    **changes: Any,
) -> Any:
    """A model folder, and the model of `transformers` that it was saved from.

    `pooling` writes the files of sentence-transformers, with that `pooling_mode_...`, and behind
    it `dense` layers: outputs, whether there is a bias, activation.
    """
    import transformers

    tokenizer, names = _TOKENIZERS[family]()
    config = transformers.AutoConfig.for_model(
        family, **{**_MODELS[family], "vocab_size": tokenizer.get_vocab_size(), **changes}
    )
    for name in ("bos_token_id", "eos_token_id"):
        if family in ("qwen3", "mistral", "gemma3_text"):
            setattr(config, name, 0)
    config.pad_token_id = 0 if family == "bert" else 1
    reference = randomize(
        getattr(transformers, auto).from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
    )
    reference.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    if pooling is not None:
        write_modules(folder, pooling, is_normalized=is_normalized, dense=dense)
    return reference


def write_modules(
    folder: Path,
    pooling: str,
    *,
    is_normalized: bool = True,
    dense: Sequence[tuple[int, bool, str]] = (),
) -> None:
    """The files of sentence-transformers."""
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), *["Normalize"] * is_normalized]
    num_inputs = 64
    for number, (num_outputs, has_bias, activation) in enumerate(dense, start=2):
        write_dense(folder / f"{number}_Dense", num_inputs, num_outputs, has_bias, activation)
        num_inputs = num_outputs
    modules = [
        {
            "idx": n,
            "name": str(n),
            "path": f"{n}_{kind}" if n else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for n, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 64, f"pooling_mode_{pooling}": True})
    )


def write_dense(
    folder: Path, num_inputs: int, num_outputs: int, has_bias: bool, activation: str, **more: Any
) -> None:
    """A dense layer with random weights."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(num_outputs)
    weights = {"linear.weight": torch.randn(num_outputs, num_inputs, generator=generator) / 8}
    if has_bias:
        weights["linear.bias"] = torch.randn(num_outputs, generator=generator)
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    config = {"in_features": num_inputs, "out_features": num_outputs, "bias": has_bias}
    (folder / "config.json").write_text(
        json.dumps(config | {"activation_function": activation} | more)
    )

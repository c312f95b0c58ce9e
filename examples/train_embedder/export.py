"""Write a trained embedder as a folder in the layout of sentence-transformers.

python -m examples.train_embedder.export --out quire/assets/quire-embedder
"""

import argparse
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

from examples.train_storyteller.export import write_attribution, write_json

from .passages import ATTRIBUTION_FILE
from .tokenizer import SPECIAL_TOKENS
from .train import HIDDEN_SIZE

MAX_LEN = 512
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {
        "idx": 2,
        "name": "2",
        "path": "2_Normalize",
        "type": "sentence_transformers.models.Normalize",
    },
]
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": MAX_LEN,
    **{f"{token.strip('[]').lower()}_token": token for token in SPECIAL_TOKENS},
}


def write_folder(model: transformers.BertModel, tokenizer: Path, out: Path) -> None:
    """Write everything that loading it needs; the weights in float16."""
    (out / "1_Pooling").mkdir(parents=True, exist_ok=True)
    tensors = {
        name: weight.to(torch.float16).contiguous()
        for name, weight in model.state_dict().items()
        if weight.is_floating_point()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors makes it readable for its owner only
    config = model.config.to_diff_dict() | {"architectures": ["BertModel"], "dtype": "float16"}
    write_json(out / "config.json", config)
    write_json(out / "modules.json", MODULES)
    pooling = {"word_embedding_dimension": HIDDEN_SIZE, "pooling_mode_mean_tokens": True}
    write_json(out / "1_Pooling/config.json", pooling)
    write_json(
        out / "sentence_bert_config.json", {"max_seq_length": MAX_LEN, "do_lower_case": False}
    )
    write_json(out / "tokenizer_config.json", TOKENIZER_CONFIG)
    shutil.copyfile(tokenizer, out / "tokenizer.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path("../shared/data/corpus"))
    parser.add_argument("--tokenizer", type=Path, default=Path("build/embedder/tokenizer.json"))
    parser.add_argument("--run", type=Path, default=Path("build/embedder/run"))
    parser.add_argument("--out", type=Path, default=Path("quire/assets/quire-embedder"))
    args = parser.parse_args()
    model = transformers.BertModel.from_pretrained(
        args.run, add_pooling_layer=False, dtype=torch.float32
    )
    write_folder(model, args.tokenizer, args.out)
    table, credits = args.corpus / ATTRIBUTION_FILE, args.out / "ATTRIBUTION.txt"
    write_attribution(table, credits, "quire-embedder", "cut into passages of a few sentences")


if __name__ == "__main__":
    main()

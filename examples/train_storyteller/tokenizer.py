"""Train the byte-level BPE tokenizer of the storyteller and write its two files.

Owns `tokenizer.json` and `tokenizer_config.json`. Run once; the files are an input of the training.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from . import prompts
from .corpus import Tale, read_tales

VOCAB_SIZE = 4096
# The splitting rule of the Qwen2 family: words with their space, single digits, runs of line breaks
# as one piece.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def texts_for_training(tales: list[Tale]) -> Iterator[str]:
    """Each tale as often as its weight says (rounded up),
    with a few requests so that their words get tokens."""
    requests = (
        "Tell me a story about a brave knight.",
        "Write a short story about a princess and a fox.",
    )
    for tale in tales:
        for _ in range(max(1, round(tale.weight))):
            yield "\n\n".join(tale.paragraphs)
    for _ in range(300):
        yield from requests
        yield "user\nassistant\nsystem\n"


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(prompts.SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_config(max_len: int) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_len,
        "bos_token": None,
        "eos_token": prompts.TURN_END,
        "pad_token": prompts.END_OF_TEXT,
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": prompts.CHAT_TEMPLATE,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path("../shared/data/corpus"))
    parser.add_argument("--out", type=Path, default=Path("quire/assets/quire-storyteller"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    tales = [tale for tale in read_tales(arguments.corpus) if not tale.is_held_out]
    tokenizer = train_tokenizer(texts_for_training(tales))
    tokenizer.save(str(arguments.out / "tokenizer.json"), pretty=False)
    config = json.dumps(tokenizer_config(512), indent=2)
    (arguments.out / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")
    print(f"{tokenizer.get_vocab_size()} tokens, {len(tales)} tales")


if __name__ == "__main__":
    main()

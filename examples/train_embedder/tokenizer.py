"""Train the embedder's tokenizer: lower-cased WordPiece.

python -m examples.train_embedder.tokenizer --out build/embedder/tokenizer.json
"""

import argparse
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from .passages import read_passages

VOCABULARY_SIZE = 8192
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def train_tokenizer(texts: list[str]) -> tokenizers.Tokenizer:
    """Return a tokenizer of `VOCABULARY_SIZE` tokens, that puts [CLS] and [SEP] around a text."""
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCABULARY_SIZE, special_tokens=SPECIAL_TOKENS, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    first, last = (SPECIAL_TOKENS.index(token) for token in ("[CLS]", "[SEP]"))
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", first), ("[SEP]", last)]
    )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path("../shared/data/corpus"))
    parser.add_argument("--out", type=Path, default=Path("build/embedder/tokenizer.json"))
    args = parser.parse_args()
    texts = [passage.text for passage in read_passages(args.corpus) if not passage.is_held_out]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    train_tokenizer(texts).save(str(args.out))


if __name__ == "__main__":
    main()

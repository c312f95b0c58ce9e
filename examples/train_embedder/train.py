"""Train the embedder: queries near their passages, far from the others of the batch.

The loss is the cross-entropy of the right passage among all of the batch (van den Oord, Li and
Vinyals, 2018), in both directions. The network is Transformers' BertModel, so the folder that
`export` writes is one that others read.

    python -m examples.train_embedder.train --minutes 30
"""

import argparse
import random
import time
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from .cooccurrence import token_vectors
from .passages import Passage, Queries, read_passages
from .tokenizer import SPECIAL_TOKENS, VOCABULARY_SIZE

HIDDEN_SIZE = 192
NUM_SEEN = 60_000
"""Passages that the token vectors are counted on."""
BATCH_SIZE, MAX_TOKENS = 128, 96
TEMPERATURE = 0.05
LEARNING_RATE, EMBEDDING_RATE = 1.5e-3, 3e-3
WARMUP_STEPS = 50


def new_model() -> transformers.BertModel:
    """Return a network of 2.5 million parameters with random weights."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY_SIZE, hidden_size=HIDDEN_SIZE, num_hidden_layers=2,
        num_attention_heads=6, intermediate_size=2 * HIDDEN_SIZE, max_position_embeddings=512,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0,
    )  # fmt: skip
    return transformers.BertModel(config, add_pooling_layer=False)  # type: ignore[no-untyped-call]


class TextEncoder:
    """Texts to ids, padded."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        tokenizer.enable_truncation(MAX_TOKENS)
        tokenizer.enable_padding(pad_id=SPECIAL_TOKENS.index("[PAD]"))

    def __call__(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """Return ids and their mask, both [texts, tokens]."""
        encoded = self._tokenizer.encode_batch(texts)
        ids = torch.tensor([each.ids for each in encoded])
        return ids, torch.tensor([each.attention_mask for each in encoded])


def vectors_of(model: transformers.BertModel, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the normalised mean of each text's hidden states, [texts, hidden]."""
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    weights = mask[..., None].to(hidden.dtype)
    return F.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def loss_of(queries: Tensor, passages: Tensor) -> Tensor:
    """Return the loss of vectors [batch, hidden]; each query's passage is in its own place."""
    scores = queries @ passages.T / TEMPERATURE
    right = torch.arange(len(scores))
    return (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2


def begin(tokenizer: tokenizers.Tokenizer, passages: list[Passage]) -> transformers.BertModel:
    """Return a network whose token vectors are counted, and whose layers add little yet."""
    model = new_model()
    some = random.Random(1).sample(passages, min(NUM_SEEN, len(passages)))
    texts = [each.text for each in some]
    ids = [each.ids for each in tokenizer.encode_batch(texts, add_special_tokens=False)]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "word_embeddings" in name:
                weight.copy_(token_vectors(ids, VOCABULARY_SIZE, HIDDEN_SIZE))
            elif "position_embeddings" in name:
                weight.mul_(0.1)
            elif name.endswith("output.dense.weight"):
                weight.mul_(0.3)
    return model


def train(
    model: transformers.BertModel, encode: TextEncoder, passages: list[Passage], minutes: float
) -> None:
    """Train for so many minutes of the clock; the learning rate falls to zero with them."""
    rng, queries = random.Random(0), Queries(passages)
    tables = [p for name, p in model.named_parameters() if "embeddings" in name]
    others = [p for name, p in model.named_parameters() if "embeddings" not in name]
    groups = [{"params": tables, "base": EMBEDDING_RATE}, {"params": others, "base": LEARNING_RATE}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    started_s, step, mean = time.monotonic(), 0, 0.0
    while (progress := (time.monotonic() - started_s) / (60 * minutes)) < 1:
        rate = min(1.0, (step + 1) / WARMUP_STEPS) * (1 - progress)
        for group in optimizer.param_groups:
            group["lr"] = group["base"] * rate
        pairs = [queries.draw(each, rng) for each in rng.sample(passages, BATCH_SIZE)]
        found = [vectors_of(model, *encode(list(side))) for side in zip(*pairs, strict=True)]
        loss = loss_of(*found)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        mean += (float(loss.detach()) - mean) / min(step + 1, 50)
        step += 1
        if step % 50 == 0:
            print(f"step {step}  {progress:.0%}  loss {mean:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path("../shared/data/corpus"))
    parser.add_argument("--tokenizer", type=Path, default=Path("build/embedder/tokenizer.json"))
    parser.add_argument("--out", type=Path, default=Path("build/embedder/run"))
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    passages = [each for each in read_passages(args.corpus) if not each.is_held_out]
    print(f"{len(passages)} passages", flush=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(args.tokenizer))
    model = begin(tokenizer, passages)
    train(model, TextEncoder(tokenizer), passages, args.minutes)
    model.save_pretrained(args.out)


if __name__ == "__main__":
    main()

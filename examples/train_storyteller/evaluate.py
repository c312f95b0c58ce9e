"""Perplexity of an exported model on held-out tales, by kind: of the books, and of the story
grammar.

Owns the numbers in the model card. Only the story is scored (not the request), each token given all
before it.
"""

import argparse
import math
import random
from collections import defaultdict
from pathlib import Path

import torch
from tokenizers import Tokenizer

from .batches import Batch, collate
from .corpus import Tale, read_tales
from .grammar import StoryGrammar
from .model import Storyteller
from .sample import load_exported
from .samples import Encoder, GrammarSource, SampleSource, kind_of, learn_lexicon

NUM_GRAMMAR_TALES = 100


def held_out_batches(corpus: Path, tokenizer: Tokenizer) -> dict[str, list[Batch]]:
    """One batch for each held-out tale's opening, grouped by the kind of tale."""
    tales = read_tales(corpus)
    kept, held_out = (
        [tale for tale in tales if tale.is_held_out is wanted] for wanted in (False, True)
    )
    source = SampleSource(kept, tokenizer, learn_lexicon(kept))
    batches: dict[str, list[Batch]] = defaultdict(list)
    for tale, sample in zip(held_out, source.evaluation_samples(held_out), strict=True):
        batches[_label(tale)].append(collate([sample]))
    return batches


def _label(tale: Tale) -> str:
    return {
        "children": "storybooks",
        "fable": "fables",
        "fairy tale": "fairy tales",
        "novel": "novels",
    }[kind_of(tale)]


def grammar_batches(tokenizer: Tokenizer) -> list[Batch]:
    """Tales of combinations (hero and plot, hero and describing word, two heroes)
    that are never trained on."""
    encoder, grammar, rng = Encoder(tokenizer), StoryGrammar(is_held_out=True), random.Random(0)
    tales = [grammar.draw(rng) for _ in range(NUM_GRAMMAR_TALES)]
    return [
        collate([encoder.join([(GrammarSource.head(tale, rng), tale.text)], has_end=True)])
        for tale in tales
    ]


@torch.no_grad()
def total_loss(model: Storyteller, batches: list[Batch]) -> tuple[float, int]:
    """Summed loss in nats and the number of scored tokens."""
    total, count = 0.0, 0
    for batch in batches:
        num_targets = int((batch.targets >= 0).sum())
        total += float(model.loss(batch.ids, batch.targets)) * num_targets
        count += num_targets
    return total, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path("../shared/data/corpus"))
    parser.add_argument("--model", type=Path, default=Path("quire/assets/quire-storyteller"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = load_exported(arguments.model)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    loss_sum, num_tokens = 0.0, 0
    for label, batches in held_out_batches(arguments.corpus, tokenizer).items():
        loss, count = total_loss(model, batches)
        loss_sum, num_tokens = loss_sum + loss, num_tokens + count
        print(
            f"{label}: {len(batches)} tales, {count} tokens, perplexity "
            f"{math.exp(loss / count):.2f}"
        )
    print(
        f"all of the books: {num_tokens} tokens, perplexity {math.exp(loss_sum / num_tokens):.2f}"
    )
    loss, count = total_loss(model, grammar_batches(tokenizer))
    print(
        f"story grammar: {NUM_GRAMMAR_TALES} tales, {count} tokens, perplexity "
        f"{math.exp(loss / count):.2f}"
    )


if __name__ == "__main__":
    main()

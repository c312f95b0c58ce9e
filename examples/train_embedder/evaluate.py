"""Measure how often the right text comes first, beside BM25 (Robertson and Zaragoza, 2009).

On passages that were never trained on, with queries of the kinds it was trained on; and on
questions that were written by hand (`questions.tsv`), each about one text of the same file.

    python -m examples.train_embedder.evaluate quire-embedder
"""

import argparse
import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire import LLM

from .passages import Queries, read_passages, words_of

QUESTIONS = Path(__file__).parent / "questions.tsv"
NUM_PASSAGES = 1000
K1, B = 1.2, 0.75


def ranks_of(scores: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return for each query the rank of its own text, from 0; scores are [queries, texts]."""
    own = scores.diagonal()[:, None]
    ranks: NDArray[np.int64] = (scores > own).sum(1)
    return ranks


def bm25(queries: Sequence[str], texts: Sequence[str]) -> NDArray[np.float64]:
    """Return scores [queries, texts]."""
    words = [Counter(words_of(text)) for text in texts]
    lengths = np.array([sum(each.values()) for each in words], float)
    holders = Counter(word for each in words for word in each)
    norms = K1 * (1 - B + B * lengths / lengths.mean())
    scores = np.zeros((len(queries), len(texts)))
    for row, query in enumerate(queries):
        for word in set(words_of(query)) & set(holders):
            weight = math.log(1 + (len(texts) - holders[word] + 0.5) / (holders[word] + 0.5))
            counts = np.array([each[word] for each in words], float)
            scores[row] += weight * counts * (K1 + 1) / (counts + norms)
    return scores


def embedded(llm: LLM, queries: Sequence[str], texts: Sequence[str]) -> NDArray[np.float64]:
    """Return the cosines [queries, texts]."""
    outputs = llm.embed([*queries, *texts], use_tqdm=False)
    vectors = np.stack([each.outputs.data for each in outputs]).astype(float)
    found: NDArray[np.float64] = vectors[: len(queries)] @ vectors[len(queries) :].T
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="quire-embedder")
    parser.add_argument("--corpus", type=Path, default=Path("../shared/data/corpus"))
    args = parser.parse_args()
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()
    asked = [line.split("\t") for line in lines]
    tasks = {"questions by hand": ([each[0] for each in asked], [each[1] for each in asked])}
    if args.corpus.is_dir():
        passages, rng = read_passages(args.corpus), random.Random(3)
        queries = Queries(passages)
        held_out = rng.sample([each for each in passages if each.is_held_out], NUM_PASSAGES)
        pairs = [queries.draw(each, rng) for each in held_out]
        tasks["held-out passages"] = ([query for query, _ in pairs], [text for _, text in pairs])
    with LLM(args.model, runner="pooling") as llm:
        for name, (queries_of, texts) in tasks.items():
            for method, scores in (
                ("BM25", bm25(queries_of, texts)), (args.model, embedded(llm, queries_of, texts)),
            ):  # fmt: skip
                ranks = ranks_of(scores)
                print(
                    f"{name}, {len(texts)} texts, {method}: first {(ranks == 0).mean():.0%}, "
                    f"among five {(ranks < 5).mean():.0%}"
                )


if __name__ == "__main__":
    main()

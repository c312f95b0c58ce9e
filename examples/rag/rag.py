"""Answer a question from a file of texts: embed, search, rerank, answer. Runs offline.

    python -m examples.rag.rag "Where does the fox sleep?"

By default a small shipped model finds, and another reranks and answers, not well: it tells stories.
Name better ones with --embedder, --reranker and --answerer, each a folder or a name of the hub.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from quire import LLM, Predicate, SamplingParams

STORYTELLER, EMBEDDER = "quire-storyteller", "quire-embedder"
DOCUMENTS = Path(__file__).parent / "documents.txt"


def search(embedder: LLM, question: str, documents: Sequence[str], count: int) -> list[str]:
    """Return the documents whose vectors are nearest to the question's."""
    outputs = embedder.embed([question, *documents], use_tqdm=False)
    query, *vectors = (output.outputs.data for output in outputs)
    order = np.argsort(-(np.stack(vectors) @ query), kind="stable")
    return [documents[number] for number in order[:count]]


def rerank(model: LLM, question: str, documents: Sequence[str]) -> list[str]:
    """Return the documents with the best first: by a cross-encoder's score, or, of a model that
    generates, by how likely it is that the document answers the question."""
    if model.engine.plan.generates:
        asked = Predicate(f"The text answers this question: {question}")
        scores = [model.decide(each, asked)[0].probability for each in documents]  # type: ignore[union-attr]
    else:
        pairs = model.score(question, documents, use_tqdm=False)
        scores = [pair.outputs.score for pair in pairs]
    return [documents[number] for number in np.argsort(-np.array(scores), kind="stable")]


def answer(model: LLM, question: str, documents: Sequence[str]) -> str:
    """Answer from the documents."""
    context = "\n".join(documents)
    message = {"role": "user", "content": f"{context}\n\nAnswer from this text: {question}"}
    params = SamplingParams(temperature=0.0, max_tokens=64)
    return model.chat([message], params, use_tqdm=False)[0].outputs[0].text.strip()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the four steps and show what each gives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("--documents", type=Path, default=DOCUMENTS, help="one text a line")
    parser.add_argument("--embedder", default=EMBEDDER)
    parser.add_argument("--reranker", default=STORYTELLER)
    parser.add_argument("--answerer", default=STORYTELLER)
    args = parser.parse_args(arguments)
    documents = args.documents.read_text(encoding="utf-8").splitlines()
    with ExitStack() as stack:
        embedder = stack.enter_context(closing(LLM(args.embedder, convert="embed")))
        loaded = {args.embedder: embedder}
        for name in (args.reranker, args.answerer):
            if name not in loaded:
                loaded[name] = stack.enter_context(closing(LLM(name)))
        found = search(embedder, args.question, documents, count=3)
        best = rerank(loaded[args.reranker], args.question, found)
        print("found:", *best, sep="\n  ")
        print("answer:", answer(loaded[args.answerer], args.question, best[:2]))


if __name__ == "__main__":
    main()

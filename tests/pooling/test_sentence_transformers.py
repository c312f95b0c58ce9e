"""What users of sentence-transformers find again: the library's own calls on the same folders, where
it is installed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import TEXTS

from quire import LLM

FolderOf = Callable[..., tuple[Path, Any]]


@pytest.fixture(scope="module")
def library() -> Any:
    """Imported by the one worker that needs it: that takes seconds."""
    return pytest.importorskip("sentence_transformers")


@pytest.mark.parametrize(("family", "pooling"), [("bert", "mean_tokens"), ("qwen3", "lasttoken")])
def test_encode_gives_the_vectors_of_embed(
    family: str, pooling: str, folder_of: FolderOf, library: Any, tmp_path: Path
) -> None:
    folder, _ = folder_of(family, pooling=pooling)
    model = library.SentenceTransformer(str(folder), device="cpu")
    model.save_pretrained(str(tmp_path))  # in the layout of the version that is installed
    wanted = model.encode(TEXTS)
    for each in (folder, tmp_path):
        with closing(LLM(str(each), runner="pooling", dtype="float32")) as llm:
            found = [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_a_cross_encoder_ranks_alike(folder_of: FolderOf, library: Any) -> None:
    folder, _ = folder_of("bert", auto="AutoModelForSequenceClassification", num_labels=1)
    ranked = library.CrossEncoder(str(folder), device="cpu").rank(TEXTS[0], TEXTS)
    with closing(LLM(str(folder), dtype="float32")) as llm:
        outputs = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
    scores = [each.outputs.score for each in outputs]
    assert [each["corpus_id"] for each in ranked] == sorted(
        range(len(TEXTS)), key=lambda n: -scores[n]
    )
    np.testing.assert_allclose(
        [each["score"] for each in ranked], sorted(scores, reverse=True), atol=1e-4
    )

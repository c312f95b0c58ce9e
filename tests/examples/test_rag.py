"""The retrieval example runs offline: with one model for all steps, and with one for each."""

from __future__ import annotations

from pathlib import Path

import pytest
from folders import TEXTS, make_folder

from examples.rag import rag
from quire import LLM


def test_the_shipped_models_find_rerank_and_answer(capsys: pytest.CaptureFixture[str]) -> None:
    rag.main(["Where does the fox sleep?"])
    shown = capsys.readouterr().out
    documents = rag.DOCUMENTS.read_text(encoding="utf-8").splitlines()
    found = shown.partition("answer: ")[0].splitlines()[1:]
    assert len(found) == 3 and all(each.strip() in documents for each in found)
    assert any("fox slept" in each for each in found)
    assert shown.partition("answer: ")[2].strip()


def test_each_step_takes_a_model_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / name for name in ("embedder", "reranker")]
    for folder in folders:
        folder.mkdir()
    make_folder(folders[0], "bert", pooling="mean_tokens")
    make_folder(folders[1], "bert", auto="AutoModelForSequenceClassification", num_labels=1)
    path = tmp_path / "documents.txt"
    path.write_text("\n".join(TEXTS))
    options = ["--embedder", str(folders[0]), "--reranker", str(folders[1])]
    rag.main([TEXTS[0], "--documents", str(path), *options])
    found = [line.strip() for line in capsys.readouterr().out.splitlines()[1:4]]
    with LLM(str(folders[1])) as llm:
        scores = [each.outputs.score for each in llm.score(TEXTS[0], found, use_tqdm=False)]
    assert scores == sorted(scores, reverse=True)
    assert TEXTS[0] in found  # nearest to itself

"""How the embedder is trained, and the folder that others read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from examples.train_embedder.export import write_folder
from examples.train_embedder.tokenizer import train_tokenizer
from examples.train_embedder.train import TextEncoder, new_model, train, vectors_of
from quire import LLM
from tests.examples.train_embedder.test_embedder import PASSAGES, SENTENCES

pytestmark = pytest.mark.slow  # importing transformers' models alone takes seconds


def test_a_few_steps_make_a_folder_that_the_engine_reads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = train_tokenizer([each.text for each in PASSAGES])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model, encode = new_model(), TextEncoder(tokenizer)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    train(model, encode, PASSAGES * 40, minutes=0.02)
    for name, weight in model.named_parameters():
        assert not torch.equal(before[name], weight), name
    write_folder(model, tmp_path / "tokenizer.json", tmp_path / "made")
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(torch.float16))
        expected = vectors_of(model, *encode(list(SENTENCES)))
    with LLM(str(tmp_path / "made"), runner="pooling", dtype="float32") as llm:
        found = [each.outputs.data for each in llm.embed(list(SENTENCES), use_tqdm=False)]
    assert np.allclose(np.stack(found), expected.numpy(), atol=1e-5)

"""Vectors of tokens and their late interaction equal what sentence-transformers computes of the same
folder; its rules are written out here in torch.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders import make_folder, write_dense
from safetensors.torch import load_file

from quire import LLM, PoolingParams
from quire.errors import QuireError

WIDTH = 24
QUERY = "What is the capital of France?"
IDENTITY = "torch.nn.modules.linear.Identity"


def make_multi_vector(
    folder: Path, family: str, *, is_pylate: bool = False, **keys: Any
) -> tuple[Path, Any]:
    """A folder in one of the two layouts; `keys` are of the Transformer's file, or of PyLate's."""
    reference = make_folder(folder, family)
    kinds = ["Transformer", "Dense", *(() if is_pylate else ("MultiVectorMask", "Normalize"))]
    modules = [
        {"idx": n, "name": str(n), "path": f"{n}_{kind}" if n else "", "type": f"a.b.{kind}"}
        for n, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    more = {} if is_pylate else {"module_input_name": "token_embeddings"}
    write_dense(folder / "1_Dense", 64, WIDTH, False, IDENTITY, **more)
    if is_pylate:
        config = {"query_prefix": "lovely ", "document_prefix": "today ", **keys}
        config |= {"skiplist_words": list(string.punctuation), "similarity_fn_name": "MaxSim"}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(config))
        return folder, reference
    (folder / "2_MultiVectorMask").mkdir()
    mask = {"skiplist_words": list(string.punctuation), "skiplist_tasks": ["document"]}
    (folder / "2_MultiVectorMask" / "config.json").write_text(json.dumps(mask))
    (folder / "sentence_bert_config.json").write_text(json.dumps(keys))
    prompts = {"query": "lovely ", "document": "today "}
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    return folder, reference


def vectors(folder: Path, reference: Any, ids: list[int], skipped: set[int]) -> torch.Tensor:
    """Projected, normalised, without tokens that do not count."""
    weight = load_file(folder / "1_Dense" / "model.safetensors")["linear.weight"]
    with torch.inference_mode():
        states = reference(torch.tensor([ids])).last_hidden_state[0]
        made = torch.nn.functional.normalize(states @ weight.T, dim=-1)
    return made[[token not in skipped for token in ids]]


@pytest.fixture(params=["bert", "modernbert", "qwen3"])
def loaded(request: Any, tmp_path: Path) -> Iterator[tuple[LLM, Path, Any]]:
    folder, reference = make_multi_vector(tmp_path, request.param)
    with closing(LLM(str(folder), dtype="float32", kv_cache_memory="8MiB")) as llm:
        yield llm, folder, reference


def _skipped(llm: LLM) -> set[int]:
    tokenizer = llm.get_tokenizer()
    found = {tokenizer.convert_tokens_to_ids(sign) for sign in string.punctuation}
    return {each for each in found if each is not None} - {tokenizer.convert_tokens_to_ids("[UNK]")}


def test_vectors_and_scores_follow_the_folder(
    loaded: tuple[LLM, Path, Any], texts: list[str]
) -> None:
    llm, folder, reference = loaded
    tokenizer, skipped = llm.get_tokenizer(), _skipped(llm)
    documents = [tokenizer("today " + text)["input_ids"] for text in texts]
    wanted = [vectors(folder, reference, ids, skipped) for ids in documents]
    outputs = llm.encode(texts, use_tqdm=False)
    for output, ids, vector in zip(outputs, documents, wanted, strict=True):
        assert output.prompt_token_ids == ids
        np.testing.assert_allclose(output.outputs.data, vector, atol=1e-4)
    assert any(len(vector) < len(ids) for vector, ids in zip(wanted, documents, strict=True))
    ids = tokenizer("lovely " + QUERY)["input_ids"]
    query = vectors(folder, reference, ids, set())
    [output] = llm.encode(QUERY, PoolingParams(prompt_name="query"), use_tqdm=False)
    np.testing.assert_allclose(output.outputs.data, query, atol=1e-4)
    scores = [each.outputs.score for each in llm.score(QUERY, texts, use_tqdm=False)]
    maxsim = [float((query @ vector.T).max(1).values.sum()) for vector in wanted]
    np.testing.assert_allclose(scores, maxsim, atol=1e-3)
    assert np.argsort(scores).tolist() == np.argsort(maxsim).tolist()
    alone = [llm.score(QUERY, text, use_tqdm=False)[0].outputs.score for text in texts]
    assert alone == scores
    with pytest.raises(QuireError, match="makes one of each token; use encode"):
        llm.embed(texts, use_tqdm=False)


@pytest.mark.parametrize("strategy", ["min", "fixed"])
def test_queries_are_filled_up_where_the_folder_says_so(strategy: str, tmp_path: Path) -> None:
    expansion = {"strategy": strategy, "length": 12, "attend": True, "token": None}
    folder, reference = make_multi_vector(tmp_path, "bert", query_expansion=expansion)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"mask_token": "[MASK]"}))
    with closing(LLM(str(folder), dtype="float32")) as llm:
        tokenizer = llm.get_tokenizer()
        params = PoolingParams(prompt_name="query")
        [short] = llm.encode("A", params, use_tqdm=False)
        ids = tokenizer("lovely A")["input_ids"]
        assert short.prompt_token_ids == ids + [4] * (12 - len(ids))
        wanted = vectors(folder, reference, short.prompt_token_ids, set())
        np.testing.assert_allclose(short.outputs.data, wanted, atol=1e-4)
        [long] = llm.encode("lovely " * 20, params, use_tqdm=False)
        assert len(long.prompt_token_ids) == (12 if strategy == "fixed" else 23)


def test_pylates_folders_are_read_too(tmp_path: Path, texts: list[str]) -> None:
    keys = {"query_length": 32, "document_length": 96}
    folder, reference = make_multi_vector(tmp_path, "bert", is_pylate=True, **keys)
    options: dict[str, Any] = {"dtype": "float32"}
    with closing(LLM(str(folder), **options)) as llm:
        wanted = vectors(
            folder, reference, llm.get_tokenizer()("today " + texts[0])["input_ids"], _skipped(llm)
        )
        [output] = llm.encode(texts[0], use_tqdm=False)
        np.testing.assert_allclose(output.outputs.data, wanted, atol=1e-4)
        with pytest.raises(QuireError, match="fills queries up with tokens that no other token"):
            llm.score(QUERY, texts, use_tqdm=False)
    with closing(LLM(str(folder), pooler_config={"query_expansion": False}, **options)) as llm:
        assert len(llm.score(QUERY, texts[:2], use_tqdm=False)) == 2
        with pytest.raises(QuireError, match=r"the query has \d+ tokens, and the model takes 32"):
            llm.score("lovely " * 60, texts[0], use_tqdm=False)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("2_MultiVectorMask/config.json", {"keep_only_token_ids": [1]}, "keep_only_token_ids"),
        ("2_MultiVectorMask/config.json", {"skiplist_words": "abc"}, "a list of words"),
        ("sentence_bert_config.json", {"query_expansion": {"length": 0}}, "a number of tokens"),
        ("config_sentence_transformers.json", {"similarity_fn_name": "dot"}, "'dot' is not"),
    ],
)
def test_rules_that_are_not_known_are_refused(
    name: str, content: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    folder, _ = make_multi_vector(tmp_path, "bert")
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(QuireError, match=complaint):
        LLM(str(folder))


def test_the_server_scores_as_the_library_does(
    tmp_path: Path, texts: list[str], serve: Callable[..., Any]
) -> None:
    folder, _ = make_multi_vector(tmp_path, "bert")
    with closing(LLM(str(folder), dtype="float32")) as llm:
        wanted = [each.outputs.score for each in llm.score(QUERY, texts, use_tqdm=False)]
        encoded = llm.encode(texts[0], use_tqdm=False)[0].outputs.data
    with serve(model=str(folder), dtype="float32") as post:
        body = {"query": QUERY, "documents": texts}
        results = post("/rerank", body)["results"]
        assert {each["index"]: each["relevance_score"] for each in results} == dict(
            enumerate(wanted)
        )
        data = post("/pooling", {"input": texts[0]})["data"][0]["data"]
        assert np.array(data, np.float32).tobytes() == encoded.tobytes()

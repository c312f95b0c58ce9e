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

import httpx
import numpy as np
import pytest
import torch
from folders import make_folder, write_dense
from safetensors.torch import load_file, save_file

from quire import LLM, PoolingParams
from quire.errors import QuireError
from quire.models.pooling import QueryExpansion
from quire.weights.sentence_transformers import read_modules

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
        {
            "idx": n,
            "name": str(n),
            "path": f"{n}_{kind}" if n else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for n, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    more = {} if is_pylate else {"module_input_name": "token_embeddings"}
    write_dense(folder / "1_Dense", 64, WIDTH, False, IDENTITY, **more)
    if is_pylate:
        config = {"query_prefix": "lovely ", "document_prefix": "today ", **keys}
        config |= {"prompts": {"query": "", "document": ""}}  # as it writes them
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


def vectors(
    folder: Path, reference: Any, ids: list[int], skipped: set[int], num_unseen: int = 0
) -> torch.Tensor:
    """Projected, normalised, without tokens that do not count; no token attends to the last ones."""
    weight = load_file(folder / "1_Dense" / "model.safetensors")["linear.weight"]
    mask = torch.tensor([[1] * (len(ids) - num_unseen) + [0] * num_unseen])
    with torch.inference_mode():
        states = reference(torch.tensor([ids]), attention_mask=mask).last_hidden_state[0]
        made = torch.nn.functional.normalize(states @ weight.T, dim=-1)
    return made[[token not in skipped for token in ids]]


@pytest.fixture(params=["bert", "modernbert", "qwen3"])
def loaded(request: Any, tmp_path: Path) -> Iterator[tuple[LLM, Path, Any]]:
    folder, reference = make_multi_vector(tmp_path, request.param)
    with closing(LLM(str(folder), dtype="float32", kv_cache_memory="8MiB")) as llm:
        yield llm, folder, reference


def _skipped(llm: LLM, *, is_pylate: bool = False) -> set[int]:
    """Ids of the signs; in PyLate's folders the unknown token's, where a sign has none."""
    tokenizer = llm.get_tokenizer()
    found = {tokenizer.convert_tokens_to_ids(sign) for sign in string.punctuation}
    unknown = tokenizer.convert_tokens_to_ids("[UNK]")
    missing = found & {None, unknown}
    return found - {None, unknown} | ({unknown} if missing and is_pylate else set())


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


@pytest.fixture
def pylate(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """`pylate(family)` makes a folder as PyLate saves them, whose prompts are single tokens."""

    def make(family: str, **keys: Any) -> tuple[Path, Any]:
        keys = {"query_length": 32, "document_length": 96, **keys}
        folder, reference = make_multi_vector(tmp_path, family, is_pylate=True, **keys)
        if family != "qwen3":
            named = {"mask_token": "[MASK]", "unk_token": "[UNK]"}
            config = tmp_path / "tokenizer_config.json"
            config.write_text(json.dumps(json.loads(config.read_text()) | named))
        return folder, reference

    return make


def _marked(llm: LLM, word: str, text: str) -> list[int]:
    """Token ids of a text with a token behind the first one."""
    tokenizer = llm.get_tokenizer()
    ids = tokenizer(text)["input_ids"]
    return [ids[0], tokenizer.convert_tokens_to_ids(word), *ids[1:]]


@pytest.mark.parametrize(
    ("family", "query", "length"), [("bert", QUERY, 32), ("modernbert", "A", 9)]
)
def test_queries_are_filled_up_with_tokens_that_none_attends_to(
    family: str,
    query: str,
    length: int,
    pylate: Callable[..., tuple[Path, Any]],
    texts: list[str],
) -> None:
    """As in ColBERT: these tokens see the query, and nothing sees them."""
    prompts = {"query_prefix": "lovely", "document_prefix": "today"}
    folder, reference = pylate(family, query_length=length, **prompts)
    with closing(LLM(str(folder), dtype="float32")) as llm:
        mask = llm.get_tokenizer().convert_tokens_to_ids("[MASK]")
        skipped = _skipped(llm, is_pylate=True)
        documents = [_marked(llm, "today", text) for text in texts]
        wanted = [vectors(folder, reference, ids, skipped) for ids in documents]
        found = llm.encode(texts, use_tqdm=False)
        for output, ids, vector in zip(found, documents, wanted, strict=True):
            assert output.prompt_token_ids == ids
            np.testing.assert_allclose(output.outputs.data, vector, atol=1e-4)
        ids = _marked(llm, "lovely", query)
        num_unseen = length - len(ids)
        assert num_unseen > 3
        ids += [mask] * num_unseen
        asked = vectors(folder, reference, ids, set(), num_unseen)
        params = PoolingParams(prompt_name="query")
        [output] = llm.encode(query, params, use_tqdm=False)
        assert output.prompt_token_ids == ids and len(output.outputs.data) == length
        np.testing.assert_allclose(output.outputs.data, asked, atol=1e-4)
        attended = vectors(folder, reference, ids, set())
        assert float((attended - asked).abs().max()) > 1e-3, "it makes a difference here"
        scores = [each.outputs.score for each in llm.score(query, texts, use_tqdm=False)]
        maxsim = [float((asked @ vector.T).max(1).values.sum()) for vector in wanted]
        np.testing.assert_allclose(scores, maxsim, atol=1e-3)
        together = llm.encode([query, "B", "lovely " * 50], params, use_tqdm=False)
        assert together[0].outputs.data.tobytes() == output.outputs.data.tobytes()
        assert {len(each.prompt_token_ids) for each in together} == {length}


def test_token_ids_that_fill_up_alone_are_a_query_of_their_own(
    pylate: Callable[..., tuple[Path, Any]],
) -> None:
    """Each sees the first one at least, also where there are more than a window has."""
    folder, _ = pylate("modernbert", query_length=9)
    with closing(LLM(str(folder), dtype="float32")) as llm:
        mask = llm.get_tokenizer().convert_tokens_to_ids("[MASK]")
        params = PoolingParams(prompt_name="query")
        prompts: list[Any] = [
            QUERY, *({"prompt_token_ids": [mask] * count} for count in (1, 4, 9, 90))
        ]  # fmt: skip
        together = llm.encode(prompts, params, use_tqdm=False)
        for prompt, output in zip(prompts, together, strict=True):
            [alone] = llm.encode([prompt], params, use_tqdm=False)
            assert np.isfinite(output.outputs.data).all()
            assert alone.outputs.data.tobytes() == output.outputs.data.tobytes()


def test_the_end_of_a_query_is_no_filler(
    pylate: Callable[..., tuple[Path, Any]], tmp_path: Path
) -> None:
    """Where there is no mask token, queries are filled up with the token that ends them."""
    prompts = {"query_prefix": "lovely", "document_prefix": "today"}
    folder, reference = pylate("bert", query_length=9, **prompts)
    config = tmp_path / "tokenizer_config.json"
    named = {**json.loads(config.read_text()), "mask_token": None, "eos_token": "[SEP]"}
    config.write_text(json.dumps({name: each for name, each in named.items() if each}))
    with closing(LLM(str(folder), dtype="float32")) as llm:
        params = PoolingParams(prompt_name="query")
        [output] = llm.encode("A", params, use_tqdm=False)
        ids = _marked(llm, "lovely", "A")
        num_unseen = 9 - len(ids)
        ids += [ids[-1]] * num_unseen
        assert output.prompt_token_ids == ids and num_unseen > 0
        wanted = vectors(folder, reference, ids, set(), num_unseen)
        np.testing.assert_allclose(output.outputs.data, wanted, atol=1e-4)


def test_the_server_fills_queries_up_as_the_library_does(
    pylate: Callable[..., tuple[Path, Any]], texts: list[str], serve: Callable[..., Any]
) -> None:
    folder, _ = pylate("bert")
    with closing(LLM(str(folder), dtype="float32")) as llm:
        wanted = [each.outputs.score for each in llm.score(QUERY, texts, use_tqdm=False)]
        params = PoolingParams(prompt_name="query")
        [query] = llm.encode(QUERY, params, use_tqdm=False)
    with serve(model=str(folder), dtype="float32") as post:
        results = post("/rerank", {"query": QUERY, "documents": texts})["results"]
        assert {each["index"]: each["relevance_score"] for each in results} == dict(
            enumerate(wanted)
        )
        data = post("/pooling", {"input": QUERY, "prompt_name": "query"})["data"][0]["data"]
        assert np.array(data, np.float32).tobytes() == query.outputs.data.tobytes()
        with pytest.raises(httpx.HTTPStatusError) as caught:
            post("/rerank", {"query": QUERY, "documents": [*texts, *texts, "x" * 99999]})
        assert caught.value.response.json()["error"]["param"] == f"documents[{2 * len(texts)}]"


def test_what_a_pylate_folder_does_not_say_is_as_pylate_has_it(
    pylate: Callable[..., tuple[Path, Any]], tmp_path: Path
) -> None:
    folder, _ = pylate("bert")
    (tmp_path / "config_sentence_transformers.json").write_text("{}")
    found = read_modules(folder)
    assert found is not None and found.late is not None and found.texts is not None
    assert found.texts.prompts == {"query": "[Q] ", "document": "[D] "}
    assert (found.texts.max_len, found.late.query_len) == (180, 32)
    assert found.late.skip_words == tuple(string.punctuation) and found.late.is_marked
    assert found.late.expansion == QueryExpansion(32, None, is_attended=False, is_fixed=True)


@pytest.mark.parametrize(("family", "keys"), [("qwen3", {}), ("modernbert", {"query_length": 90})])
def test_where_no_form_of_attention_fits_such_queries_they_are_refused(
    family: str, keys: dict[str, Any], pylate: Callable[..., tuple[Path, Any]]
) -> None:
    folder, _ = pylate(family, **keys)
    with pytest.raises(QuireError, match="no token attends to, which is supported in encoders"):
        LLM(str(folder), dtype="float32")
    with closing(
        LLM(str(folder), dtype="float32", pooler_config={"query_expansion": False})
    ) as llm:
        assert llm.encode("A", use_tqdm=False)[0].outputs.data.shape[1] == WIDTH


def test_folders_of_colberts_own_program_are_read(tmp_path: Path, texts: list[str]) -> None:
    """Architecture HF_ColBERT: BERT and a projection in one checkpoint, and `artifact.metadata`."""
    reference = make_folder(tmp_path, "bert")
    weights = {
        f"bert.{name}": each for name, each in load_file(tmp_path / "model.safetensors").items()
    }
    write_dense(tmp_path / "1_Dense", 64, WIDTH, False, IDENTITY)
    weights |= load_file(tmp_path / "1_Dense" / "model.safetensors")
    save_file(weights, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    metadata = {"query_maxlen": 24, "doc_maxlen": 64, "dim": WIDTH, "mask_punctuation": True,
                "query_token_id": "lovely", "doc_token_id": "today", "similarity": "cosine",
                "attend_to_mask_tokens": False}  # fmt: skip
    (tmp_path / "artifact.metadata").write_text(json.dumps(metadata))
    names = tmp_path / "tokenizer_config.json"
    named = {"mask_token": "[MASK]", "unk_token": "[UNK]"}
    names.write_text(json.dumps(json.loads(names.read_text()) | named))
    with closing(LLM(str(tmp_path), dtype="float32")) as llm:
        skipped = _skipped(llm, is_pylate=True)
        document = vectors(tmp_path, reference, _marked(llm, "today", texts[0]), skipped)
        [output] = llm.encode(texts[0], use_tqdm=False)
        np.testing.assert_allclose(output.outputs.data, document, atol=1e-4)
        ids = _marked(llm, "lovely", QUERY)
        ids += [llm.get_tokenizer().convert_tokens_to_ids("[MASK]")] * (24 - len(ids))
        count = ids.count(ids[-1])
        query = vectors(tmp_path, reference, ids, set(), count)
        [score] = llm.score(QUERY, texts[0], use_tqdm=False)
        assert score.outputs.score == pytest.approx(
            float((query @ document.T).max(1).values.sum()), abs=1e-3
        )
    (tmp_path / "artifact.metadata").write_text(json.dumps({**metadata, "similarity": "l2"}))
    with pytest.raises(QuireError, match="similarity='l2' is not supported"):
        LLM(str(tmp_path))


def test_pylates_folders_are_read_too(tmp_path: Path, texts: list[str]) -> None:
    keys = {"query_length": 32, "document_length": 96}
    folder, _ = make_multi_vector(tmp_path, "bert", is_pylate=True, **keys)
    options: dict[str, Any] = {"dtype": "float32"}
    with closing(LLM(str(folder), pooler_config={"query_expansion": False}, **options)) as llm:
        assert len(llm.score(QUERY, texts[:2], use_tqdm=False)) == 2
        with pytest.raises(QuireError, match=r"the query has \d+ tokens, and the model takes 32"):
            llm.score("lovely " * 60, texts[0], use_tqdm=False)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("2_MultiVectorMask/config.json", {"keep_only_token_ids": [1]}, "keep_only_token_ids"),
        (
            "2_MultiVectorMask/config.json",
            {"skiplist_words": "abc"},
            "a list of at most 65536 words",
        ),
        ("2_MultiVectorMask/config.json", {"skiplist_words": ["a"] * 65537}, "at most 65536 words"),
        ("2_MultiVectorMask/config.json", {"skiplist_words": [5]}, "must be words"),
        ("2_MultiVectorMask/config.json", {"skiplist_tasks": 5}, "a list of tasks"),
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

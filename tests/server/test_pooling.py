"""The endpoints of pooling models, with OpenAI's client and by hand: the vectors are those of `LLM`."""

from __future__ import annotations

import base64
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from folders import TEXTS, make_folder
from served import serving
from servers import RunningServer, serve_model

from quire import LLM, PoolingParams
from quire.config.api import ApiConfig
from quire.engine.front.outputs import RequestOutput
from quire.engine.pooling.outputs import vectors_of
from quire.server.api.pooling import scores
from quire.server.api.pooling import vectors as vectors_module
from quire.server.api.pooling.runs import floats_of
from quire.text.tokenizer import Tokenizer

OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": "8MiB"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An embedder (Matryoshka), a cross-encoder, and a classifier with names for its classes."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("embedder", "reranker", "classifier")}
    make_folder(made["embedder"], "bert", pooling="mean_tokens")
    config = made["embedder"] / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"is_matryoshka": True}))
    auto = "AutoModelForSequenceClassification"
    make_folder(made["reranker"], "bert", auto=auto, num_labels=1)
    names = {0: "bad", 1: "fair", 2: "good"}
    make_folder(made["classifier"], "qwen3", auto=auto, id2label=names, label2id={})
    return made


def _served(folder: Path) -> Iterator[RunningServer]:
    with serve_model(model=str(folder), **OPTIONS) as running:
        yield running


@pytest.fixture(scope="module")
def embedder(folders: dict[str, Path]) -> Iterator[RunningServer]:
    yield from _served(folders["embedder"])


@pytest.fixture(scope="module")
def reranker(folders: dict[str, Path]) -> Iterator[RunningServer]:
    yield from _served(folders["reranker"])


@pytest.fixture(scope="module")
def classifier(folders: dict[str, Path]) -> Iterator[RunningServer]:
    yield from _served(folders["classifier"])


@pytest.fixture(scope="module")
def vectors(folders: dict[str, Path]) -> Callable[..., Any]:
    """What `LLM` makes of the texts."""

    def vectors(**params: Any) -> Any:
        with closing(LLM(str(folders["embedder"]), **OPTIONS)) as llm:
            return llm.embed(TEXTS, PoolingParams(**params), use_tqdm=False)

    return vectors


def post(server: RunningServer, path: str, status: int = 200, **body: Any) -> Any:
    answer = httpx.post(f"{server.url}{path}", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def _name(server: RunningServer) -> str:
    name: str = httpx.get(f"{server.v1}/models").json()["data"][0]["id"]
    return name


def test_openais_client_gets_the_vectors_of_all_four_forms_of_input(
    embedder: RunningServer, vectors: Callable[..., Any]
) -> None:
    wanted = vectors()
    ids = [output.prompt_token_ids for output in wanted]
    with openai.OpenAI(base_url=embedder.v1, api_key="unused", max_retries=0) as client:
        model = client.models.list().data[0].id
        for given, expected in (
            (TEXTS, wanted), (TEXTS[0], wanted[:1]), (ids, wanted), (ids[0], wanted[:1]),
        ):  # fmt: skip
            made = client.embeddings.create(model=model, input=given)
            assert [each.index for each in made.data] == list(range(len(expected)))
            for found, output in zip(made.data, expected, strict=True):
                assert (
                    np.array(found.embedding, np.float32).tobytes() == output.outputs.data.tobytes()
                )
            count = sum(len(output.prompt_token_ids) for output in expected)
            assert made.usage.prompt_tokens == made.usage.total_tokens == count


def test_langchains_embeddings_are_the_librarys(
    embedder: RunningServer, vectors: Callable[..., Any]
) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.OpenAIEmbeddings(
        base_url=embedder.v1, api_key="unused", model="embedder", max_retries=0,
        check_embedding_ctx_length=False,  # else it counts tokens with a vocabulary of OpenAI's
    )  # fmt: skip
    name = httpx.get(f"{embedder.v1}/models").json()["data"][0]["id"]
    model.model = name
    wanted = [output.outputs.embedding for output in vectors()]
    assert model.embed_documents(TEXTS) == wanted
    assert model.embed_query(TEXTS[0]) == wanted[0]


def test_llama_indexs_embeddings_are_the_librarys(
    embedder: RunningServer, vectors: Callable[..., Any]
) -> None:
    openai_like = pytest.importorskip("llama_index.embeddings.openai_like")
    model = openai_like.OpenAILikeEmbedding(
        api_base=embedder.v1, api_key="unused", model_name=_name(embedder), max_retries=0
    )
    wanted = [each.outputs.embedding for each in vectors()]
    made = model.get_text_embedding_batch(TEXTS)
    assert [np.array(each, np.float32).tolist() for each in made] == wanted
    [query] = [model.get_query_embedding(TEXTS[0])]
    assert np.array(query, np.float32).tolist() == wanted[0]


@pytest.mark.parametrize("version", [1, 2])
def test_coheres_client_reranks_as_the_library_scores(
    version: int, reranker: RunningServer, folders: dict[str, Path]
) -> None:
    cohere = pytest.importorskip("cohere")
    kind = cohere.Client if version == 1 else cohere.ClientV2
    with httpx.Client() as http:
        client = kind(api_key="unused", base_url=reranker.url, httpx_client=http)
        found = client.rerank(
            model=_name(reranker), query=TEXTS[0], documents=TEXTS, top_n=3
        ).results
    with closing(LLM(str(folders["reranker"]), **OPTIONS)) as llm:
        outputs = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
    scores = [each.outputs.score for each in outputs]
    best = sorted(range(len(TEXTS)), key=lambda n: -scores[n])[:3]
    assert [each.index for each in found] == best
    assert [each.relevance_score for each in found] == [scores[n] for n in best]


def test_floats_and_base64_are_the_same_numbers(embedder: RunningServer) -> None:
    plain = post(embedder, "/v1/embeddings", input=TEXTS, encoding_format=None)
    coded = post(embedder, "/v1/embeddings", input=TEXTS, encoding_format="base64")
    for a, b in zip(plain["data"], coded["data"], strict=True):
        assert np.array(a["embedding"], "<f4").tobytes() == base64.b64decode(b["embedding"])


def test_dimensions_cut_the_vectors_of_a_matryoshka_model(
    embedder: RunningServer, vectors: Callable[..., Any]
) -> None:
    made = post(embedder, "/v1/embeddings", input=TEXTS, dimensions=8)
    wanted = [output.outputs.embedding for output in vectors(dimensions=8)]
    assert [each["embedding"] for each in made["data"]] == wanted
    error = post(embedder, "/v1/embeddings", 400, input=TEXTS, dimensions=65)["error"]
    assert error["param"] == "dimensions" and "1 to 64" in error["message"]


def test_pooling_gives_vectors_of_texts_or_of_tokens(embedder: RunningServer) -> None:
    whole = post(embedder, "/pooling", input=TEXTS)
    plain = post(embedder, "/v1/embeddings", input=TEXTS)
    assert [e["data"] for e in whole["data"]] == [e["embedding"] for e in plain["data"]]
    tokens = post(embedder, "/pooling", input=TEXTS[0], task="token_embed")
    assert np.array(tokens["data"][0]["data"]).shape == (tokens["usage"]["prompt_tokens"], 64)


def test_vectors_of_too_many_numbers_are_refused_before_the_first_is_computed(
    folders: dict[str, Path],
) -> None:
    with serve_model(
        ApiConfig(max_vector_numbers=640), model=str(folders["embedder"]), **OPTIONS
    ) as server:
        num_before = server.client.status().num_steps
        for path, num_texts, more in (
            ("/pooling", 2, {"task": "token_embed"}),
            ("/pooling", 11, {}),
            ("/v1/embeddings", 11, {}),
        ):
            error = post(server, path, 400, input=[[5, 6, 7, 8, 9, 10]] * num_texts, **more)[
                "error"
            ]
            assert (error["param"], error["code"]) == ("input", "answer_too_large")
            num_numbers = 64 * num_texts * (6 if more else 1)
            assert (
                f"{num_numbers} numbers ({num_texts} texts, {6 * num_texts} tokens)"
                in error["message"]
            )
            assert "may have 640 (max_vector_numbers)" in error["message"]
        assert server.client.status().num_steps == num_before
        for given in ([[5] * 10], [[5] * 4, [6] * 6]):
            made = post(server, "/pooling", input=given, task="token_embed")["data"]
            assert [len(each["data"]) for each in made] == list(map(len, given))
        assert len(post(server, "/v1/embeddings", input=[[5] * 20] * 10)["data"]) == 10


def test_rerank_puts_documents_in_the_order_of_their_scores(
    reranker: RunningServer, folders: dict[str, Path]
) -> None:
    with closing(LLM(str(folders["reranker"]), **OPTIONS)) as llm:
        wanted = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
    order = sorted(range(len(TEXTS)), key=lambda n: -wanted[n])
    for path in ("/score", "/v1/score"):
        made = post(reranker, path, text_1=TEXTS[0], text_2=TEXTS)
        assert [each["score"] for each in made["data"]] == wanted
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        documents = [TEXTS[0], *({"text": text} for text in TEXTS[1:])]
        made = post(reranker, path, query=TEXTS[0], documents=documents, top_n=3)
        assert [each["index"] for each in made["results"]] == order[:3]
        assert [each["relevance_score"] for each in made["results"]] == [
            wanted[n] for n in order[:3]
        ]
        assert made["results"][0]["document"]["text"] == TEXTS[order[0]]
    assert (
        "document"
        not in post(reranker, "/rerank", query="a", documents=["b"], return_documents=False)[
            "results"
        ][0]
    )


LONG = [
    "the little fox ran over the hill and was never seen again by anyone at all",
    "Caf\u00e9 \u2014 unbelievable stories of dragons, kings and, at last, a dog",
    "short",
    "",
]


def _cut_by_hand(encode: Callable[[str], list[int]], text: str, num_tokens: int) -> str:
    """The shortest beginning that is encoded into these tokens."""
    wanted = encode(text)[:num_tokens]
    return next(text[:end] for end in range(len(text) + 1) if encode(text[:end]) == wanted)


@pytest.mark.parametrize("num_tokens", [1, 3, 7, 100])
@pytest.mark.parametrize("kind", ["reranker", "embedder"])
def test_long_documents_are_cut_as_by_hand(
    kind: str, num_tokens: int, request: pytest.FixtureRequest, folders: dict[str, Path]
) -> None:
    served: RunningServer = request.getfixturevalue(kind)
    tokenizer = Tokenizer.from_folder(folders[kind])

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    cut = [_cut_by_hand(encode, text, num_tokens) for text in LONG]
    query, short_query = LONG[0], _cut_by_hand(encode, LONG[0], 2)
    found = httpx.post(
        f"{served.url}/v2/rerank",
        json={"query": query, "documents": LONG, "max_tokens_per_doc": num_tokens},
    )
    assert "x-quire-ignored-fields" not in found.headers
    wanted = post(served, "/v2/rerank", query=query, documents=cut)
    assert found.json()["usage"] == wanted["usage"]
    assert [(each["index"], each["relevance_score"]) for each in found.json()["results"]] == [
        (each["index"], each["relevance_score"]) for each in wanted["results"]
    ]
    assert {each["document"]["text"] for each in found.json()["results"]} == set(LONG)
    both = {"max_tokens_per_doc": num_tokens, "max_tokens_per_query": 2}
    made = post(served, "/score", text_1=query, text_2=LONG, **both)
    assert made["data"] == post(served, "/score", text_1=short_query, text_2=cut)["data"]
    neither: dict[str, Any] = {"max_tokens_per_doc": 0, "max_tokens_per_query": None}
    whole = post(served, "/score", text_1=query, text_2=LONG, **neither)
    assert whole["data"] == post(served, "/score", text_1=query, text_2=LONG)["data"]


def test_limits_of_documents_that_are_none_are_refused(reranker: RunningServer) -> None:
    for limit in (-1, 1.5, "4"):
        body: dict[str, Any] = {"query": "a", "documents": ["b"], "max_tokens_per_doc": limit}
        assert "max_tokens_per_doc" in post(reranker, "/v2/rerank", 400, **body)["error"]["message"]


def test_an_embedder_scores_by_cosines(
    embedder: RunningServer, vectors: Callable[..., Any], folders: dict[str, Path]
) -> None:
    found = [output.outputs.data for output in vectors()]
    made = post(embedder, "/score", text_1=TEXTS[0], text_2=TEXTS)
    scored = [each["score"] for each in made["data"]]
    np.testing.assert_allclose(scored, [float(found[0] @ each) for each in found], atol=1e-6)
    with closing(LLM(str(folders["embedder"]), **OPTIONS)) as llm:
        assert scored == [each.outputs.score for each in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]


def test_a_score_leaves_the_prompt_out_as_the_library_does(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "prompted"
    shutil.copytree(folders["embedder"], folder)
    config = folder / "1_Pooling" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"include_prompt": False}))
    prompts = {"prompts": {"query": "today: "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with closing(LLM(str(folder), **OPTIONS)) as llm:
        wanted = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
    with serve_model(model=str(folder), **OPTIONS) as running:
        made = post(running, "/score", text_1=TEXTS[0], text_2=TEXTS)
    assert [each["score"] for each in made["data"]] == wanted


def test_classes_have_their_names(classifier: RunningServer, folders: dict[str, Path]) -> None:
    with closing(LLM(str(folders["classifier"]), **OPTIONS)) as llm:
        wanted = [each.outputs.probs for each in llm.classify(TEXTS, use_tqdm=False)]
    made = post(classifier, "/classify", input=TEXTS)
    assert [each["probs"] for each in made["data"]] == wanted
    assert [e["label"] for e in made["data"]] == [
        ("bad", "fair", "good")[int(np.argmax(probs))] for probs in wanted
    ]


@pytest.mark.parametrize(
    ("path", "body", "param", "complaint"),
    [
        ("/v1/embeddings", {"input": []}, "input", "the list is empty"),
        ("/v1/embeddings", {"input": [1, "a"]}, "input[0]", "a text or a list of token ids"),
        ("/v1/embeddings", {"input": [999]}, "input", "token id 999 is not in"),
        ("/v1/embeddings", {"input": "lovely " * 999}, "input", "the model takes 256"),
        ("/v1/embeddings", {"input": ["a", "lovely " * 999, ""]}, "input[2]", "input[2]: it is em"),
        ("/v1/embeddings", {"input": ["a", "lovely " * 999]}, "input[1]", "input[1]: the text"),
        ("/v1/embeddings", {"input": ["a", "x" * 99999]}, "input[1]", "input[1] has 99999 char"),
        ("/v1/embeddings", {"input": [[5], [6], [999]]}, "input[2]", "token id 999 is not in"),
        ("/v1/embeddings", {"input": [[5], [6] * 300]}, "input[1]", "input[1]: the text has 300"),
        ("/classify", {"input": "a"}, "model", "this model makes vectors"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "the list is empty"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"] * 3}, "text_2", "text_1 has 2 texts"),
        ("/score", {"text_1": "a", "text_2": "b", "instruction": "Judge"}, "instruction", "none"),
        ("/score", {"text_1": "a"}, "text_2", "give text_2 or data_2 or documents"),
        ("/score", {"queries": ["a", "lovely " * 999], "data_2": ["c", "d"]}, "queries[1]", "takes"),
        ("/score", {"text_1": ["a"], "text_2": ["b", "c", "x" * 99999]}, "text_2[2]", "characters"),
        ("/rerank", {"query": "lovely " * 999, "documents": ["b"]}, "query", "query: the text"),
        ("/rerank", {"query": "a", "documents": ["b", {"text": "lovely " * 999}]}, "documents[1]",
         "documents[1]: the text has"),
        ("/pooling", {"input": "a", "task": "embed", "truncate_prompt_tokens": 900},
         "truncate_prompt_tokens", "beyond the 256"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format",
         "none of the values that are allowed: 'base64', 'float'"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens",
         "=0 must be a number of tokens from 1 up, or -1"),
        ("/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 0},
         "truncate_prompt_tokens", "from 1 up"),
        ("/rerank", {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 2},
         "truncate_prompt_tokens", "=2 leaves nothing of the text"),
        ("/v1/completions", {"prompt": "a"}, "model", "makes no text; use embed() or score(), over"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "model",
         "makes no text; use embed() or score(), over HTTP /v1/embeddings"),
        ("/v1/responses", {"input": "a"}, "model", "makes no text"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_with_what_to_do(
    path: str, body: dict[str, Any], param: str, complaint: str, embedder: RunningServer
) -> None:
    error = post(embedder, path, 400, **body)["error"]
    assert error["param"] == param and complaint in error["message"]


def test_a_pair_that_is_too_long_is_named_by_its_document(reranker: RunningServer) -> None:
    for long in ("lovely " * 999, "x" * 99999):
        body: dict[str, Any] = {"query": "a", "documents": ["b", "c", long]}
        error = post(reranker, "/rerank", 400, **body)["error"]
        assert error["param"] == "documents[2]" and error["message"].startswith("documents[2]")


def test_a_model_that_generates_says_that_it_makes_no_vectors(server: RunningServer) -> None:
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ):
        error = post(server, path, 400, **body)["error"]
        assert error["code"] == "model_not_supported"
        assert "runner='pooling'" in error["message"]


@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        ("embedder", "/score", {"text_1": TEXTS[0], "text_2": TEXTS}),
        ("classifier", "/classify", {"input": TEXTS * 20}),
    ],
)
def test_many_numbers_are_dealt_with_beside_the_event_loop(
    name: str,
    path: str,
    body: dict[str, Any],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running: RunningServer = request.getfixturevalue(name)
    threads: set[str] = set()

    def noted(read: Callable[[RequestOutput], Any]) -> Callable[[RequestOutput], Any]:
        def reads(output: RequestOutput) -> Any:
            threads.add(threading.current_thread().name)
            return read(output)

        return reads

    monkeypatch.setattr(scores, "vectors_of", noted(vectors_of))
    monkeypatch.setattr(vectors_module, "floats_of", noted(floats_of))
    assert len(post(running, path, **body)["data"]) == len(body.get("text_2") or body["input"])
    assert threads and "test-server" not in threads


@pytest.mark.slow
def test_the_embedder_that_ships_is_served_by_an_engine_of_its_own_process() -> None:
    """What the server decides of an encoder, its engine's process must take as options."""
    with serving(model="quire-embedder") as served, LLM("quire-embedder") as llm:
        served.await_ready()
        body = {"input": "a text", "encoding_format": "float"}
        answer = httpx.post(f"{served.url}/v1/embeddings", json=body, timeout=60)
        (expected,) = llm.embed("a text", use_tqdm=False)
        assert answer.json()["data"][0]["embedding"] == expected.outputs.embedding


@pytest.mark.slow
def test_replicas_of_the_embedder_give_its_vectors() -> None:
    with (
        LLM("quire-embedder", num_threads=1) as alone,
        LLM("quire-embedder", num_threads=1, data_parallel_size=2) as replicas,
    ):
        expected = [each.outputs.embedding for each in alone.embed(TEXTS, use_tqdm=False)]
        found = [each.outputs.embedding for each in replicas.embed(TEXTS, use_tqdm=False)]
        assert found == expected

"""Adapters over HTTP: chosen by name on every route, loaded, replaced and unloaded under traffic,
and contained in their folder."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapters import write_adapter
from servers import RunningServer, held, serve_model

from quire.config.api import ApiConfig
from quire.core.adapters import Adapter
from quire.errors import ConfigError
from quire.lora.layout import AdapterLimits
from quire.lora.store import AdapterStore
from quire.models.declaration import DecoderSpec
from quire.models.registry import declare
from quire.server.api.adapters import ServedAdapters, read_module
from quire.server.http.errors import ApiError
from quire.server.quota.tenants import Tenant, key_ring
from quire.weights.folder import read_model_config, resolve_model

STORYTELLER = "quire-storyteller"
BASE = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def spec() -> DecoderSpec:
    return declare(read_model_config(resolve_model(STORYTELLER)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, spec: DecoderSpec) -> Path:
    """A folder of adapters, one beside it, and links that lead out."""
    path: Path = tmp_path_factory.mktemp("adapters") / "allowed"
    for number in range(4):
        write_adapter(path / f"v{number}", spec, rank=4, seed=number, strength=2.0)
    write_adapter(path.parent / "outside", spec, rank=4)
    (path / "link").symlink_to(path.parent / "outside")
    (path / "partly").mkdir()
    (path / "partly" / "adapter_config.json").symlink_to(
        path.parent / "outside" / "adapter_config.json"
    )
    (path / "partly" / "adapter_model.safetensors").symlink_to(
        path / "v0" / "adapter_model.safetensors"
    )
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    config = ApiConfig(
        lora_modules=(
            f"first={folder / 'v0'}",
            json.dumps({"name": "second", "path": str(folder / "v1")}),
        ),
        lora_folder=str(folder),
    )
    with serve_model(
        config, enable_lora=True, max_loras=2, max_cpu_loras=3, convert="embed"
    ) as running:
        yield running


Ask = Callable[..., httpx.Response]


@pytest.fixture
def ask(server: RunningServer) -> Iterator[Ask]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield lambda path, **body: client.post(path, json=body)


def _text(ask: Ask, model: str | None = None, **body: Any) -> str:
    answer = ask("/v1/completions", **{**BASE, **({"model": model} if model else {}), **body})
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_models_lists_adapters_with_their_parent(server: RunningServer) -> None:
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    parents = {each["id"]: each["parent"] for each in listed}
    assert parents[STORYTELLER] is None
    assert parents["first"] == parents["second"] == STORYTELLER
    one = httpx.get(f"{server.url}/v1/models/first").json()
    assert (one["root"], one["parent"]) == ("first", STORYTELLER)
    assert str(Path("/")) + "tmp" not in json.dumps(listed)


def test_every_route_that_generates_answers_with_the_adapter_that_is_named(ask: Ask) -> None:
    messages = [{"role": "user", "content": "Tell me a story."}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": BASE,
        "/v1/chat/completions": {"messages": messages, "max_tokens": 12, "temperature": 0},
        "/v1/responses": {"input": "Tell me a story.", "max_output_tokens": 16, "temperature": 0},
        "/v1/messages": {"messages": messages, "max_tokens": 12, "temperature": 0},
    }
    for path, body in bodies.items():
        texts = []
        for model in (STORYTELLER, "first", "second"):
            answer = ask(path, **body, model=model)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == model
            kept = {key: value for key, value in answer.json().items()
                    if key in ("choices", "output", "content")}  # fmt: skip
            for each in kept.get("output", ()):
                each.pop("id")
            texts.append(json.dumps(kept))
        assert len(set(texts)) == 3, path


def test_the_fingerprint_tells_versions_apart(ask: Ask) -> None:
    found = {ask("/v1/completions", **BASE, model=model).json()["system_fingerprint"]
             for model in (STORYTELLER, "first", "second")}  # fmt: skip
    assert len(found) == 3


def test_an_unknown_model_is_not_found(ask: Ask) -> None:
    assert ask("/v1/completions", **BASE, model="third").status_code == 404


def test_loading_replacing_and_unloading_never_serve_another_version(ask: Ask) -> None:
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    first, base = _text(ask, "first"), _text(ask)
    assert ask(load, lora_name="mine", lora_path="v0").status_code == 200
    assert _text(ask, "mine") == first
    refused = ask(load, lora_name="mine", lora_path="v2")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "adapter_exists")
    assert ask(load, lora_name="mine", lora_path="v2", load_inplace=True).status_code == 200
    third = _text(ask, "mine")
    assert third not in (first, base)
    assert _text(ask, "mine") == third
    assert ask(unload, lora_name="mine").status_code == 200
    assert ask("/v1/completions", **BASE, model="mine").status_code == 404
    assert ask(unload, lora_name="mine").status_code == 404
    assert _text(ask) == base


def test_a_folder_that_is_written_over_is_another_version_once_it_is_loaded_again(
    ask: Ask, folder: Path, spec: DecoderSpec
) -> None:
    path = write_adapter(folder / "changing", spec, rank=4, seed=11, strength=2.0)
    load = {"lora_name": "changing", "lora_path": "changing"}
    assert ask("/v1/load_lora_adapter", **load).status_code == 200
    before = _text(ask, "changing")
    write_adapter(path, spec, rank=4, seed=12, strength=2.0)
    assert _text(ask, "changing") == before
    assert ask("/v1/load_lora_adapter", **load, load_inplace=True).status_code == 200
    assert _text(ask, "changing") != before
    assert ask("/v1/unload_lora_adapter", lora_name="changing").status_code == 200


@pytest.mark.slow
def test_traffic_goes_on_while_versions_change_and_every_answer_is_of_one_version(
    ask: Ask,
) -> None:
    versions = {}
    for number in range(4):
        body = {"lora_name": "swap", "lora_path": f"v{number}", "load_inplace": True}
        assert ask("/v1/load_lora_adapter", **body).status_code == 200
        versions[number] = _text(ask, "swap", max_tokens=40)
    assert len(set(versions.values())) == 4
    base, answers, is_over = _text(ask, max_tokens=40), list[tuple[str, str]](), threading.Event()

    def client(model: str) -> None:
        while not is_over.is_set():
            answers.append((model, _text(ask, model, max_tokens=40)))

    models = ("swap", "swap", "first", STORYTELLER)
    threads = [threading.Thread(target=client, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for change in range(12):
        body = {"lora_name": "swap", "lora_path": f"v{change % 4}", "load_inplace": True}
        assert ask("/v1/load_lora_adapter", **body).status_code == 200
    is_over.set()
    for thread in threads:
        thread.join()
    assert {text for model, text in answers if model == "swap"} <= set(versions.values())
    assert {text for model, text in answers if model == STORYTELLER} == {base}
    assert len({text for model, text in answers if model == "first"}) == 1


@pytest.mark.parametrize(
    "path",
    [
        "../outside", "..", ".", "", "link", "partly", "v0/../../outside", "/", "/etc", "v0\0",
        "~", "nowhere", "v0/adapter_config.json", "\N{FULLWIDTH FULL STOP}\N{FULLWIDTH FULL STOP}/outside",
    ],
)  # fmt: skip
def test_paths_stay_in_the_folder(ask: Ask, folder: Path, path: str) -> None:
    answer = ask("/v1/load_lora_adapter", lora_name="mine", lora_path=path)
    assert answer.status_code == 400
    assert str(folder) not in answer.text


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a b",
        "../x",
        "_a",
        "a..b",
        STORYTELLER,
        "a\0",
        "x" * 129,
        "caf\N{LATIN SMALL LETTER E WITH ACUTE}",
    ],
)
def test_names_are_plain(ask: Ask, name: str) -> None:
    answer = ask("/v1/load_lora_adapter", lora_name=name, lora_path="v0")
    assert answer.status_code == 400
    is_told = "letters, digits and _.:/@+- (at most 128), begin with a letter" in answer.text
    assert is_told != (name == STORYTELLER)


def test_absolute_paths_inside_the_folder_are_taken(ask: Ask, folder: Path) -> None:
    body = {"lora_name": "absolute", "lora_path": str(folder / "v0")}
    assert ask("/v1/load_lora_adapter", **body).status_code == 200
    assert ask("/v1/unload_lora_adapter", lora_name="absolute").status_code == 200


def test_adapters_that_cannot_be_served_are_refused_with_the_reason(
    ask: Ask, folder: Path, spec: DecoderSpec
) -> None:
    config = write_adapter(folder / "dora", spec, rank=4) / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    answer = ask("/v1/load_lora_adapter", lora_name="mine", lora_path="dora")
    assert answer.status_code == 400
    assert "use_dora" in answer.text
    assert str(folder) not in answer.text


def test_metrics_tell_which_adapters_have_requests(server: RunningServer, ask: Ask) -> None:
    def info() -> str:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        return next(each for each in lines if each.startswith("quire:lora_requests_info{"))

    with held(server):
        asking = threading.Thread(target=_text, args=(ask, "first"))
        asking.start()
        deadline_s = time.monotonic() + 30
        while 'waiting_lora_adapters="first"' not in info():
            assert time.monotonic() < deadline_s
    asking.join()
    assert 'max_lora="2",running_lora_adapters="",waiting_lora_adapters=""' in info()


def test_only_admin_keys_load_adapters(folder: Path) -> None:
    config = ApiConfig(lora_folder=str(folder))
    keys = key_ring([(Tenant("plain"), ["sk-plain"])])
    with serve_model(config, keys, enable_lora=True) as running:
        answer = httpx.post(
            f"{running.url}/v1/load_lora_adapter",
            json={"lora_name": "a", "lora_path": "v0"},
            headers={"authorization": "Bearer sk-plain"},
        )
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_needed")


def test_a_server_without_adapters_says_so() -> None:
    with serve_model() as running:
        for path, body in (
            ("load", {"lora_name": "a", "lora_path": "b"}),
            ("unload", {"lora_name": "a"}),
        ):
            answer = httpx.post(f"{running.url}/v1/{path}_lora_adapter", json=body)
            assert answer.status_code == 400
            assert "--enable-lora" in answer.text


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "=b",
        "a=",
        "{",
        '{"name": "a"}',
        '{"name": 1, "path": "b"}',
        '{"a":' * 9999,
        '{"name": "a", "path": "b", "name": "c"}',
    ],
)
def test_modules_that_are_not_understood_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="lora_modules"):
        read_module(text)


def test_modules_are_read_in_both_forms() -> None:
    given = '{"name": "a", "path": "b", "base_model_name": "c"}'
    assert read_module("a=b=c") == ("a", "b=c")
    assert read_module(given) == ("a", "b")
    assert os.sep not in read_module(given)[0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a fox"}),
        ("/pooling", {"input": "a fox"}),
        ("/score", {"text_1": "a fox", "text_2": ["a dog", "the sea"]}),
        ("/rerank", {"query": "a fox", "documents": ["a dog", "the sea"]}),
    ],
)
def test_vectors_are_the_adapters_too(ask: Ask, path: str, body: dict[str, Any]) -> None:
    def numbers(model: str) -> Any:
        answer = ask(path, model=model, **body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert found["model"] == model
        listed = found.get("data") or found["results"]
        keys = ("embedding", "data", "score", "relevance_score")
        return sorted(str(each[key]) for each in listed for key in keys if key in each)

    assert numbers("first") == numbers("first") != numbers(STORYTELLER)


def test_of_loads_at_the_same_time_one_alone_gets_the_name(
    folder: Path, spec: DecoderSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = AdapterStore(spec, AdapterLimits(16))
    arrived = threading.Barrier(2, timeout=20.0)
    version_of = store.version_of

    def together(path: Path) -> Adapter:
        arrived.wait()
        return version_of(path)

    monkeypatch.setattr(store, "version_of", together)
    served = ServedAdapters(store, ApiConfig(lora_folder=str(folder)), ("model",))

    async def load_both() -> list[BaseException | None]:
        loads = (served.load("same", path, is_in_place=False) for path in ("v0", "v1"))
        return await asyncio.gather(*loads, return_exceptions=True)

    outcomes = asyncio.run(load_both())
    [refusal] = [each for each in outcomes if each is not None]
    assert isinstance(refusal, ApiError) and refusal.code == "adapter_exists"
    [kept] = served.all
    assert kept.folder.name == ("v0", "v1")[outcomes.index(None)]
    store.close()


def test_a_folder_that_is_none_is_refused(folder: Path, spec: DecoderSpec) -> None:
    store = AdapterStore(spec, AdapterLimits(16))
    for name in ("nowhere", "v0/adapter_config.json"):
        with pytest.raises(ConfigError, match=r"lora_folder=.* is no folder"):
            ServedAdapters(store, ApiConfig(lora_folder=str(folder / name)), ("model",))
    store.close()


def test_a_name_given_twice_is_refused(folder: Path, spec: DecoderSpec) -> None:
    store = AdapterStore(spec, AdapterLimits(16))
    modules = (f"first={folder / 'v0'}", f"first={folder / 'v1'}")
    with pytest.raises(ConfigError, match="'first' is given twice"):
        ServedAdapters(store, ApiConfig(lora_modules=modules), ("model",))
    store.close()

"""The small programs of `examples/apps` run offline: with the shipped model in this process, or
against a server with it. Those for packages that are not installed are skipped."""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import RunningServer, serve_model

from examples.apps import (
    batch_file,
    chat_bot,
    complete,
    fastchat_endpoint,
    index_pictures,
    rewrite,
)
from examples.train_viewer.scenes import Scene, Thing, paint
from quire import LLM

APPS = Path(batch_file.__file__).parent


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serve_model() as running:
        yield running


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("quire-storyteller", kv_cache_memory="16MiB", num_threads=1) as model:
        yield model


def test_each_program_is_short_and_in_the_table() -> None:
    table = (APPS / "README.md").read_text(encoding="utf-8")
    for path in APPS.glob("*.py"):
        if path.name != "__init__.py":
            assert len(path.read_text(encoding="utf-8").splitlines()) < 80, path.name
            assert f"[`{path.name}`]({path.name})" in table


@pytest.mark.slow
def test_the_chat_bot_answers_and_forgets_the_oldest_turns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    long = "Tell me a story about " + "a fox and an owl and " * 12 + "a bear."
    lines = ["Tell me a story about a fox.", long, long, "", "never read"]
    chat_bot.main(["--system", "You are a storyteller."], lines)
    assert len(capsys.readouterr().out.split()) > 60


@pytest.mark.slow
def test_what_is_longer_than_the_context_costs_no_other_line_its_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "a fox and an owl and " * 300
    path, out = tmp_path / "texts.txt", tmp_path / "out.jsonl"
    path.write_text(f"This is a fox.\n{long}\nThis is an owl.\n")
    batch_file.main([str(path), str(out)])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert "the context holds" in lines.pop(1)["error"]
    assert len(lines) == 2 and not any("context" in str(each) for each in lines)
    rewrite.main([str(path)])
    shown = capsys.readouterr().out.splitlines()
    assert shown[3] == f"+ {long.strip()}" and len(shown) == 6 and shown[5][2:]
    chat_bot.main([], [long, "Tell me a story about a fox.", ""])
    shown = capsys.readouterr().out.splitlines()
    assert "the context holds" in shown[0] and len(shown[1].split()) > 10


@pytest.mark.slow
def test_a_text_is_rewritten_sentence_by_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("The fox was hungry. It saw grapes!\nThey hung high.\n")
    rewrite.main([str(path)])
    shown = capsys.readouterr().out.splitlines()
    assert shown[0::2] == ["- The fox was hungry.", "- It saw grapes!", "- They hung high."]
    assert len(shown) == 6 and all(line.startswith("+ ") and line[2:] for line in shown[1::2])


@pytest.mark.slow
def test_completions_are_ranked_and_found_again(llm: LLM) -> None:
    found = complete.complete(llm, "Once upon a time there was a", count=4)
    assert 1 <= len(found) <= 4 and len({each.text for each in found}) == len(found)
    assert [each.logprob for each in found] == sorted((e.logprob for e in found), reverse=True)
    assert all(math.isfinite(each.logprob) and each.logprob <= 0 for each in found)
    assert complete.complete(llm, "Once upon a time there was a", count=4) == found


@pytest.mark.slow
def test_the_completions_of_growing_texts_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    complete.main(["Once upon", "Once upon a time", "--count", "2"])
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "Once upon" and "Once upon a time" in shown and len(shown) >= 4


@pytest.mark.slow
def test_a_file_is_processed_and_a_stopped_run_goes_on(tmp_path: Path) -> None:
    texts, whole, out = (tmp_path / name for name in ("texts.txt", "whole.jsonl", "out.jsonl"))
    texts.write_text(
        "".join(f"This is a fox. The fox is called {n}.\n" for n in ("Tom", "Ann", "Bo"))
    )
    batch_file.main([str(texts), str(whole)])
    lines = whole.read_text().splitlines(keepends=True)
    assert len(lines) == 3
    for line in lines:
        record = json.loads(line)
        assert record.keys() == {"name", "kind"} or record.keys() == {"error"}
    out.write_text(lines[0] + lines[1][:5])  # as a run leaves it that was killed while it wrote
    batch_file.main([str(texts), str(out), "--batch", "1"])
    assert out.read_text() == whole.read_text()


def test_pictures_are_indexed_and_what_is_none_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = Scene("white", (Thing("star", "red", "big", 0.4, 0.5, 0.22),))
    paths = [tmp_path / name for name in ("star.png", "none.png", "absent.png")]
    paint(scene, random.Random(0)).save(paths[0])
    paths[1].write_bytes(b"no picture")
    index_pictures.main([str(path) for path in paths])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["shapes"] == [{"size": "big", "color": "red", "shape": "star"}]
    assert [line["file"] for line in lines] == [str(path) for path in paths]
    assert "identify" in lines[1]["error"] and "No such file" in lines[2]["error"]


@pytest.mark.slow
def test_the_agent_calls_a_tool_and_gets_its_result(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = importlib.import_module("examples.apps.agent")
    agent.main(["What is the weather in Paris?", "--url", server.v1])
    shown = capsys.readouterr().out
    assert shown.startswith("user: What is the weather in Paris?\nassistant: ")
    assert "\ntool: " in shown and any(f'"name": "{name}"' in shown for name in agent.TOOLS)


def test_what_is_wrong_with_a_call_is_its_result() -> None:
    agent = importlib.import_module("examples.apps.agent")
    assert agent.run("get_weather", '{"city": "Oslo"}') == "snow"
    for name, arguments in (("fly", "{}"), ("get_weather", "{"), ("get_weather", '{"town": "x"}')):
        assert agent.run(name, arguments).startswith("failed: ")


@pytest.mark.slow
def test_the_file_for_fastchat_names_the_served_models(
    server: RunningServer, tmp_path: Path
) -> None:
    path = tmp_path / "endpoints.json"
    fastchat_endpoint.main([str(path), "--url", server.v1])
    [(name, entry)] = json.loads(path.read_text()).items()
    assert name == entry["model_name"] == "quire-storyteller" and entry["api_base"] == server.v1


@pytest.mark.slow
def test_fastchat_streams_an_answer(server: RunningServer) -> None:
    provider = pytest.importorskip("fastchat.serve.api_provider")
    [entry] = fastchat_endpoint.endpoints(server.v1, ["quire-storyteller"]).values()
    pieces = provider.openai_api_stream_iter(
        entry["model_name"], [{"role": "user", "content": "Tell me a story about a fox."}],
        0.0, 1.0, 40, api_base=entry["api_base"], api_key=entry["api_key"],
    )  # fmt: skip
    texts = [piece["text"] for piece in pieces if piece["error_code"] == 0]
    assert len(texts) > 1 and texts[-1].strip()


@pytest.mark.slow
def test_a_langchain_chain_streams_and_batches(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("langchain_openai")
    chain = importlib.import_module("examples.apps.langchain_chain")
    chain.main(["fox", "owl", "bear", "--url", server.v1])
    stories = capsys.readouterr().out.split("\n\n")
    assert len([story for story in stories if len(story.split()) > 5]) >= 3


@pytest.mark.slow
def test_llama_index_chats(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llama_index.llms.openai_like")
    chat = importlib.import_module("examples.apps.llama_index_chat")
    chat.main(["Tell me a story about a fox.", "--url", server.v1])
    assert len(capsys.readouterr().out.split()) > 10


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # gradio's own loops
def test_the_page_of_gradio_answers(server: RunningServer) -> None:
    openai = pytest.importorskip("openai")
    app = importlib.import_module("examples.apps.gradio_page")
    client = openai.OpenAI(base_url=server.v1, api_key="none")
    history = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hello."}]
    grown = list(app.answer(client, "Tell me a story about a fox.", history))
    assert len(grown) > 5 and all(
        after.startswith(before) for before, after in itertools.pairwise(grown)
    )
    pytest.importorskip("gradio")
    page = app.page(server.v1)
    assert page.title == "Quire" and page.fn.__name__ == "chat"
    del page
    gc.collect()  # what gradio leaves open is none of the next test's

"""T15 and T36: whatever fails inside, on either side of the process boundary, ends exactly the
request that it belongs to.

The victim gets an error in the API's shape that tells nothing of the cause but its kind (T16);
three neighbours that run beside it (a stream, an answer in one piece with log-probabilities, a
chat) get to the byte what they get when nothing happens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import faulty_engine
import httpx
import pytest
from faulty_engine import FAULTS, FAULTY_SCORES
from served import until
from servers import MODEL, RunningServer, serve

from quire.config.engine import EngineConfig
from quire.engine.assembly.preparation import prepare_model
from quire.engine.front.client import Client
from quire.engine.front.output_processor import OutputProcessor
from quire.engine.front.text_stream import TextStream
from quire.engine.process.journal import JournalEntry
from quire.engine.process.link import supervised
from quire.server.api.generation import GenerationRun
from quire.server.http.responses import data_event
from quire.text.chat import ChatTemplate
from quire.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

MARK = "unlucky"
"""In a victim's text or stop strings, for faults on the server's side."""
ENGINE = (sys.executable, str(Path(faulty_engine.__file__)))
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NEIGHBOURS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "Once upon a time", "stream": True, "temperature": 0}),
    (COMPLETIONS, {"prompt": "The dog", "n": 2, "logprobs": 2, "temperature": 1.2}),
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": "Tell me of a cat."}],
            "stream": True,
            "logprobs": True,
        },
    ),
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """The API in this process over the real model in another, which some prompts break."""
    options = {"num_threads": 1, "kv_cache_memory": "48MiB", "max_num_seqs": 64}
    prepared = prepare_model(EngineConfig.from_options(MODEL, options), is_for_here=False)
    client = Client(prepared, supervised(prepared, command=ENGINE))
    with serve(client) as running:

        async def start() -> None:
            client.link.start()

        running.run(start)
        yield running
        running.run(client.close)


@pytest.fixture(scope="module")
def undisturbed(server: RunningServer) -> list[Any]:
    """What the neighbours get when nothing happens; asked for together, and once before,
    so that their prompts are cached."""
    _ask_together(server, [])
    return _ask_together(server, [])[1]


def _ask_together(
    server: RunningServer, victims: list[tuple[str, dict[str, Any]]]
) -> tuple[list[httpx.Response], list[Any]]:
    """(the victims' answers, what the neighbours got), all at the same time."""
    everyone = [*NEIGHBOURS, *victims]

    def ask(place: int) -> httpx.Response:
        path, body = everyone[place]
        body = {"max_tokens": 24, "seed": 3, "ignore_eos": True, **body}
        return httpx.post(server.url + path, json=body, timeout=60)

    with ThreadPoolExecutor(len(everyone)) as pool:
        answers = list(pool.map(ask, range(len(everyone))))
    return answers[len(NEIGHBOURS) :], [_essence(answer) for answer in answers[: len(NEIGHBOURS)]]


def _essence(answer: httpx.Response) -> Any:
    """All that a request decides of its answer: ids and times left out,
    a stream's pieces joined."""
    assert answer.status_code == 200, answer.text
    if not answer.text.startswith("data: "):
        return [
            (each["index"], each["text"], each["logprobs"], each["finish_reason"])
            for each in answer.json()["choices"]
        ]
    blocks = answer.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    choices = [choice for block in blocks[:-2] for choice in json.loads(block[6:])["choices"]]
    texts = [choice.get("text", choice.get("delta", {}).get("content")) or "" for choice in choices]
    scores = [
        token for choice in choices for token in (choice["logprobs"] or {}).get("content", [])
    ]
    return "".join(texts), scores, choices[-1]["finish_reason"]


def _assert_failed(answer: httpx.Response) -> None:
    """An error of ours: as a plain answer, or as the last event of a stream."""
    if answer.text.startswith("data: "):
        error = json.loads(answer.text.split("\n\n")[-3][6:])["error"]
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        assert answer.status_code == 500, answer.text
        error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "server_error"
    assert not any(
        leak in answer.text for leak in ("secret", "Traceback", "0x", ".py", "/root", MARK)
    )


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_t15_t36_what_fails_in_the_engine(
    server: RunningServer,
    undisturbed: list[Any],
    fault: str,
    is_stream: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    scores = {"prompt_logprobs": FAULTY_SCORES} if fault == "its prompt's scores are NaN" else {}
    victim = {
        "prompt": [FAULTS[fault], *range(300, 340)],
        "logprobs": 1,
        "stream": is_stream,
        **scores,
    }
    pid = server.client.status().engine_pid
    [answer], neighbours = _ask_together(server, [(COMPLETIONS, victim)])
    _assert_failed(answer)
    assert neighbours == undisturbed
    assert server.client.status().engine_pid == pid
    again, _ = _ask_together(server, [(COMPLETIONS, {"prompt": [*range(300, 340)]})])
    assert again[0].status_code == 200, "nothing of it was left in the cache"
    assert "secret" not in caplog.text


def _fail(*_: object, **__: object) -> Any:
    raise RuntimeError("secret text of /root/x.py at 0x7f00")


def _fail_if(is_victim: Callable[..., bool], inner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: _fail() if is_victim(*args, **kwargs) else inner(*args, **kwargs)


def _has_mark(params: Any) -> bool:
    return params.stop is not None and MARK in params.stop


SERVER_FAULTS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "its text cannot be tokenized": (Tokenizer, "encode", lambda self, text, **_: MARK in text),
    "its chat cannot be rendered": (
        ChatTemplate,
        "render",
        lambda self, messages, **_: MARK in str(messages),
    ),
    "it cannot be judged": (
        Client,
        "prepare",
        lambda self, name, prompt, digest, **_: _has_mark(digest.params),
    ),
    "it cannot be followed": (
        OutputProcessor,
        "add",
        lambda self, request, asked: _has_mark(asked.params),
    ),
    "it cannot be put into a message": (
        JournalEntry,
        "to_message",
        lambda self: _has_mark(self.prepared.params),
    ),
    "its tokens cannot be taken in": (
        JournalEntry,
        "take",
        lambda self, *_: _has_mark(self.prepared.params),
    ),
    "its token cannot become text": (TextStream, "append", lambda self, *_: self.is_victim),
    "its text cannot be ended": (TextStream, "flush", lambda self: self.is_victim),
    "its output cannot be made": (
        OutputProcessor,
        "_snapshot",
        lambda self, state, **_: _has_mark(state.params),
    ),
    "its output cannot be counted": (
        GenerationRun,
        "_count",
        lambda self, number, *_: _has_mark(self._jobs[number].params),
    ),
    "its output cannot be booked": (
        GenerationRun,
        "_book",
        lambda self, *_: _has_mark(self._jobs[0].params),
    ),
}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("fault", SERVER_FAULTS)
def test_t15_what_fails_in_the_server(
    server: RunningServer,
    undisturbed: list[Any],
    fault: str,
    is_stream: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, method, is_victim = SERVER_FAULTS[fault]
    if owner is TextStream:
        _mark_streams(monkeypatch)
    monkeypatch.setattr(owner, method, _fail_if(is_victim, getattr(owner, method)))
    is_chat = fault == "its chat cannot be rendered"
    body = (
        {"messages": [{"role": "user", "content": MARK}]}
        if is_chat
        else {"prompt": f"The {MARK} cat"}
    )
    [answer], neighbours = _ask_together(
        server, [(CHAT if is_chat else COMPLETIONS, {**body, "stop": [MARK], "stream": is_stream})]
    )
    if is_chat:
        assert answer.status_code == 400 or answer.status_code == 500
    else:
        _assert_failed(answer)
    assert neighbours == undisturbed
    _assert_nothing_left(server)


def _mark_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a text stream know whose it is."""
    create = TextStream.__init__

    class MarkedStream(TextStream):
        def __init__(self, tokenizer: Any, prompt: Any, params: Any, stop: Any) -> None:
            create(self, tokenizer, prompt, params, stop)
            self.is_victim = _has_mark(params)

    monkeypatch.setattr("quire.engine.front.output_processor.TextStream", MarkedStream)


def test_t15_what_fails_while_a_stream_is_written(
    server: RunningServer, undisturbed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its first events, so that the error is an event as well."""
    written = 0

    def encode(body: Any) -> bytes:
        nonlocal written
        is_victims = body["choices"][0]["index"] == 2
        written += is_victims
        return _fail() if is_victims and written == 3 else data_event(body)

    monkeypatch.setattr("quire.server.api.openai.completions.data_event", encode)
    victim = {"prompt": "A cat", "n": 3, "stream": True}
    [answer], neighbours = _ask_together(server, [(COMPLETIONS, victim)])
    _assert_failed(answer)
    assert answer.status_code == 200 and answer.text.count("data: ") > 3
    assert neighbours == undisturbed
    _assert_nothing_left(server)


def _assert_nothing_left(server: RunningServer) -> None:
    def is_idle() -> bool:
        status = server.client.status()
        return not (status.num_requests or status.num_running or status.kv_usage)

    until(is_idle)

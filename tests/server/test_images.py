"""Images over HTTP: the parts of three APIs, what they count, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from optional_packages import require
from servers import RunningServer, serve_model
from vision_models import NUM_TOKENS, data_url, picture, write_llava, write_tokenizer

from quire import LLM, SamplingParams
from quire.config.api import ApiConfig
from quire.server.quota.tenants import Tenant, key_ring

Image = pytest.importorskip("PIL.Image")
require("transformers")

OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": "4MiB", "max_num_seqs": 8}
CHAT, NAME = "/v1/chat/completions", "llava"
FIXED = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("models") / NAME
    path.mkdir()
    write_llava(path)
    write_tokenizer(path)
    (path / "media").mkdir()
    Image.fromarray(picture(1)).save(path / "media" / "one.png")
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    options = {
        **OPTIONS,
        "allowed_local_media_path": str(folder / "media"),
        "limit_mm_per_prompt": {"image": 3},
    }
    with serve_model(model=str(folder), **options) as found:
        yield found


def _ask(server: RunningServer, parts: list[Any], path: str = CHAT, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": parts}], **FIXED, **fields}
    return httpx.post(server.url + path, json=body, timeout=60)


def _url(seed: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(picture(seed)), "detail": "auto"}}


TEXT = {"type": "text", "text": "What is it?"}


def test_answers_are_those_of_llm_chat(server: RunningServer, folder: Path) -> None:
    answer = _ask(server, [_url(1), TEXT]).json()
    with LLM(str(folder), num_threads=1, **OPTIONS) as llm:
        message = {
            "role": "user",
            "content": [{"type": "image_pil", "image_pil": Image.fromarray(picture(1))}, TEXT],
        }
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
        [output] = llm.chat([message], params, use_tqdm=False)
        [raw] = llm.generate(
            {"prompt": "USER: <image>\nWhat is it? ASSISTANT:",
             "multi_modal_data": {"image": picture(1)}}, params, use_tqdm=False,
        )  # fmt: skip
    assert answer["choices"][0]["message"]["content"] == output.outputs[0].text
    assert raw.outputs[0].token_ids == output.outputs[0].token_ids
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(output.prompt_token_ids)
    assert usage["prompt_tokens_details"]["image_tokens"] == NUM_TOKENS


def test_chats_without_images_keep_their_text(server: RunningServer, folder: Path) -> None:
    """The template reads lists of parts alone, and a client sends a string."""
    plain = {"messages": [{"role": "user", "content": "What is it?"}], **FIXED}
    as_text = httpx.post(server.url + CHAT, json=plain, timeout=60).json()
    as_parts = _ask(server, [TEXT]).json()
    assert as_text["choices"] == as_parts["choices"]
    assert as_text["usage"]["prompt_tokens"] > 20
    assert as_text["usage"]["prompt_tokens_details"]["image_tokens"] == 0


def test_the_image_decides_and_is_found_again(server: RunningServer) -> None:
    answers = [_ask(server, [_url(seed), TEXT]).json() for seed in (11, 12, 11)]
    texts = [each["choices"][0]["message"]["content"] for each in answers]
    assert texts[0] == texts[2] != texts[1]
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers]
    assert cached[2] > NUM_TOKENS > cached[1]


def test_streams_and_several_turns(server: RunningServer) -> None:
    messages = [
        {"role": "user", "content": [_url(1), TEXT]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": [{"type": "text", "text": "And this?"}, _url(2)]},
    ]
    body = {"messages": messages, **FIXED, "stream_options": {"include_usage": True}}
    whole = httpx.post(server.url + CHAT, json={**body, "stream_options": None}, timeout=60).json()
    stream = httpx.post(server.url + CHAT, json={**body, "stream": True}, timeout=60).text
    assert whole["usage"]["prompt_tokens_details"]["image_tokens"] == 2 * NUM_TOKENS
    assert f'"image_tokens":{2 * NUM_TOKENS}' in stream


def test_the_official_clients_send_images(server: RunningServer) -> None:
    openai = pytest.importorskip("openai")
    anthropic = pytest.importorskip("anthropic")
    wanted = _ask(server, [_url(1), TEXT]).json()["choices"][0]["message"]["content"]
    options = {"api_key": "none", "max_retries": 0}
    fixed: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
    with openai.OpenAI(base_url=server.v1, **options) as client:
        chat = client.chat.completions.create(
            model=NAME,
            max_tokens=6,
            messages=[{"role": "user", "content": [_url(1), TEXT]}],
            **fixed,
        )
        assert chat.choices[0].message.content == wanted
        assert chat.usage.prompt_tokens_details.image_tokens == NUM_TOKENS
        parts = [
            {"type": "input_image", "image_url": data_url(picture(1)), "detail": "auto"},
            {"type": "input_text", "text": TEXT["text"]},
        ]
        answer = client.responses.create(
            model=NAME,
            max_output_tokens=16,
            input=[{"role": "user", "content": parts}],
            **fixed,
        )
        assert answer.output_text.startswith(wanted)
    source = {"type": "base64", "media_type": "image/png"}
    source["data"] = data_url(picture(1)).partition(",")[2]
    with anthropic.Anthropic(base_url=server.url, **options) as client:
        message = client.messages.create(
            model=NAME,
            max_tokens=6,
            messages=[{"role": "user", "content": [{"type": "image", "source": source}, TEXT]}],
            extra_body={"temperature": 0, "ignore_eos": True},
        )
    assert "".join(block.text for block in message.content) == wanted


def test_langchain_sends_images(server: RunningServer) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    llm = langchain_openai.ChatOpenAI(
        base_url=server.v1, api_key="none", model=NAME, temperature=0, max_tokens=6,
        max_retries=0, extra_body={"ignore_eos": True},
    )  # fmt: skip
    wanted = _ask(server, [_url(1), TEXT]).json()["choices"][0]["message"]["content"]
    assert llm.invoke([{"role": "user", "content": [_url(1), TEXT]}]).content == wanted
    data = data_url(picture(1)).partition(",")[2]
    block = {"type": "image", "base64": data, "mime_type": "image/png"}
    assert llm.invoke([{"role": "user", "content": [block, TEXT]}]).content == wanted


def test_responses_and_messages_take_images(server: RunningServer) -> None:
    chat = _ask(server, [_url(1), TEXT]).json()
    parts = [
        {"type": "input_image", "image_url": data_url(picture(1))},
        {"type": "input_text", "text": "What is it?"},
    ]
    body = {"input": [{"role": "user", "content": parts}], "temperature": 0,
            "max_output_tokens": 6, "ignore_eos": True}  # fmt: skip
    response = httpx.post(f"{server.url}/v1/responses", json=body, timeout=60).json()
    text = chat["choices"][0]["message"]["content"]
    assert response["output"][-1]["content"][0]["text"] == text
    items = httpx.get(f"{server.url}/v1/responses/{response['id']}/input_items").json()["data"]
    assert items[0]["content"][0]["type"] == "input_image"
    follow = {"input": "Sure?", "previous_response_id": response["id"], "max_output_tokens": 2}
    again = httpx.post(f"{server.url}/v1/responses", json=follow, timeout=60).json()
    assert again["usage"]["input_tokens"] > response["usage"]["input_tokens"]
    source = {
        "type": "base64",
        "media_type": "image/png",
        "data": data_url(picture(1)).partition(",")[2],
    }
    blocks = [{"type": "image", "source": source}, TEXT]
    message = httpx.post(
        f"{server.url}/v1/messages",
        json={"messages": [{"role": "user", "content": blocks}], "model": NAME, "max_tokens": 6,
              "temperature": 0, "ignore_eos": True},
        timeout=60,
    ).json()  # fmt: skip
    assert message.get("content", [message])[0].get("text") == text, message
    count = httpx.post(
        f"{server.url}/v1/messages/count_tokens",
        json={"messages": [{"role": "user", "content": blocks}], "model": NAME},
        timeout=60,
    ).json()
    assert count["input_tokens"] == chat["usage"]["prompt_tokens"]


def _named(uuid: str, seed: int | None = None) -> dict[str, Any]:
    url = None if seed is None else {"url": data_url(picture(seed))}
    return {"type": "image_url", "image_url": url, "uuid": uuid}


def test_an_image_with_a_name_need_not_be_sent_again(server: RunningServer) -> None:
    unknown = _ask(server, [_named("cat"), TEXT])
    assert unknown.status_code == 400 and "'cat'" in unknown.json()["error"]["message"]
    first = _ask(server, [_named("cat", 1), TEXT]).json()
    by_name = _ask(server, [_named("cat"), TEXT]).json()
    assert first["choices"] == by_name["choices"]
    assert first["choices"] == _ask(server, [_url(1), TEXT]).json()["choices"]
    other = _ask(server, [_named("cat", 2), TEXT]).json()  # the image counts, not the name
    assert other["choices"] == _ask(server, [_url(2), TEXT]).json()["choices"]
    assert _ask(server, [_named("cat"), TEXT]).json()["choices"] == other["choices"]
    wrong = _ask(server, [{**_url(1), "uuid": 3}, TEXT])
    assert wrong.status_code == 400 and "uuid" in wrong.json()["error"]["param"]


def test_a_name_works_in_responses_too(server: RunningServer) -> None:
    def ask(*parts: dict[str, Any], **more: Any) -> Any:
        content = [*parts, {"type": "input_text", "text": "What is it?"}]
        body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 6, **more}
        return httpx.post(f"{server.v1}/responses", json={"temperature": 0, **body}, timeout=60)

    def text(answer: Any) -> str:
        assert "x-quire-ignored-fields" not in answer.headers
        return str(answer.json()["output"][0]["content"][0]["text"])

    image, name = {"type": "input_image", "image_url": data_url(picture(1))}, {"uuid": "emu"}
    first = ask({**image, **name})
    again = ask({"type": "input_image", **name})
    assert text(first) == text(again) == text(ask(image))
    further = ask(previous_response_id=again.json()["id"])
    assert text(further) == text(ask(previous_response_id=first.json()["id"]))
    assert ask({"type": "input_image", "uuid": "unknown"}).status_code == 400
    assert ask({"type": "input_image", "image_url": 5, **name}).status_code == 400


def test_what_names_an_image_is_no_unknown_field(folder: Path) -> None:
    url = data_url(picture(1))
    ways: list[dict[str, Any]] = [
        _named("owl", 1),
        _named("owl"),
        {"type": "image_url", "uuid": "owl"},
        {"type": "image", "image": url},
        {"type": "image", "url": url},
        {"type": "image_pil", "image_pil": url},
    ]
    with serve_model(ApiConfig(strict_fields=True), model=str(folder), **OPTIONS) as server:
        answers = [_ask(server, [way, TEXT]) for way in ways]
        odd = _ask(server, [{**_url(1), "colour": "red"}, TEXT])
    assert len({each.json()["choices"][0]["message"]["content"] for each in answers}) == 1
    assert odd.status_code == 400 and "colour" in odd.json()["error"]["message"]


def test_names_of_images_are_known_within_a_salt(server: RunningServer) -> None:
    assert _ask(server, [_named("dog", 1), TEXT], cache_salt="a").status_code == 200
    assert _ask(server, [_named("dog"), TEXT], cache_salt="a").status_code == 200
    for salt in ({}, {"cache_salt": "b"}):
        answer = _ask(server, [_named("dog"), TEXT], **salt)
        assert answer.status_code == 400 and "send the image" in answer.json()["error"]["message"]


def test_no_tenant_reaches_another_s_image(folder: Path) -> None:
    """Whether or not their caches are kept apart."""
    tenants = [(Tenant("a", is_isolated=False), ["sk-of-tenant-a"]),
               (Tenant("b", is_isolated=False), ["sk-of-tenant-b"])]  # fmt: skip
    with serve_model(model=str(folder), keys=key_ring(tenants), **OPTIONS) as server:
        body = {"messages": [{"role": "user", "content": [_named("x", 1), TEXT]}], **FIXED}
        again = {"messages": [{"role": "user", "content": [_named("x"), TEXT]}], **FIXED}

        def ask(key: str, asked: Any) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return httpx.post(
                server.url + CHAT, json=asked, headers=headers, timeout=60
            ).status_code

        assert ask("sk-of-tenant-a", body) == 200
        assert ask("sk-of-tenant-a", again) == 200
        assert ask("sk-of-tenant-b", again) == 400


def test_files_of_the_allowed_folder(server: RunningServer, folder: Path) -> None:
    def ask(url: str) -> httpx.Response:
        found: httpx.Response = _ask(
            server, [{"type": "image_url", "image_url": {"url": url}}, TEXT]
        )
        return found

    by_file, by_data = ask(f"file://{folder}/media/one.png"), _ask(server, [_url(1), TEXT])
    assert by_file.json()["choices"] == by_data.json()["choices"]
    outside = ask(f"file://{folder}/config.json")
    assert outside.status_code == 400 and "no file under" in outside.json()["error"]["message"]


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}}], "not fetched from"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}], "no image"),
        ([{"type": "image_url"}], "needs a URL"),
        ([{"type": "image_url", "image_url": 3}], "needs a URL"),
        ([_url(1)] * 4, "at most 3"),
        ([{"type": "input_audio", "input_audio": {}}], "not possible here"),
    ],
)
def test_images_that_cannot_be_used_are_refused(
    parts: list[Any], says: str, server: RunningServer
) -> None:
    response = _ask(server, [*parts, TEXT])
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert says in error["message"] and error["param"].startswith("messages[0].content[0]")


def test_a_users_placeholder_is_plain_text(server: RunningServer) -> None:
    response = _ask(server, [{"type": "text", "text": "<image> <image>"}, _url(1)])
    assert response.status_code == 200
    assert response.json()["usage"]["prompt_tokens_details"]["image_tokens"] == NUM_TOKENS


def test_a_prompt_that_is_cut_loses_no_image(server: RunningServer) -> None:
    response = _ask(server, [_url(1), TEXT], truncate_prompt_tokens=8)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "truncate_prompt_tokens"


def test_a_raw_prompt_cannot_have_bare_placeholders(server: RunningServer) -> None:
    body = {"prompt": "USER: <image> x", "max_tokens": 2}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 400 and "images" in response.json()["error"]["message"]

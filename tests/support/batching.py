"""Input files of batches, and batches as OpenAI's client sees them."""

from __future__ import annotations

import json
from typing import Any

import openai
from served import until
from servers import RunningServer


def line(name: str, url: str = "/v1/chat/completions", **body: Any) -> str:
    """One request of an input file."""
    chat = {"model": "fake", "messages": [{"role": "user", "content": "x"}], **body}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": chat})


def client_of(server: RunningServer, key: str = "key-of-a") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.v1, api_key=key, max_retries=0)


def begin(client: openai.OpenAI, text: str, endpoint: Any = "/v1/chat/completions") -> Any:
    file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


def wait(client: openai.OpenAI, batch_id: str, *wanted: str) -> Any:
    batch: Any = None

    def is_there() -> bool:
        nonlocal batch
        batch = client.batches.retrieve(batch_id)
        return batch.status in wanted

    until(is_there)
    return batch


def results(client: openai.OpenAI, file_id: str) -> dict[str, Any]:
    """Result lines by their `custom_id`."""
    entries = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    assert len({entry["custom_id"] for entry in entries}) == len(entries)
    return {entry["custom_id"]: entry for entry in entries}

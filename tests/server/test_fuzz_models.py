"""T09 on models of other kinds: poolers, one that reads images, and one with adapters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from adapters import write_adapter
from folders import make_folder
from mutations import MAX_WAIT_S, Body, send_mutated
from optional_packages import require
from plain_http import PlainClient
from servers import MODEL, RunningServer, serve_model
from vision_models import data_url, picture, write_llava, write_tokenizer

from quire.config.api import ApiConfig
from quire.models.registry import declare
from quire.weights.folder import read_model_config, resolve_model

pytest.importorskip("PIL.Image")
require("transformers")
pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": "8MiB"}
POOLED: list[Body] = [
    ("/v1/embeddings", {"input": ["x", "y"], "encoding_format": "base64", "dimensions": 16}),
    ("/v1/embeddings", {"input": [[5, 6], [7]], "truncate_prompt_tokens": 4}),
    ("/pooling", {"input": ["x"], "task": "embed", "normalize": True}),
    ("/pooling", {"input": "x", "task": "token_embed"}),
    ("/pooling", {"input": ["x"], "task": "token_classify"}),
    ("/pooling", {"messages": [{"role": "user", "content": "x"}]}),
    ("/classify", {"input": ["x", "y"], "use_activation": False}),
    ("/classify", {"messages": [{"role": "user", "content": "x"}]}),
    ("/v1/score", {"text_1": "x", "text_2": ["x", "y"]}),
    ("/score", {"text_1": ["x", "y"], "text_2": ["y", "x"], "truncate_prompt_tokens": 8}),
    ("/v1/rerank", {"query": "x", "documents": ["x", "y"], "top_n": 1, "return_documents": True}),
    ("/v2/rerank", {"query": "x", "documents": [{"text": "x"}, "y"]}),
    ("/tokenize", {"prompt": "x"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
]


def _image(seed: int) -> str:
    return data_url(picture(seed, 30, 20))


IMAGES: list[Body] = [
    (
        "/v1/chat/completions",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "x"},
                        {
                            "type": "image_url",
                            "image_url": {"url": _image(seed), "detail": "auto"},
                            "uuid": "a",
                        },
                    ],
                }
            ],
            "max_tokens": 2,
            "n": 2,
        },
    )
    for seed in (1, 2)
] + [
    (
        "/v1/responses",
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "x"},
                        {"type": "input_image", "image_url": _image(1), "detail": "low"},
                    ],
                }
            ],
            "max_output_tokens": 2,
        },
    ),
    (
        "/v1/messages",
        {
            "model": "llava",
            "max_tokens": 2,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {
                                "type": "base64",
                                "media_type": "image/png",
                                "data": _image(1).partition(",")[2],
                            },
                        },
                        {"type": "text", "text": "x"},
                    ],
                }
            ],
        },
    ),
]
FETCHED = ("file:///etc/passwd", "http://127.0.0.1/x.png", "ftp://x", "data:,", "data:image/png,x")
IMAGES += [
    (
        "/v1/chat/completions",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": url}}] * 2,
                }
            ],
            "max_tokens": 1,
        },
    )
    for url in FETCHED
]
STORY = {"prompt": "x", "max_tokens": 2}


@contextmanager
def _pooler(folder: Path, **options: Any) -> Iterator[tuple[RunningServer, list[Body]]]:
    make_folder(folder, "bert", **(options or {"pooling": "mean_tokens"}))
    with serve_model(model=str(folder), **SMALL) as server:
        yield server, POOLED


def _embedder(folder: Path) -> Any:
    return _pooler(folder)


def _classifier(folder: Path) -> Any:
    return _pooler(folder, auto="AutoModelForSequenceClassification", num_labels=1)


def _tagger(folder: Path) -> Any:
    return _pooler(folder, auto="AutoModelForTokenClassification", num_labels=3)


@contextmanager
def _images(folder: Path) -> Iterator[tuple[RunningServer, list[Body]]]:
    write_llava(folder)
    write_tokenizer(folder)
    with serve_model(model=str(folder), max_num_seqs=8, **SMALL) as server:
        yield server, IMAGES


@contextmanager
def _adapters(folder: Path) -> Iterator[tuple[RunningServer, list[Body]]]:
    spec = declare(read_model_config(resolve_model(MODEL)))
    for name in ("first", "second"):
        write_adapter(folder / name, spec, rank=4, seed=len(name))
    config = ApiConfig(lora_modules=(f"first={folder / 'first'}",), lora_folder=str(folder))
    options: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": 2,
        "max_cpu_loras": 2,
        "convert": "embed",
    }
    path = str(folder / "second")
    bodies: list[Body] = [
        ("/v1/completions", {**STORY, "model": "first"}),
        ("/v1/completions", {**STORY, "model": "second"}),
        ("/v1/embeddings", {"input": ["x"], "model": "first"}),
        ("/v1/load_lora_adapter", {"lora_name": "second", "lora_path": path}),
        ("/v1/unload_lora_adapter", {"lora_name": "second"}),
    ]
    with serve_model(config, **options) as server:
        yield server, bodies


@pytest.mark.parametrize("serve", [_embedder, _classifier, _tagger, _images, _adapters])
def test_t09_mutated_bodies(serve: Callable[[Path], Any], tmp_path: Path) -> None:
    with serve(tmp_path) as (server, bodies):
        port = int(server.url.rpartition(":")[2])
        with PlainClient(port, timeout_s=MAX_WAIT_S) as http:
            send_mutated(http, lambda rng: rng.choice(bodies), {200, 400})
            answer = http.post("/tokenize", json.dumps({"prompt": "x"}).encode())
            assert answer.status == 200

"""Quire behind FastChat's web page: `python -m examples.apps.fastchat_endpoint endpoints.json`
beside `quire serve --port 8000`, and then

    python -m fastchat.serve.gradio_web_server --controller "" \\
        --register-api-endpoint-file endpoints.json

Writes the file by which FastChat finds a server that speaks OpenAI's API; its models become choices
on the page. Needs nothing but Python; FastChat itself is the package fschat.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def served_models(url: str) -> list[str]:
    """The names of a server's models."""
    with urllib.request.urlopen(f"{url}/models", timeout=30) as response:
        return [str(each["id"]) for each in json.load(response)["data"]]


def endpoints(url: str, models: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What FastChat reads: for each choice the model's name, the server and how to speak to it."""
    return {
        name: {
            "model_name": name,
            "api_base": url,
            "api_key": "none",
            "api_type": "openai",
            "anony_only": False,
            "recommended_config": {"temperature": 0.35, "top_p": 0.95},
            "text-arena": True,
            "vision-arena": False,
        }
        for name in models
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask the server for its models, and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--url", default="http://localhost:8000/v1")
    args = parser.parse_args(arguments)
    found = endpoints(args.url, served_models(args.url))
    args.file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"{args.file}: {', '.join(found)}")


if __name__ == "__main__":
    main()

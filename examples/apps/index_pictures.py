"""Say what is in each picture, as JSON of a schema: `python -m examples.apps.index_pictures *.png`.

All pictures are one batch. A file that is no picture gets an error of its own, and costs the others
nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from quire import LLM, SamplingParams
from quire.core.structure import StructuredOutputsParams

SHAPE = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("size", "color", "shape")},
    "required": ["size", "color", "shape"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": SHAPE, "maxItems": 8}
QUESTION = "List the shapes as JSON."


def opened(path: Path) -> Image.Image | str:
    """Return the picture, or what is wrong with the file."""
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, UnidentifiedImageError) as error:
        return str(error)


def index(llm: LLM, paths: Sequence[Path], question: str = QUESTION) -> list[dict[str, Any]]:
    """Return for each file its `file`, and `shapes` or `error`."""
    pictures = [opened(path) for path in paths]
    chats: list[Any] = [
        [{"role": "user", "content": [{"type": "image_pil", "image_pil": picture},
                                      {"type": "text", "text": question}]}]
        for picture in pictures if not isinstance(picture, str)
    ]  # fmt: skip
    grammar = StructuredOutputsParams(json=SCHEMA)
    params = SamplingParams(temperature=0.0, max_tokens=300, structured_outputs=grammar)
    outputs = iter(llm.chat(chats, params, use_tqdm=False) if chats else [])
    found: list[dict[str, Any]] = []
    for path, picture in zip(paths, pictures, strict=True):
        if isinstance(picture, str):
            found.append({"file": str(path), "error": picture})
            continue
        answer = next(outputs).outputs[0]
        is_whole = answer.finish_reason == "stop"
        found.append(
            {"file": str(path), "shapes": json.loads(answer.text)}
            if is_whole
            else {"file": str(path), "error": f"stopped: {answer.finish_reason}"}
        )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line of JSON for each picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--model", default="quire-viewer")
    parser.add_argument("--question", default=QUESTION)
    args = parser.parse_args(arguments)
    with LLM(args.model) as llm:
        for line in index(llm, args.files, args.question):
            print(json.dumps(line))


if __name__ == "__main__":
    main()

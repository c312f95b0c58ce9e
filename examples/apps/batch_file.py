"""An object for each line of a file: `python -m examples.apps.batch_file texts.txt out.jsonl`.

The lines are answered in batches, each as an object of a schema, and written as they are ready: run
it again after a stop, and it goes on behind the lines that are done. A line that fails is written
with its error, so that the output has the lines of the input.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.core.structure import StructuredOutputsParams
from quire.errors import RequestError

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {key: {"type": "string", "maxLength": 30} for key in ("name", "kind")},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


def done_lines(path: Path) -> int:
    """How many whole lines an earlier run has written; half a line at its end is taken away."""
    path.touch()
    data = path.read_bytes()
    os.truncate(path, data.rfind(b"\n") + 1)
    return data.count(b"\n")


def objects(llm: LLM, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """For each text what was read in it, or the error; one that is too long is found by halves."""
    keys = " and ".join(SCHEMA["properties"])
    chats = [[{"role": "user", "content": f"{text} Answer as JSON with {keys}."}] for text in texts]
    grammar = StructuredOutputsParams(json=SCHEMA)
    params = SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=grammar)
    try:
        outputs = llm.chat(chats, params, use_tqdm=False)
    except RequestError as error:
        half = len(texts) // 2
        for part in (texts[:half], texts[half:]):
            yield from objects(llm, part) if half else [{"error": str(error)}] * len(part)
        return
    for output in outputs:
        answer = output.outputs[0]
        if output.error is not None or answer.finish_reason != "stop":
            yield {"error": str(output.error or f"the answer was cut: {answer.text}")}
        else:
            yield dict(json.loads(answer.text))


def main(arguments: Sequence[str] | None = None) -> None:
    """Go through the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("texts", type=Path, help="one text a line")
    parser.add_argument("out", type=Path, help="one JSON object a line, added to what is there")
    parser.add_argument("--model", default="quire-storyteller")
    parser.add_argument("--batch", type=int, default=256, help="lines between two writes")
    args = parser.parse_args(arguments)
    start = done_lines(args.out)
    texts, out = args.texts.open(encoding="utf-8"), args.out.open("a", encoding="utf-8")
    with LLM(args.model) as llm, texts, out:
        lines = (line.strip() for line in itertools.islice(texts, start, None))
        while batch := list(itertools.islice(lines, args.batch)):
            for each in objects(llm, batch):
                out.write(json.dumps(each, ensure_ascii=False) + "\n")
            out.flush()


if __name__ == "__main__":
    main()

"""Requests for a server: random prompts, shared prefixes, traces, prompts from a file. All from
seeds and files alone.

Random prompts are token ids where the vocabulary is known, else common words, of which nearly
every tokenizer makes one token each; how many tokens they were is then the server's word (`usage`).
Owns no clock and no connection.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from quire.bench.workload import EDGE
from quire.common.bounded_files import MAX_TEXT_BYTES, read_text
from quire.errors import ConfigError
from quire.sim.traces import Trace, read_trace

LengthRange = tuple[int, int]
_WORDS = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point
home water room mother area money story fact month lot right study book eye job word business issue
side kind head house service friend father power hour game line end member law car city name team
minute idea body back parent face level office door health person art war history party result
change morning reason research girl guy moment air teacher force education
""".split()  # noqa: SIM905 (as a list it is a page long)


class ServeRequest(NamedTuple):
    """One request: a prompt (text or token ids) or a chat, and how long the answer is to be."""

    prompt: str | list[int]
    num_output: int
    messages: list[dict[str, Any]] | None = None
    """Where a file gives a whole chat."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """Requests, how they came about, and when they came, if that is known."""

    name: str
    parameters: dict[str, Any]
    requests: list[ServeRequest]
    arrival_s: list[float] | None = field(default=None)


class PromptWriter:
    """Makes prompts of abstract tokens: ids of a vocabulary, or words."""

    def __init__(self, vocab_size: int | None) -> None:
        if vocab_size is not None and vocab_size <= 4 * EDGE:
            raise ConfigError(f"vocab_size={vocab_size} is no vocabulary to draw prompts from")
        self._vocab_size = vocab_size

    def draw(self, rng: random.Random, count: int) -> list[int]:
        """`count` random tokens."""
        first, last = (
            (0, len(_WORDS)) if self._vocab_size is None else (EDGE, self._vocab_size - EDGE)
        )
        return [rng.randrange(first, last) for _ in range(count)]

    def prompt(self, tokens: list[int]) -> str | list[int]:
        """Return the prompt as it is sent."""
        return (
            tokens if self._vocab_size is not None else " ".join(_WORDS[token] for token in tokens)
        )


class Sizes(NamedTuple):
    """How many requests, and their lengths in tokens, uniform in inclusive ranges."""

    num_requests: int
    input_len: LengthRange
    output_len: LengthRange


def random_dataset(sizes: Sizes, writer: PromptWriter, seed: int) -> Dataset:
    """Return prompts that share nothing."""
    return prefix_dataset(sizes, writer, seed, prefix_len=0)


def prefix_dataset(
    sizes: Sizes, writer: PromptWriter, seed: int, *, prefix_len: int, num_prefixes: int = 1
) -> Dataset:
    """Return prompts that begin with one of a few prefixes, in turn,
    and go on with tokens of their own."""
    shape, rng = random.Random(seed), random.Random(f"tokens/{seed}")
    lengths = [
        (shape.randint(*sizes.input_len), shape.randint(*sizes.output_len))
        for _ in range(sizes.num_requests)
    ]
    prefixes = [writer.draw(rng, prefix_len) for _ in range(num_prefixes)]
    requests = [
        ServeRequest(
            writer.prompt(prefixes[number % num_prefixes] + writer.draw(rng, num_input)), num_output
        )
        for number, (num_input, num_output) in enumerate(lengths)
    ]
    parameters: dict[str, Any] = {**sizes._asdict(), "seed": seed}
    if prefix_len:
        parameters |= {"prefix_len": prefix_len, "num_prefixes": num_prefixes}
    return Dataset("prefix" if prefix_len else "random", parameters, requests)


def trace_dataset(
    path: Path, writer: PromptWriter, *, num_requests: int, max_total_len: int | None
) -> Dataset:
    """Return the first requests of a trace that are not longer than the context,
    with their arrivals and shared prefixes."""
    trace = read_trace(path, limit=None if max_total_len is not None else num_requests)
    chosen = [number for number, each in enumerate(trace.requests) if _fits(each, max_total_len)][
        :num_requests
    ]
    if not chosen:
        raise ConfigError(f"no request of {path} fits a context of {max_total_len} tokens")
    requests = [
        ServeRequest(
            writer.prompt(_trace_tokens(trace, number, writer)),
            trace.requests[number].num_output_tokens,
        )
        for number in chosen
    ]
    parameters = {"trace": path.name, "num_requests": len(requests), "max_total_len": max_total_len}
    return Dataset(
        "trace", parameters, requests, [trace.requests[number].arrival_s for number in chosen]
    )


def _fits(request: Any, max_total_len: int | None) -> bool:
    return (
        max_total_len is None
        or request.num_prompt_tokens + request.num_output_tokens <= max_total_len
    )


def _trace_tokens(trace: Trace, number: int, writer: PromptWriter) -> list[int]:
    """Return a prompt in which equal hashes stand for equal tokens, and the rest is its own."""
    request, size = trace.requests[number], trace.hash_block_size
    tokens: list[int] = []
    for block_hash in request.hashes:
        tokens += writer.draw(random.Random(f"block/{block_hash}"), size)
    missing = request.num_prompt_tokens - len(tokens)
    if missing > 0:
        tokens += writer.draw(random.Random(f"own/{number}"), missing)
    return tokens[: request.num_prompt_tokens]


def file_dataset(path: Path, *, output_len: LengthRange, num_requests: int, seed: int) -> Dataset:
    """Return prompts of a file: one a line, or JSON lines with `prompt`, `prompt_token_ids`,
    `messages` or `turns` (of which the first is asked), and perhaps `max_tokens`. The file is begun
    again where it has fewer lines than requests.
    """
    shape = random.Random(seed)
    try:
        text = read_text(path, MAX_TEXT_BYTES, encoding="utf-8-sig")
        lines = [line for line in text.split("\n") if line.strip()]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    if not lines:
        raise ConfigError(f"{path} holds no prompts")
    parse: Callable[[str, str], Any] = (
        _parse_json if path.suffix == ".jsonl" else lambda line, place: {"prompt": line}
    )
    records = [
        parse(line, f"{path.name}:{number}")
        for number, line in enumerate(lines[:num_requests], start=1)
    ]
    requests = [
        _from_record(record, shape.randint(*output_len))
        for record in _cycled(records, num_requests)
    ]
    parameters = {
        "file": path.name,
        "num_requests": num_requests,
        "output_len": list(output_len),
        "seed": seed,
    }
    return Dataset("file", parameters, requests)


def _cycled(records: Sequence[Any], count: int) -> Iterator[Any]:
    return (records[number % len(records)] for number in range(count))


def _parse_json(line: str, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place} is not valid JSON: {error}") from None
    if isinstance(record, str):
        return {"prompt": record}
    if isinstance(record, dict):
        prompt, ids, messages, turns = (
            record.get(key) for key in ("prompt", "prompt_token_ids", "messages", "turns")
        )
        if isinstance(turns, list) and turns and isinstance(turns[0], str):
            return {**record, "prompt": turns[0]}
        if isinstance(prompt, str) or _is_ids(ids) or (isinstance(messages, list) and messages):
            return record
    raise ConfigError(f"{place} has no prompt, prompt_token_ids, messages or turns")


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, int) for each in value)


def _from_record(record: dict[str, Any], num_output: int) -> ServeRequest:
    wanted = record.get("max_tokens")
    prompt = record.get("prompt") or record.get("prompt_token_ids") or ""
    return ServeRequest(
        prompt,
        wanted if isinstance(wanted, int) and wanted > 0 else num_output,
        record.get("messages"),
    )


def check_endpoint(requests: Iterable[ServeRequest], *, is_chat: bool) -> None:
    """Refuse what an endpoint cannot be asked."""
    for each in requests:
        if is_chat and each.messages is None and not isinstance(each.prompt, str):
            raise ConfigError(
                "a chat is asked in words: leave out --vocab-size, or use --endpoint completions"
            )
        if not is_chat and each.messages is not None:
            raise ConfigError("the file holds chats (messages): use --endpoint chat")

"""Clients of a running server that speaks OpenAI's completions API:
`python -m benchmarks.serving --url URL --model NAME`.

Workload W6: 32 clients at once, each sending its requests back to back, streamed, as token ids,
greedy, end-of-text ignored (`ignore_eos`, which Quire, vLLM and llama.cpp understand). Prints
throughput and the spread of the times to the first token and between tokens. Owns no server: start
whichever is to be measured, Quire or a peer, on the same machine.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from quire.bench.spread import spread
from quire.bench.workload import WORKLOADS, BenchRequest, random_workload

_DEADLINE_S = 600.0
"""A server that sends nothing for so long has failed."""


class Target(NamedTuple):
    """Whom to ask."""

    url: str
    model: str
    """"" leaves it to a server that has one alone."""
    fields: tuple[tuple[str, Any], ...] = ()
    """Of every body, on top of the usual ones."""

    def post(
        self, request: BenchRequest, seen: Callable[[int], None] = lambda count: None
    ) -> list[float]:
        """One streamed completion: `time.perf_counter()` at each event that carries a choice.
        RuntimeError if it fails.

        `seen` is called with the number of events so far, as each comes.
        """
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(
            parts.hostname or "", parts.port, timeout=_DEADLINE_S
        )
        body: dict[str, Any] = {
            "prompt": request.token_ids,
            "max_tokens": request.num_output,
            "temperature": 0,
        }
        body |= {"model": self.model} if self.model else {}
        body |= dict(self.fields)
        try:
            payload = json.dumps(body | {"stream": True, "ignore_eos": True})
            connection.request(
                "POST",
                f"{parts.path.rstrip('/')}/v1/completions",
                payload,
                {"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(
                    f"the server answered {response.status}: "
                    f"{response.read(1000).decode(errors='replace')}"
                )
            return _event_times(response, seen)
        finally:
            connection.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], prog="python -m benchmarks.serving"
    )
    parser.add_argument("--url", required=True, help="http://127.0.0.1:8000")
    parser.add_argument(
        "--model", required=True, help="the name that the server knows the model by"
    )
    parser.add_argument(
        "--vocab-size", type=int, required=True, help="token ids are made up below it"
    )
    parser.add_argument("--clients", type=int, default=32, help="(default: 32)")
    parser.add_argument("--first-requests", type=int, help="take only so many of the 64 requests")
    parser.add_argument("--repetitions", type=int, default=3, help="(default: 3)")
    parser.add_argument("--json", type=Path, help="write all repetitions to a file")
    args = parser.parse_args(argv)
    target = Target(args.url, args.model)
    run_clients(
        target, random_workload(4, (40, 48), (8, 8), name="warm-up").requests(0, args.vocab_size), 4
    )
    results = []
    for number in range(args.repetitions):
        requests = WORKLOADS["W6"].requests(number, args.vocab_size)[: args.first_requests]
        results.append(run_clients(target, requests, args.clients))
        print(render(results[-1]))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def run_clients(
    target: Target, requests: Sequence[BenchRequest], num_clients: int
) -> dict[str, Any]:
    """All requests, dealt out to the clients in turn; times in seconds."""

    def one_client(mine: Sequence[BenchRequest]) -> list[tuple[float, list[float]]]:
        return [(time.perf_counter(), target.post(request)) for request in mine]

    started = time.perf_counter()
    with ThreadPoolExecutor(num_clients) as pool:
        shares = [requests[client::num_clients] for client in range(num_clients)]
        answers = [each for client in pool.map(one_client, shares) for each in client]
    wall_s = time.perf_counter() - started
    num_tokens = sum(each.num_output for each in requests)
    return {
        "num_requests": len(requests),
        "num_clients": num_clients,
        "wall_s": wall_s,
        # fewer than tokens where a server sends several at once
        "num_events": sum(len(times) for _, times in answers),
        "output_tokens_per_s": num_tokens / wall_s,
        "ttft_s": spread([times[0] - asked for asked, times in answers]),
        "itl_s": spread([b - a for _, times in answers for a, b in itertools.pairwise(times)]),
    }


def render(result: dict[str, Any]) -> str:
    """A result in one line."""
    ttft, itl = result["ttft_s"], result["itl_s"]
    return (
        f"{result['output_tokens_per_s']:,.1f} output tokens/s; first token "
        f"{ttft['p50']:.2f} s median, {ttft['p99']:.2f} p99; "
        f"between tokens {1e3 * itl['p50']:.0f} ms median, {1e3 * itl['p99']:.0f} p99; "
        f"{result['wall_s']:.1f} s in all"
    )


def _event_times(response: http.client.HTTPResponse, seen: Callable[[int], None]) -> list[float]:
    times = []
    for line in response:
        if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
            now, event = time.perf_counter(), json.loads(line[5:])
            if "error" in event:
                raise RuntimeError(f"the server reported: {event['error']}")
            if event.get("choices"):
                times.append(now)
                seen(len(times))
    if not times:
        raise RuntimeError("the server sent no tokens")
    return times


if __name__ == "__main__":
    sys.exit(main())

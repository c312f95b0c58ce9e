"""llama.cpp: its server, over HTTP on this machine, as that is where it batches. The model is a
GGUF file.

Forms name the file (`bf16`, `q8_0`, `q4_0`). `--peer llamacpp=/path/to/llama-server`. Extra:
`slots` (64 sequences at once by default), `context` (KV cells of all slots together).
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.peers.runner import Options, serve
from benchmarks.servers import free_port
from quire.bench.workload import BenchRequest

_START_S = 120.0
"""A server that is not ready by then has failed."""
_ANSWER_S = 1800.0


class LlamaCppPeer:
    """See `PeerEngine`."""

    def __init__(self, options: Options) -> None:
        slots, context = options.extra.get("slots", "64"), options.extra.get("context", "40960")
        self.settings: dict[str, Any] = {
            "slots": int(slots),
            "context": int(context),
            "batch": 2048,
            "micro_batch": 512,
        }
        self.version = _version(options.program)
        self._port = free_port()
        threads = str(options.num_threads)
        command = [
            options.program,
            "-m",
            str(options.model),
            "--host",
            "127.0.0.1",
            "--port",
            str(self._port),
        ]
        command += [
            "-t",
            threads,
            "-tb",
            threads,
            "-np",
            slots,
            "-c",
            context,
            "-b",
            "2048",
            "-ub",
            "512",
        ]
        command += ["-fa", "on", "-cb", "--kv-unified", "--offline", "--no-webui", "-lv", "1"]
        self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_S
        while not self._is_ready():
            if self._server.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"llama-server did not come up: {' '.join(command)}")
            time.sleep(0.05)

    def run(self, requests: Sequence[BenchRequest]) -> list[int]:
        """See `PeerEngine`. A connection each, all at once."""
        with ThreadPoolExecutor(len(requests)) as pool:
            answers = list(pool.map(self._complete, requests))
        return [count for counts in answers for count in counts]

    def stream(self, request: BenchRequest) -> list[float]:
        """See `PeerEngine`. An event tells how many tokens there are so far: one more than before,
        or several where the text of the others ended within a character."""
        connection, response = self._post({**_body(request), "stream": True})
        token_s: list[float] = []
        for line in response:
            if line.startswith(b"data:"):
                num_new = json.loads(line[5:])["tokens_predicted"] - len(token_s)
                token_s += [time.perf_counter()] * num_new
        connection.close()
        return token_s

    def close(self) -> None:
        """End the server."""
        self._server.terminate()
        try:
            self._server.wait(20)
        except subprocess.TimeoutExpired:
            self._server.kill()

    def _complete(self, request: BenchRequest) -> list[int]:
        connection, response = self._post(_body(request))
        answer = json.loads(response.read())
        connection.close()
        return [
            each["tokens_predicted"] for each in (answer if isinstance(answer, list) else [answer])
        ]

    def _post(
        self, body: dict[str, Any]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_ANSWER_S)
        connection.request(
            "POST", "/completion", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"llama-server answered {response.status}: {response.read(500)!r}")
        return connection, response

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


def _body(request: BenchRequest) -> dict[str, Any]:
    """Greedy through a sampler that takes the first:
    the default chain would sort the vocabulary for nothing."""
    body: dict[str, Any] = {
        "prompt": request.token_ids,
        "n_predict": request.num_output,
        "ignore_eos": True,
        "cache_prompt": True,
    }
    if request.temperature == 0:
        body |= {"samplers": ["top_k"], "top_k": 1, "temperature": 0}
    else:
        body |= {"samplers": ["temperature"], "temperature": request.temperature}
    return body | ({"n_cmpl": request.num_sequences} if request.num_sequences > 1 else {})


def _version(program: str) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    found = re.search(r"version: (\S+ \(.*?\))", done.stdout + done.stderr)
    return found.group(1) if found else "unknown"


if __name__ == "__main__":
    serve(LlamaCppPeer)

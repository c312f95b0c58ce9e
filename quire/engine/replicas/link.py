"""A `Link` to several engines: which of them a request goes to, and how they are doing together.

Owns the account of what each replica has in flight, and the guess of what its prefix cache holds;
the policy is the router's (`quire.routing`). A replica that is lost is replaced by its own
supervisor, and its requests go on there: they never move to another. Belongs to one thread, that of
the event loop or of the engine that it serves, in which outputs arrive, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quire.core.content import content_ids, short_ids
from quire.core.request_spec import RequestSpec
from quire.engine.assembly.preparation import PreparedModel
from quire.engine.front.client import Link, Question, Seen
from quire.engine.front.outputs import RequestOutput
from quire.engine.front.requests import PreparedRequest
from quire.engine.front.status import EngineStatus
from quire.engine.front.streams import Caller, OutputSink
from quire.engine.process.link import supervised
from quire.engine.process.watch import WatchConfig
from quire.engine.replicas.status import joined
from quire.routing.ask import Ask, digests
from quire.routing.choices import make_balancer
from quire.routing.load import LoadShare, ReplicaLoad

POLICY = "kv-aware"
CHUNK_TOKENS = 64
"""Of the pieces in which prompts are compared: four blocks of the default size."""
_TOKEN_BYTES = 8
MAX_OUTPUT_TOKENS = 4096
"""Few answers are as long as they may be."""


class _Replica:
    """One engine, and what it has in flight."""

    def __init__(self, link: Link, load: ReplicaLoad) -> None:
        self.link = link
        self.load = load
        self.num_prompt_tokens = 0
        self.num_restarts = 0
        """As last seen."""

    def status(self) -> EngineStatus:
        return self.link.status(self.load.num_requests, self.num_prompt_tokens)


class Replicas:
    """The link, over one link for each engine. They must be alike."""

    def __init__(self, links: Sequence[Link], num_kv_slots: int) -> None:
        """`num_kv_slots` are the tokens that the KV cache of one engine holds."""
        assert links, "no replica"
        self._balancer = make_balancer(POLICY, max_chunks=max(1, num_kv_slots // CHUNK_TOKENS))
        self._replicas = [
            _Replica(link, self._balancer.add(str(number))) for number, link in enumerate(links)
        ]
        self._by_name = {each.load.name: each for each in self._replicas}
        self._flights: dict[str, _Flight] = {}

    @property
    def num_replicas(self) -> int:
        """Those that there are, in whatever state."""
        return len(self._replicas)

    @property
    def show(self) -> Callable[[Seen], None]:
        """See `Link.show`."""
        return self._replicas[0].link.show

    @show.setter
    def show(self, show: Callable[[Seen], None]) -> None:
        for each in self._replicas:
            each.link.show = show

    def start(self) -> None:
        """See `Link.start`."""
        for each in self._replicas:
            each.link.start()

    def add(self, prepared: PreparedRequest, stream: OutputSink) -> None:
        """See `Link.add`."""
        usable = self._usable()
        share, _ = self._balancer.send(ask_of(prepared.spec), [each.load for each in usable])
        flight = _Flight(self, self._by_name[share.load.name], share, prepared.spec, stream)
        self._flights[prepared.spec.request_id] = flight
        try:
            flight.replica.link.add(prepared, flight)
        except BaseException:
            flight.end()
            raise

    def abort(self, request_id: str) -> None:
        """See `Link.abort`."""
        flight = self._flights.get(request_id)
        if flight is not None:
            flight.replica.link.abort(request_id)

    def ask(self, question: Question, replica: int = 0) -> None:
        """See `Link.ask`."""
        self._replicas[replica].link.ask(question, 0)

    def end_all(self, message: str) -> None:
        """See `Link.end_all`."""
        for each in self._replicas:
            each.link.end_all(message)

    def close(self, timeout_s: float = 15.0) -> None:
        """See `Link.close`."""
        with ThreadPoolExecutor(len(self._replicas)) as threads:
            for done in [threads.submit(each.link.close, timeout_s) for each in self._replicas]:
                done.result()

    def status(self, num_requests: int, num_prompt_tokens: int) -> EngineStatus:
        """See `Link.status`."""
        return joined([each.status() for each in self._replicas], num_requests, num_prompt_tokens)

    def forget(self, request_id: str) -> None:
        """Note that a request has ended."""
        self._flights.pop(request_id, None)

    def _usable(self) -> list[_Replica]:
        """Return the replicas that a request may go to: those that are ready, else those that will
        be. What a new engine's cache was thought to hold is forgotten."""
        states: dict[str, list[_Replica]] = {}
        for each in self._replicas:
            status = each.status()
            states.setdefault(status.state, []).append(each)
            if status.num_restarts != each.num_restarts:
                each.num_restarts = status.num_restarts
                self._balancer.forget(each.load.name)
        coming = [each for each in self._replicas if each not in states.get("failed", ())]
        return states.get("ready") or coming or self._replicas


class _Flight:
    """One request on its way: a sink before the request's own. Implements `OutputSink`."""

    def __init__(
        self,
        owner: Replicas,
        replica: _Replica,
        share: LoadShare,
        spec: RequestSpec,
        stream: OutputSink,
    ) -> None:
        self.replica = replica
        self._owner, self._share, self._stream = owner, share, stream
        self._request_id, self._num_prompt_tokens = spec.request_id, len(spec.prompt_token_ids)
        replica.num_prompt_tokens += self._num_prompt_tokens

    @property
    def loop(self) -> Caller:
        """See `OutputSink`."""
        return self._stream.loop

    def put(self, output: RequestOutput) -> None:
        """See `OutputSink`."""
        self._share.begin_answer()
        if output.finished:
            self.end()
        self._stream.put(output)

    def fail(self, error: BaseException) -> None:
        """See `OutputSink`."""
        self.end()
        self._stream.fail(error)

    def end(self) -> None:
        """Take the request out of its replica's load."""
        self._share.end()
        self.replica.num_prompt_tokens -= self._num_prompt_tokens
        self._num_prompt_tokens = 0
        self._owner.forget(self._request_id)


def ask_of(spec: RequestSpec) -> Ask:
    """Return what the policy is to know of a request."""
    ids = content_ids(spec.prompt_token_ids, spec.contents)
    shown = spec.prompt_token_ids if ids is None else short_ids(ids)
    chunks = digests(
        repr(spec.namespace).encode("utf-8", "backslashreplace"),
        array("q", shown).tobytes(),
        CHUNK_TOKENS * _TOKEN_BYTES,
    )
    num_output_tokens = min(spec.max_tokens, MAX_OUTPUT_TOKENS)
    return Ask(None, chunks, CHUNK_TOKENS, len(shown), num_output_tokens)


def link_to(
    prepared: PreparedModel, watch: WatchConfig | None = None, **launch_options: Any
) -> Link:
    """Return a link to the engine processes of a model, as many as its config has replicas."""
    plan = prepared.planned.plan
    links = [
        supervised(prepared, watch, **launch_options) for _ in range(plan.config.data_parallel_size)
    ]
    return links[0] if len(links) == 1 else Replicas(links, plan.limits.num_slots)

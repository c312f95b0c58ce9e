"""Whether a request may come in now, and if not, when to try again.

Owns the bounds of the queue (in requests and in prompt tokens), and each tenant's concurrency and
rates. Decides at once and in the event loop's thread; nothing here waits. What waits is not counted
but inferred: the engine serves in order of arrival and says how many sequences it computes, so the
requests that came in last, beyond that number, are those that wait. Every refusal says how long the
wait would be, computed from how fast requests have been finishing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quire.config.api import ApiConfig
from quire.server.http.errors import MAX_RETRY_AFTER_S, ApiError, overloaded, useless_to_retry
from quire.server.quota.allowance import Allowance
from quire.server.quota.tenants import Tenant

_RATE_WINDOW_S = 60.0
_RATE_SAMPLES = 512
_UNKNOWN_WAIT_S = 5.0
"""What to say before anything has finished, when there is nothing to compute from."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One admitted request."""

    tenant: Tenant
    num_sequences: int
    num_prompt_tokens: int
    admitted_s: float
    num_listed: int = 0
    """Token ids that it lists, which take memory as those of its prompts do."""
    has_started: bool = False
    """Whether an output of it has been seen."""


@dataclass(slots=True)
class TenantUse:
    """What a tenant has used and holds now, and what it may use."""

    tokens: Allowance
    requests: Allowance
    num_requests: int = 0
    num_refused: int = 0
    num_in_flight: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_cache_write_tokens: int = 0
    num_output_tokens: int = 0
    durations_s: deque[float] = field(default_factory=lambda: deque(maxlen=64))


class AdmissionControl:
    """The count of what is in flight, and the decision on what may join it."""

    def __init__(
        self,
        config: ApiConfig,
        tenants: Iterable[Tenant],
        num_running: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._num_running = num_running
        self._clock = clock
        self._tickets: dict[Ticket, None] = {}
        self._num_sequences = 0
        self._num_changes = 0
        """Of what `queue` depends on, beside what the engine says."""
        self._counted: tuple[tuple[int, int], tuple[int, int]] | None = None
        """What `queue` said last, and when that holds:
        in a storm of refusals nothing changes between most of them."""
        self._finished_s: deque[float] = deque(maxlen=_RATE_SAMPLES)
        self.tenants: dict[str, Tenant] = {}
        self.uses: dict[str, TenantUse] = {}
        self.change(tenants)
        self.num_rejections = {"queue_full": 0, "tenant_concurrency": 0, "tenant_rate": 0}

    def change(self, tenants: Iterable[Tenant]) -> None:
        """Serve these tenants from now on. What others have used stays known, for their requests
        may be in flight."""
        now = self._clock()
        self.tenants = {tenant.name: tenant for tenant in tenants}
        for name, tenant in self.tenants.items():
            use = self.uses.get(name)
            if use is None:
                use = self.uses[name] = TenantUse(Allowance(None, now), Allowance(None, now))
            if use.tokens.per_minute != tenant.tokens_per_minute:
                use.tokens = Allowance(tenant.tokens_per_minute, now)
            if use.requests.per_minute != tenant.requests_per_minute:
                use.requests = Allowance(tenant.requests_per_minute, now)

    @property
    def num_in_flight(self) -> int:
        """Requests that have been admitted and have not ended."""
        return len(self._tickets)

    def admit(
        self, tenant: Tenant, *, num_sequences: int, num_prompt_tokens: int, num_listed: int = 0
    ) -> Ticket:
        """Take a request in. Raises ApiError 429 with `Retry-After`,
        and changes nothing but a count, if it may not."""
        use = self.uses[tenant.name]
        self._check(tenant, num_prompt_tokens, num_listed)
        ticket = Ticket(tenant, num_sequences, num_prompt_tokens, self._clock(), num_listed)
        self._tickets[ticket] = None
        self._num_changes += 1
        self._num_sequences += num_sequences
        use.num_requests += 1
        use.num_in_flight += 1
        use.num_prompt_tokens += num_prompt_tokens
        use.tokens.use(num_prompt_tokens)
        use.requests.use(1)
        return ticket

    def check_room(self, tenant: Tenant) -> None:
        """Raise what `admit` would raise of any request, however small."""
        if len(self._tickets) >= self._config.max_queued_requests or self._has_limits(tenant):
            self._check(tenant, 0)

    def has_room(self, tenant: Tenant) -> bool:
        """Return whether a small request of `tenant` would be taken now, for who can wait:
        nothing is refused or counted."""
        try:
            self._check_tenant(tenant, self.uses[tenant.name], 0)
            self._check_queue(0)
        except ApiError:
            return False
        return True

    def _has_limits(self, tenant: Tenant) -> bool:
        return tenant.max_concurrency is not None or tenant.has_rates

    def rate_headers(self, tenant: Tenant) -> dict[str, str]:
        """Return what is left of a tenant's rates, in OpenAI's headers; none where it has none."""
        use, now = self.uses.get(tenant.name), self._clock()
        return (
            {}
            if use is None
            else {**use.requests.headers("requests", now), **use.tokens.headers("tokens", now)}
        )

    def _check(self, tenant: Tenant, num_prompt_tokens: int, num_listed: int = 0) -> None:
        use = self.uses[tenant.name]
        try:
            self._check_tenant(tenant, use, num_prompt_tokens)
            self._check_queue(num_prompt_tokens + num_listed)
        except ApiError as error:
            use.num_refused += 1
            self.num_rejections[error.code or "queue_full"] += 1
            raise

    def note_start(self, ticket: Ticket) -> None:
        """Note the request's first output. To be called once."""
        ticket.has_started = True
        self._num_changes += 1

    def release(self, ticket: Ticket) -> None:
        """Release a request that has ended, however it did. Idempotent."""
        if ticket not in self._tickets:
            return
        del self._tickets[ticket]
        self._num_changes += 1
        now = self._clock()
        self._num_sequences -= ticket.num_sequences
        self._finished_s.append(now)
        use = self.uses[ticket.tenant.name]
        use.num_in_flight -= 1
        use.durations_s.append(now - ticket.admitted_s)

    def charge(
        self,
        tenant: Tenant,
        *,
        num_output_tokens: int,
        num_cached_tokens: int = 0,
        num_cache_write_tokens: int = 0,
    ) -> None:
        """Book what an answer cost. Cached prompt tokens are given back to the tenant's rate:
        they were not computed."""
        use = self.uses[tenant.name]
        use.num_output_tokens += num_output_tokens
        use.num_cached_tokens += num_cached_tokens
        use.num_cache_write_tokens += num_cache_write_tokens
        use.tokens.use(num_output_tokens - num_cached_tokens)

    def is_queued(self, ticket: Ticket) -> bool:
        """Return whether a request still waits for its first step, as far as can be told from
        outside."""
        return not ticket.has_started and any(
            each is ticket for each in self._queued(self._num_running())
        )

    def queue(self) -> tuple[int, int]:
        """(requests, tokens) that wait: those of prompts, and those that are listed."""
        state = (self._num_changes, self._num_running())
        if self._counted is None or self._counted[0] != state:
            queued = self._queued(state[1])
            self._counted = (
                state,
                (
                    len(queued),
                    sum(ticket.num_prompt_tokens + ticket.num_listed for ticket in queued),
                ),
            )
        return self._counted[1]

    def _queued(self, num_running: int) -> list[Ticket]:
        """Return the latest arrivals beyond the sequences that the engine computes, newest
        first."""
        excess = self._num_sequences - num_running
        queued: list[Ticket] = []
        for ticket in reversed(self._tickets):
            if excess <= 0 or ticket.has_started:
                break
            queued.append(ticket)
            excess -= ticket.num_sequences
        return queued

    def _check_queue(self, num_held: int) -> None:
        num_requests, num_tokens = self.queue()
        config = self._config
        if num_requests >= config.max_queued_requests:
            message = (
                f"{num_requests} requests are waiting, and no more than "
                f"{config.max_queued_requests} may"
            )
        elif num_requests and num_tokens + num_held > config.max_queued_tokens:
            message = (
                f"{num_tokens} tokens of prompts and lists are waiting, and with this "
                f"request's {num_held} they would be more "
                f"than {config.max_queued_tokens}"
            )
        else:
            return
        raise overloaded(
            f"{message}; try again later",
            code="queue_full",
            retry_after_s=self._queue_wait_s(num_requests),
        )

    def _queue_wait_s(self, num_requests: int) -> float:
        """Return when half of the queue will have been served, at the rate of late:
        others come back then, too."""
        now = self._clock()
        while self._finished_s and now - self._finished_s[0] > _RATE_WINDOW_S:
            self._finished_s.popleft()
        if len(self._finished_s) < 2:
            return _UNKNOWN_WAIT_S
        rate = len(self._finished_s) / max(now - self._finished_s[0], 1e-3)
        return num_requests / 2 / rate

    def _check_tenant(self, tenant: Tenant, use: TenantUse, num_prompt_tokens: int) -> None:
        limit = tenant.max_concurrency
        if limit is not None and use.num_in_flight >= limit:
            mean_s = (
                sum(use.durations_s) / len(use.durations_s) if use.durations_s else _UNKNOWN_WAIT_S
            )
            raise overloaded(
                f"{use.num_in_flight} requests of this key are in flight, and no more than "
                f"{limit} may be",
                code="tenant_concurrency",
                retry_after_s=mean_s / limit,
            )
        now = self._clock()
        wait_s = use.requests.wait_s(1, now)
        if wait_s > 0:
            message = (
                f"this key may ask {tenant.requests_per_minute} times a minute, and has done so"
            )
            raise overloaded(message, code="tenant_rate", retry_after_s=wait_s)
        rate = tenant.tokens_per_minute
        if rate is not None and num_prompt_tokens > rate:
            message = (
                f"the prompt has {num_prompt_tokens} tokens, more than the {rate} that this key "
                "may use in a minute"
            )
            raise useless_to_retry(
                overloaded(message, code="tenant_rate", retry_after_s=MAX_RETRY_AFTER_S)
            )
        wait_s = use.tokens.wait_s(num_prompt_tokens, now)
        if wait_s > 0:
            raise overloaded(
                f"this key may use {rate} tokens a minute, and "
                f"{max(0, int(use.tokens.left(now)))} of them are left",
                code="tenant_rate",
                retry_after_s=wait_s,
            )

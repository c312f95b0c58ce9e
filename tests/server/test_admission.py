"""Queue bounds, quotas and deadlines: the decisions with a clock of the test's own,
and what clients see of them."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed

import httpx
import pytest
from fake_client import FakeClient, Script
from hypothesis import given
from hypothesis import strategies as st
from served import until
from servers import serve
from timing import timed

from quire.config.api import ApiConfig
from quire.server.http.errors import ApiError
from quire.server.quota.admission import AdmissionControl, Ticket
from quire.server.quota.tenants import EVERYBODY, Tenant, key_ring

pytestmark = timed

CHAT = {"messages": [{"role": "user", "content": "x"}]}


class Clock:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(
    config: ApiConfig, tenant: Tenant = EVERYBODY, num_running: int = 0
) -> tuple[AdmissionControl, Clock]:
    clock = Clock()
    return AdmissionControl(config, [tenant], lambda: num_running, clock), clock


def admit(admission: AdmissionControl, num_tokens: int = 1, tenant: Tenant = EVERYBODY) -> Ticket:
    return admission.admit(tenant, num_sequences=1, num_prompt_tokens=num_tokens)


def retry_after(error: ApiError) -> int:
    return int(error.headers["retry-after"])


@given(
    st.lists(
        st.tuples(st.sampled_from(["admit", "start", "release", "run"]), st.integers(0, 7)),
        max_size=40,
    )
)
def test_what_the_queue_was_last_found_to_be_is_never_said_once_it_has_changed(
    moves: list[tuple[str, int]],
) -> None:
    num_running = 0
    admission = AdmissionControl(ApiConfig(), [EVERYBODY], lambda: num_running)
    tickets: list[Ticket] = []
    for move, number in moves:
        if move == "admit":
            tickets.append(admit(admission, number))
        elif move == "run":
            num_running = number
        elif tickets and move == "start":
            admission.note_start(tickets[number % len(tickets)])
        elif tickets:
            admission.release(tickets.pop(number % len(tickets)))
        queued = [ticket for ticket in tickets if admission.is_queued(ticket)]
        assert admission.queue() == (
            len(queued),
            sum(ticket.num_prompt_tokens for ticket in queued),
        )


def test_the_queue_is_bounded_in_requests_beyond_those_that_run() -> None:
    admission, _ = make(ApiConfig(max_queued_requests=3), num_running=2)
    tickets = [admit(admission) for _ in range(5)]
    assert admission.queue() == (3, 3)
    assert [admission.is_queued(ticket) for ticket in tickets] == [False, False, True, True, True]
    with pytest.raises(ApiError) as caught:
        admit(admission)
    assert (caught.value.status, caught.value.code) == (429, "queue_full")
    admission.release(tickets[0])
    admission.release(tickets[0])
    admit(admission)
    assert admission.num_rejections["queue_full"] == 1


def test_the_queue_is_bounded_in_prompt_tokens_but_never_refuses_into_an_empty_one() -> None:
    admission, _ = make(ApiConfig(max_queued_tokens=100))
    admit(admission, 500)
    with pytest.raises(ApiError):
        admit(admission, 1)


def test_the_wait_is_computed_from_what_finished_lately() -> None:
    admission, clock = make(ApiConfig(max_queued_requests=10))
    for _ in range(20):
        clock.now += 0.5
        admission.release(admit(admission))
    for _ in range(10):
        admit(admission)
    with pytest.raises(ApiError) as caught:
        admit(admission)
    assert retry_after(caught.value) == 3  # half of ten, at two a second, rounded up
    clock.now += 3600
    with pytest.raises(ApiError) as caught:
        admit(admission)
    assert 1 <= retry_after(caught.value) <= 120


def test_a_tenants_concurrency() -> None:
    tenant = Tenant("a", max_concurrency=2)
    admission, clock = make(ApiConfig(), tenant)
    first, _ = admit(admission, tenant=tenant), admit(admission, tenant=tenant)
    with pytest.raises(ApiError) as caught:
        admit(admission, tenant=tenant)
    assert caught.value.code == "tenant_concurrency"
    clock.now += 40
    admission.release(first)
    admit(admission, tenant=tenant)
    with pytest.raises(ApiError) as caught:
        admit(admission, tenant=tenant)
    assert retry_after(caught.value) == 20


def test_a_tenants_token_rate_counts_prompts_and_answers_but_not_what_was_cached() -> None:
    tenant = Tenant("a", tokens_per_minute=600)
    admission, clock = make(ApiConfig(), tenant)
    admit(admission, 500, tenant)
    admission.charge(tenant, num_output_tokens=150, num_cached_tokens=50)
    with pytest.raises(ApiError) as caught:
        admit(admission, 100, tenant)
    assert (caught.value.code, retry_after(caught.value)) == ("tenant_rate", 10)
    clock.now += 10
    admit(admission, 100, tenant)
    with pytest.raises(ApiError) as caught:
        admit(admission, 601, tenant)
    assert caught.value.headers["x-should-retry"] == "false"


def test_a_tenants_requests_in_a_minute() -> None:
    tenant = Tenant("a", requests_per_minute=2)
    admission, clock = make(ApiConfig(), tenant)
    for _ in range(2):
        admission.release(admit(admission, tenant=tenant))
    with pytest.raises(ApiError) as caught:
        admission.check_room(tenant)
    assert (caught.value.code, retry_after(caught.value)) == ("tenant_rate", 30)
    clock.now += 30
    admit(admission, tenant=tenant)


def test_what_is_left_is_said_in_openais_headers() -> None:
    keys = key_ring(
        [
            (Tenant("a", tokens_per_minute=600, requests_per_minute=2), ["key-of-a"]),
            (Tenant("b"), ["key-of-b"]),
        ]
    )
    with serve(FakeClient(), keys=keys) as server:

        def post(key: str = "key-of-a", **fields: object) -> dict[str, str]:
            answer = httpx.post(
                f"{server.v1}/chat/completions", json={**CHAT, **fields}, headers={"x-api-key": key}
            )
            return {
                name: value
                for name, value in answer.headers.items()
                if name.startswith("x-ratelimit-")
            }

        first = post()
        assert sorted(first) == sorted(
            f"x-ratelimit-{each}-{what}"
            for each in ("limit", "remaining", "reset")
            for what in ("requests", "tokens")
        )
        assert (first["x-ratelimit-limit-requests"], first["x-ratelimit-limit-tokens"]) == (
            "2",
            "600",
        )
        assert (
            first["x-ratelimit-remaining-requests"] == "1"
            and 500 < int(first["x-ratelimit-remaining-tokens"]) < 600
        )
        assert 20 < float(first["x-ratelimit-reset-requests"].removesuffix("s")) <= 30
        assert post(stream=True)["x-ratelimit-remaining-requests"] == "0"
        assert post()["x-ratelimit-remaining-requests"] == "0"
        assert post("key-of-b") == {}


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 50)), max_size=60), st.integers(0, 5))
def test_the_bounds_hold_whatever_comes_and_goes(
    steps: list[tuple[bool, int]], num_running: int
) -> None:
    admission, _ = make(
        ApiConfig(max_queued_requests=4, max_queued_tokens=90), num_running=num_running
    )
    tickets: list[Ticket] = []
    for is_arrival, size in steps:
        if is_arrival:
            try:
                tickets.append(admit(admission, size))
            except ApiError as error:
                assert 1 <= retry_after(error) <= 120
        elif tickets:
            admission.release(tickets.pop(size % len(tickets)))
        num_requests, num_tokens = admission.queue()
        assert num_requests <= 5 and num_tokens <= 90 + 50 * num_running + 50
        assert admission.num_in_flight == len(tickets)


def test_overload_is_refused_at_once_and_recovers() -> None:
    gate = threading.Event()
    client = FakeClient(Script(pieces=("x",), gate=gate))
    config = ApiConfig(max_queued_requests=5)
    with (
        serve(client, config) as server,
        httpx.Client(base_url=server.v1) as http,
        ThreadPoolExecutor(20) as pool,
    ):
        asked = [pool.submit(http.post, "/chat/completions", json=CHAT) for _ in range(20)]
        first = [
            each.result().status_code
            for each in itertools.islice(as_completed(asked, timeout=60), 15)
        ]
        gate.set()  # so the others have waited for longer than it takes to be refused
        answers = [each.result() for each in asked]
        statuses = [answer.status_code for answer in answers]
        assert first == [429] * 15 and statuses.count(200) == 5 and statuses.count(429) == 15
        refused = [answer for answer in answers if answer.status_code == 429]
        assert all(1 <= int(answer.headers["retry-after"]) <= 120 for answer in refused)
        assert http.post("/chat/completions", json=CHAT).status_code == 200
        assert "queue_full" in http.get(f"{server.url}/metrics").text


@pytest.mark.parametrize(
    ("header", "config", "status", "code"),
    [
        ({"x-queue-timeout-s": "0.2"}, {}, 429, "queue_timeout"),
        ({"x-request-timeout-s": "0.2"}, {}, 504, "deadline_exceeded"),
        ({"x-request-timeout-s": "900"}, {"request_timeout_s": 0.2}, 504, "deadline_exceeded"),
        ({"x-request-timeout-s": "soon"}, {}, 400, "invalid_header"),
        ({"x-queue-timeout-s": "0"}, {}, 400, "invalid_header"),
    ],
)
def test_deadlines_which_a_client_may_only_bring_forward(
    header: dict[str, str], config: dict[str, float], status: int, code: str
) -> None:
    client = FakeClient(Script(begins=False))
    with serve(client, ApiConfig(**config)) as server:  # type: ignore[arg-type]
        answer = httpx.post(f"{server.v1}/chat/completions", json=CHAT, headers=header, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert client.streams == []


def test_tenants_have_quotas_salts_and_books_of_their_own() -> None:
    small = Tenant("small", max_concurrency=1, weight=2.0)
    keys = key_ring([(small, ["key-of-small"]), (Tenant("other"), ["key-of-other"])])
    gate = threading.Event()
    client = FakeClient(Script(pieces=("x",), gate=gate))
    with serve(client, keys=keys) as server:

        def post(key: str, **fields: str) -> httpx.Response:
            return httpx.post(
                f"{server.v1}/chat/completions", json={**CHAT, **fields}, headers={"x-api-key": key}
            )

        thread = threading.Thread(target=lambda: post("key-of-small"))
        thread.start()
        until(lambda: client.requests)
        assert post("key-of-small").json()["error"]["code"] == "tenant_concurrency"
        gate.set()
        assert post("key-of-other").status_code == 200
        thread.join()
        assert post("key-of-other", cache_salt="mine").status_code == 200
        salts = [request.spec.namespace for request in client.requests]
        assert () not in salts and len(set(salts)) == 3
        assert {(request.spec.tenant, request.spec.weight) for request in client.requests} == {
            ("small", 2.0),
            ("other", 1.0),
        }
        usage = httpx.get(f"{server.v1}/usage", headers={"x-api-key": "key-of-small"}).json()
        assert (
            usage["tenant"],
            usage["requests"],
            usage["refused_requests"],
            usage["completion_tokens"],
        ) == ("small", 1, 1, 1)
        assert usage["limits"] == {
            "weight": 2.0,
            "tokens_per_minute": None,
            "requests_per_minute": None,
            "max_concurrency": 1,
        }
        metrics = httpx.get(f"{server.url}/metrics", headers={"x-api-key": "key-of-small"}).text
        assert 'quire:tenant_requests_total{tenant="other"} 2.0' in metrics

"""An engine as its process serves it, without a process: what it tells, and what it keeps."""

from __future__ import annotations

import socket

import msgspec
import pytest
from cycles import no_cycles_of

from quire.config.limits import SchedulerLimits
from quire.core.images import Image, PlacedImage, contents_of
from quire.core.plan import RowSampling
from quire.core.request import Request, Sequence
from quire.core.request_spec import RequestSpec
from quire.core.scheduler.scheduler import Progress
from quire.engine.loop.step_loop import StepLoop
from quire.engine.process.channel import Channel
from quire.engine.process.messages import (
    Abort,
    AddRequest,
    Done,
    Down,
    Finish,
    Pause,
    UpdateWeights,
)
from quire.engine.process.service import Service
from quire.engine.process.shared_lists import without_lists
from quire.engine.process.updates import WeightUpdate
from quire.executor.null import NullExecutor


@pytest.fixture
def service() -> Service:
    limits = SchedulerLimits(num_blocks=64, max_num_seqs=8, max_model_len=256)
    return Service(StepLoop(limits, NullExecutor(8, 64, 16, vocab_size=50), lambda: 0.0))


def _add(service: Service, number: int, *, max_tokens: int = 5, num_sequences: int = 1) -> None:
    spec = RequestSpec(
        request_id=f"r{number}",
        prompt_token_ids=(1, 2, 3, number),
        sampling=RowSampling(seed=number),
        num_sequences=num_sequences,
        max_tokens=max_tokens,
    )
    assert service.handle(AddRequest(number, spec)) is None


def _run(service: Service) -> None:
    for _ in range(100):
        if not service.has_work:
            return
        service.step()
    raise AssertionError("still busy after 100 steps")


def test_a_request_that_is_over_is_gone_at_once_however_it_ended(service: Service) -> None:
    _add(service, 0)
    _run(service)
    with no_cycles_of(Request, Sequence):
        for number in range(1, 5):
            _add(service, number, max_tokens=2 + 20 * number, num_sequences=number)
        for _ in range(4):
            service.step()
        service.handle(Abort(2))
        service.handle(Finish(3, 0))
        service.handle(Finish(4, 0))
        service.handle(Finish(4, 3))
        _run(service)
        service.loop.record_steps()  # what the recorder keeps to be looked at is dropped with it
    assert not service._requests and not service._numbers


def test_a_sequence_that_met_its_stop_string_ends_and_its_siblings_go_on(service: Service) -> None:
    _add(service, 1, max_tokens=10, num_sequences=2)
    for _ in range(3):
        service.step()
    service.handle(Finish(1, 1))
    deltas = [delta for _ in range(10) for delta in getattr(service.step(), "deltas", ())]
    assert {delta.index for delta in deltas if delta.token_ids} == {0}
    assert [(delta.index, delta.finish_reason) for delta in deltas if delta.finish_reason] == [
        (0, "length")
    ], "it was told"
    assert not service.has_work


def test_images_cross_as_they_are() -> None:
    """Pixels and digests are bytes on both sides of the wire."""
    image = Image(bytes(range(32)), bytes(range(12)), 2, 2, 3)
    placed = (PlacedImage(1, image),)
    prompt = (5, 9, 9, 9, 6)
    spec = RequestSpec(
        request_id="seen",
        prompt_token_ids=prompt,
        contents=contents_of(placed),
        sampling=RowSampling(images=placed),
    )
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(AddRequest(1, spec)), type=Down)
    assert isinstance(again, AddRequest) and again.spec == spec
    assert isinstance(again.spec.sampling.images[0].image, Image)
    assert without_lists(spec).sampling.images == placed


def test_time_in_which_the_process_was_stopped_is_no_part_of_a_step(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeats are sent while a step runs, unless the whole process is stopped."""
    now_s, ages_s = 0.0, list[float | None]()
    service = Service(service.loop, lambda: now_s)
    advance = service.loop.advance

    def stopped_for_an_hour() -> list[Progress]:
        nonlocal now_s
        for passed_s in (0.25, 0.25, 3600.0, 0.25):
            now_s += passed_s
            ages_s.append(service.heartbeat().step_age_s)
        return advance()

    monkeypatch.setattr(service.loop, "advance", stopped_for_an_hour)
    _add(service, 0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        service.serve_round(Channel(ours, Down))
    assert ages_s[:2] == [0.25, 0.5]
    assert all(age_s is not None and age_s < 5.0 for age_s in ages_s)
    assert service.heartbeat().step_age_s is None


def test_a_paused_engine_takes_requests_and_makes_no_step(service: Service) -> None:
    _add(service, 1)
    service.step()
    assert service.handle(Pause(1, True)) == Done(1, ())
    _add(service, 2)
    assert not service.has_work and service.loop.has_work
    update = WeightUpdate(service.loop, UpdateWeights(2, "5", "five", waits=True))
    update._thread.join()
    refused = update.take_in()
    assert refused is not None and "paused" in str(refused.error)
    assert service.handle(Pause(3, False)) == Done(3, ())
    _run(service)
    assert not service.loop.has_work

"""Several threads on one engine: each gets its own right answers, no thread waits for itself,
and all learn of an end."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, BeamSearchParams, LLMEngine, SamplingParams, TokensPrompt
from quire.engine.front.outputs import RequestOutput
from quire.errors import EngineError, InvalidParameterError

OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "kv_cache_memory": "512KiB",
    "num_threads": 1,
    "max_num_seqs": 16,
}
DEADLINE_S = 120


@pytest.fixture(params=["off", "on"])
def llm(request: pytest.FixtureRequest, tiny_config: Path) -> Iterator[LLM]:
    with LLM(str(tiny_config), overlap=request.param, **OPTIONS) as llm:
        yield llm


def _in_threads(works: list[Callable[[], object]]) -> list[Any]:
    """What each function returns or raises, all of them run at once."""
    results: list[Any] = [None] * len(works)
    barrier = threading.Barrier(len(works))

    def run(place: int) -> None:
        barrier.wait(DEADLINE_S)
        try:
            results[place] = works[place]()
        except Exception as error:
            results[place] = error

    threads = [
        threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(works))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "a thread waits for ever"
    return results


def _prompt(number: int) -> TokensPrompt:
    return {
        "prompt_token_ids": [3 + (number * 13 + place * 7) % 240 for place in range(5 + number)]
    }


def _params(number: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=20, ignore_eos=True, temperature=float(number % 2), seed=number
    )


def _tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.slow_except("on")
def test_threads_get_the_answers_that_they_would_get_alone(llm: LLM) -> None:
    beams = BeamSearchParams(beam_width=3, max_tokens=8)

    def generate(number: int) -> Any:
        prompts = [_prompt(number), _prompt(number + 8)]
        return _tokens(
            llm.generate(prompts, [_params(number), _params(number + 1)], use_tqdm=False)
        )

    def search(number: int) -> Any:
        [output] = llm.beam_search(_prompt(number), beams)
        return [each.token_ids for each in output.sequences]

    works: list[Callable[[], object]] = [
        *(lambda number=number: generate(number) for number in range(6)),
        *(lambda number=number: search(number) for number in range(2)),
    ]
    alone = [work() for work in works]
    for _ in range(3):
        assert _in_threads(works) == alone
    assert not llm.engine.has_work


def test_requests_of_several_threads_share_their_steps(llm: LLM) -> None:
    """One thread after the other would take as many steps as all their tokens."""
    before = llm.engine.scheduler.stats.num_steps
    prompts = [_prompt(number) for number in range(8)]
    _in_threads(
        [
            lambda prompt=prompt: llm.generate(prompt, _params(0), use_tqdm=False)  # type: ignore[misc]
            for prompt in prompts
        ]
    )
    num_steps = llm.engine.scheduler.stats.num_steps - before
    assert num_steps < 8 * 20, num_steps


def test_a_refusal_in_one_thread_leaves_the_others_alone(llm: LLM) -> None:
    good, bad = _prompt(1), TokensPrompt(prompt_token_ids=[10**6])
    alone = _tokens(llm.generate(good, _params(1), use_tqdm=False))

    def fail() -> object:
        return llm.generate([_prompt(2), bad], _params(0), use_tqdm=False)

    results = _in_threads(
        [lambda: _tokens(llm.generate(good, _params(1), use_tqdm=False)), fail, fail]
    )
    assert results[0] == alone
    assert all(isinstance(each, InvalidParameterError) for each in results[1:])
    assert not llm.engine.has_work


def test_generate_inside_a_processor_is_one_clear_error_and_ends_that_request_alone(
    llm: LLM,
) -> None:
    raised: list[str] = []

    def nested(output_ids: list[int], logits: Any) -> Any:
        try:
            llm.generate(_prompt(3), _params(0), use_tqdm=False)
        except EngineError as error:
            raised.append(str(error))
            raise
        return logits

    params = SamplingParams(max_tokens=4, logits_processors=[nested])
    outputs = llm.generate([_prompt(1), _prompt(2)], [params, _params(0)], use_tqdm=False)
    assert (
        outputs[0].outputs[0].finish_reason == "error"
        and len(outputs[1].outputs[0].token_ids) == 20
    )
    [message] = set(raised)
    assert "is computing a step, which called this function" in message and "\n" not in message
    assert outputs[0].error is not None and message in outputs[0].error
    for call in (llm.llm_engine.step, llm.reset_prefix_cache, llm.close):
        assert _call_inside(llm, call)


def _call_inside(llm: LLM, call: Callable[[], object]) -> bool:
    """Whether a call from inside a step is refused."""
    refused: list[bool] = []

    def nested(output_ids: list[int], logits: Any) -> Any:
        try:
            call()
        except EngineError:
            refused.append(True)
        return logits

    llm.generate(
        _prompt(1), SamplingParams(max_tokens=1, logits_processors=[nested]), use_tqdm=False
    )
    return refused == [True]


def test_a_processor_may_use_another_engine(llm: LLM, tiny_config: Path) -> None:
    with LLM(str(tiny_config), **OPTIONS) as other:
        expected = _tokens(other.generate(_prompt(2), _params(0), use_tqdm=False))
        made: list[Any] = []

        def nested(prompt_ids: list[int], output_ids: list[int], logits: Any) -> Any:
            made.append(_tokens(other.generate(_prompt(2), _params(0), use_tqdm=False)))
            return logits

        params = SamplingParams(max_tokens=2, ignore_eos=True, logits_processors=[nested])
        [output] = llm.generate(_prompt(1), params, use_tqdm=False)
        assert output.error is None and made == [expected] * 2


def test_an_interrupt_in_one_thread_is_heard_of_by_the_others(llm: LLM) -> None:
    """The one who presses Ctrl-C leaves; the requests that were in the same steps end with
    an error, and nobody hangs."""
    engine, num_steps = llm.engine, 0
    interrupted = threading.Event()

    def advance() -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            interrupted.set()
            raise KeyboardInterrupt
        return type(engine).advance(engine)

    engine.advance = advance  # type: ignore[method-assign]

    def work(number: int) -> object:
        try:
            return llm.generate(_prompt(number), _params(number), use_tqdm=False)
        except KeyboardInterrupt:
            return "interrupted"

    results = _in_threads([lambda number=number: work(number) for number in range(4)])  # type: ignore[misc]
    assert interrupted.is_set() and results.count("interrupted") == 1
    del engine.advance
    for result in results:
        if result != "interrupted":
            [output] = result
            assert output.error in (None, "interrupted")
            assert output.error is not None or len(output.outputs[0].token_ids) == 20
    assert not engine.has_work
    assert len(_tokens(llm.generate(_prompt(1), _params(1), use_tqdm=False))[0]) == 20


def _generate_or_leave(llm: LLM, number: int) -> object:
    try:
        return llm.generate(_prompt(number), _params(number), use_tqdm=False)
    except KeyboardInterrupt:
        return "interrupted"


class _Interrupted:
    """A lock that is taken when Ctrl-C is pressed: once, before its holder can note it."""

    def __init__(self, lock: Any) -> None:
        self._lock, self.is_due = lock, True

    def acquire(self) -> None:
        self._lock.acquire()
        if self.is_due:
            self.is_due = False
            raise KeyboardInterrupt

    def release(self) -> None:
        self._lock.release()


def test_an_interrupt_just_as_the_engine_is_taken_leaves_it_to_the_others(llm: LLM) -> None:
    shared = llm.llm_engine.shared
    lock = shared._lock = _Interrupted(shared._lock)  # type: ignore[assignment]
    results = _in_threads([functools.partial(_generate_or_leave, llm, 1) for _ in range(3)])
    assert not lock.is_due and results.count("interrupted") == 1
    assert not llm.engine.has_work


@pytest.mark.parametrize("where", ["start_over", "end_all"])
def test_a_second_interrupt_leaves_no_engine_half_way_through(llm: LLM, where: str) -> None:
    """What the first one had to end is ended by whichever thread comes next."""
    engine, alone = llm.engine, _tokens(llm.generate(_prompt(1), _params(1), use_tqdm=False))
    owner: Any = engine if where == "start_over" else engine._outputs
    end = getattr(owner, where)
    num_calls = 0

    def interrupt(*_: object) -> Any:
        raise KeyboardInterrupt

    def interrupt_once(*given: object) -> Any:
        nonlocal num_calls
        num_calls += 1
        return interrupt() if num_calls == 1 else end(*given)

    setattr(owner, where, interrupt_once)
    setattr(engine.scheduler, "update", interrupt)  # noqa: B010
    results = _in_threads([functools.partial(_generate_or_leave, llm, each) for each in (1, 2, 3)])
    assert results.count("interrupted") == 1 and num_calls == 2
    for result in results:
        if result != "interrupted":
            [output] = result
            assert output.error in (None, "interrupted")
    assert not engine.has_work and not engine.is_torn
    assert _tokens(llm.generate(_prompt(1), _params(1), use_tqdm=False)) == alone


@pytest.mark.parametrize("call", ["settle", "abort", "add", "reset"])
def test_an_interrupt_between_steps_costs_the_requests_and_no_more(llm: LLM, call: str) -> None:
    engine, alone = llm.engine, _tokens(llm.generate(_prompt(1), _params(1), use_tqdm=False))

    def interrupt(*_: object) -> Any:
        raise KeyboardInterrupt

    [request_id] = llm.enqueue(_prompt(2), _params(2), use_tqdm=False)
    old = engine.scheduler
    setattr(old, {"settle": "schedule", "reset": "reset_prefix_cache"}.get(call, call), interrupt)
    calls: dict[str, Callable[[], object]] = {
        "settle": engine.advance,
        "abort": lambda: engine.abort(request_id),
        "add": lambda: llm.generate(_prompt(3), _params(3), use_tqdm=False),
        "reset": lambda: llm.reset_prefix_cache(reset_running_requests=True),
    }
    with pytest.raises(KeyboardInterrupt):
        calls[call]()
    assert engine.scheduler is not old and not engine.is_torn and not engine.has_work
    assert _tokens(llm.generate(_prompt(1), _params(1), use_tqdm=False)) == alone


def test_what_several_threads_enqueue_is_given_out_once(llm: LLM) -> None:
    """To whichever asks first, whole and in order."""

    def work() -> list[tuple[list[str], list[RequestOutput]]]:
        return [
            (
                llm.enqueue([_prompt(1), _prompt(2)], _params(number), use_tqdm=False),
                llm.wait_for_completion(use_tqdm=False),
            )
            for number in range(1, 6)
        ]

    results = _in_threads([work] * 4)
    rounds = [each for result in results for each in result]
    added = [request_id for ids, _ in rounds for request_id in ids]
    given = [output.request_id for _, outputs in rounds for output in outputs]
    assert len(set(added)) == 40 and sorted(given) == sorted(added)
    assert all(output.finished for _, outputs in rounds for output in outputs)
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_closing_in_one_thread_ends_the_others(llm: LLM) -> None:
    started = threading.Event()

    def first(output_ids: list[int], logits: Any) -> Any:
        started.set()
        return logits

    def generate() -> object:
        params = SamplingParams(max_tokens=200, ignore_eos=True, logits_processors=[first])
        return llm.generate(_prompt(1), params, use_tqdm=False)

    def close() -> None:
        assert started.wait(DEADLINE_S)
        llm.close()

    result, _ = _in_threads([generate, close])
    if isinstance(result, EngineError):  # else it was done before
        assert "closed while requests were running" in str(result)
    with pytest.raises(EngineError, match="the engine is closed"):
        llm.generate(_prompt(1), _params(0), use_tqdm=False)


def test_a_loop_of_ones_own_beside_generate_loses_nothing(llm: LLM) -> None:
    engine = llm.llm_engine
    alone = [
        _tokens(llm.generate(_prompt(number), _params(number), use_tqdm=False))[0]
        for number in (4, 5)
    ]

    def own_loop() -> list[list[int]]:
        for number in (4, 5):
            engine.add_request(f"own-{number}", _prompt(number), _params(number))
        ended: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                assert isinstance(output, RequestOutput) and output.request_id.startswith("own-")
                if output.finished:
                    ended[output.request_id] = output.outputs[0].token_ids
        return [ended["own-4"], ended["own-5"]]

    others: list[Callable[[], object]] = [
        lambda: _tokens(llm.generate(_prompt(4), _params(4), use_tqdm=False))
    ] * 2
    results = _in_threads([own_loop, *others])
    assert results == [alone, [alone[0]], [alone[0]]]


def test_an_id_in_use_is_refused_and_stays_with_its_owner(tiny_config: Path) -> None:
    with LLMEngine(str(tiny_config), **OPTIONS) as engine:
        engine.add_request("0", _prompt(1), _params(0))
        with pytest.raises(InvalidParameterError, match="0"):
            engine.add_request("0", _prompt(2), _params(0))
        outputs = [
            output
            for _ in range(40)
            if engine.has_unfinished_requests()
            for output in engine.step()
        ]
        assert [
            output.request_id
            for output in outputs
            if isinstance(output, RequestOutput) and output.finished
        ] == ["0"]
        engine.add_request("1", _prompt(1), _params(0))
        engine.abort_request(["1", "2"])
        assert not engine.has_unfinished_requests() and engine.get_num_unfinished_requests() == 0


def test_event_loops_of_several_threads_share_an_async_engine(tiny_config: Path) -> None:
    llm = AsyncLLM(str(tiny_config), **OPTIONS)

    async def collect(number: int) -> list[int]:
        async for output in llm.generate(_prompt(number), _params(number)):
            last = output
        return last.outputs[0].token_ids

    works: list[Callable[[], object]] = [
        functools.partial(lambda number: asyncio.run(collect(number)), number)
        for number in range(4)
    ]
    try:
        alone = [work() for work in works]
        assert _in_threads(works) == alone
    finally:
        llm.close()


def test_an_async_engine_refuses_a_call_from_its_own_processor(tiny_config: Path) -> None:
    llm = AsyncLLM(str(tiny_config), **OPTIONS)

    def nested(output_ids: list[int], logits: Any) -> Any:
        async def ask() -> None:
            async for _ in llm.generate(_prompt(3), _params(0)):
                pass

        asyncio.run(ask())
        return logits

    async def main() -> RequestOutput:
        params = SamplingParams(max_tokens=4, logits_processors=[nested])
        async with asyncio.timeout(DEADLINE_S):
            async for output in llm.generate(_prompt(1), params):
                last = output
        return last

    try:
        output = asyncio.run(main())
        assert (
            output.error is not None
            and "is computing a step, which called this function" in output.error
        )
    finally:
        llm.close()

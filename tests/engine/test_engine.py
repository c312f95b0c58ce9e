"""The engine as its users drive it: refusals that harm nobody,
failures that stay with one request, clean endings."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cycles import no_cycles_of
from engines import run_all

from quire.core.beam_params import BeamSearchParams
from quire.core.params import RequestOutputKind, SamplingParams
from quire.core.plan import NOT_FINITE, StepPlan, StepResult
from quire.core.request import Request
from quire.core.request import Sequence as TokenSequence
from quire.engine.front.outputs import RequestOutput
from quire.engine.front.prompts import Prompt, PromptDict
from quire.engine.loop.engine import Engine
from quire.errors import EngineError, InvalidParameterError, PromptTooLongError, RequestError

MakeEngine = Callable[..., Engine]

PROMPT: PromptDict = {"prompt_token_ids": list(range(3, 25))}
NEIGHBOURS: dict[str, PromptDict] = {
    f"neighbour-{i}": {"prompt_token_ids": [5 + i, *range(40, 60)]} for i in range(3)
}


def _params(**options: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "logprobs": 1, **options}
    )


def _add_neighbours(engine: Engine) -> None:
    for name, prompt in NEIGHBOURS.items():
        engine.add_request(name, prompt, _params())


def _tokens(outputs: dict[str, RequestOutput]) -> dict[str, Any]:
    return {
        name: (each.outputs[0].token_ids, each.outputs[0].logprobs)
        for name, each in outputs.items()
    }


@pytest.fixture
def undisturbed(make_engine: MakeEngine) -> dict[str, Any]:
    """What the neighbours answer when nothing happens around them."""
    engine = make_engine()
    _add_neighbours(engine)
    return _tokens(run_all(engine))


def _assert_neighbours_unharmed(
    outputs: dict[str, RequestOutput], undisturbed: dict[str, Any]
) -> None:
    answers = _tokens({name: output for name, output in outputs.items() if name in NEIGHBOURS})
    assert answers == undisturbed


def _assert_idle(engine: Engine) -> None:
    scheduler = engine.scheduler
    assert not engine.has_work and not scheduler.running and scheduler.num_waiting == 0
    assert scheduler.manager.pool.num_used == 0 and scheduler.blocks.num_reserved == 0
    assert scheduler.rows.num_free == scheduler.limits.max_num_seqs
    assert not engine._processors and not engine._outputs._states


REFUSED: dict[str, tuple[Any, dict[str, Any], type[RequestError]]] = {
    "empty prompt": ([], {}, InvalidParameterError),
    "token outside the vocabulary": ([3, 256], {}, InvalidParameterError),
    "negative token": ([-1], {}, InvalidParameterError),
    "text without a tokenizer": ("hello", {}, InvalidParameterError),
    "no prompt in the dict": ({"text": "x"}, {}, InvalidParameterError),
    "prompt as long as the context": ([3] * 256, {}, PromptTooLongError),
    "too many log-probabilities": ([3], {"logprobs": 21}, InvalidParameterError),
    "stop strings without a tokenizer": ([3], {"stop": ["x"]}, InvalidParameterError),
    "bias outside the vocabulary": ([3], {"logit_bias": {999: 1.0}}, InvalidParameterError),
    "bad words without a tokenizer": ([3], {"bad_words": ["x"]}, InvalidParameterError),
    "no prompt": (None, {}, InvalidParameterError),
    "bytes": (b"abc", {}, InvalidParameterError),
    "fractional token": ([3.7], {}, InvalidParameterError),
    "tokens as text": ({"prompt_token_ids": "34"}, {}, InvalidParameterError),
    "a number": (5, {}, InvalidParameterError),
    "salt that is no text": (
        {"prompt_token_ids": [3], "cache_salt": [1]},
        {},
        InvalidParameterError,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_request_changes_nothing(
    case: str, make_engine: MakeEngine, undisturbed: dict[str, Any]
) -> None:
    prompt, options, error = REFUSED[case]
    engine = make_engine()
    _add_neighbours(engine)
    with pytest.raises(error) as raised:
        engine.add_request("bad", prompt, _params(**options))
    assert "\n" not in str(raised.value)
    _assert_neighbours_unharmed(run_all(engine), undisturbed)
    _assert_idle(engine)


def test_an_id_in_use_is_refused_and_its_owner_goes_on(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request("same", PROMPT, _params())
    with pytest.raises(InvalidParameterError, match="already in use"):
        engine.add_request("same", PROMPT, _params())
    assert run_all(engine)["same"].outputs[0].finish_reason == "length"
    _assert_idle(engine)


def _break_processor(engine: Engine) -> None:
    def fail(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("secret text")

    engine.add_request("victim", PROMPT, _params(logits_processors=[fail]))


def _break_mask(engine: Engine) -> None:
    def forbid_all(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, float("-inf"))

    engine.add_request("victim", PROMPT, _params(logits_processors=[forbid_all]))


def _poison_memory(engine: Engine) -> None:
    """Once the victim has begun, its first block's keys become NaN:
    from then on all it computes is."""
    engine.add_request("victim", PROMPT, _params())
    engine.step()
    block = next(s for s in engine.scheduler.running if s.name == "victim").table.blocks[0]
    worker = engine.executor.worker  # type: ignore[attr-defined]
    worker.memory.caches[0][0][block] = float("nan")


def _break_model(engine: Engine) -> None:
    """The forward pass raises whenever the victim is in it; told apart by its length."""
    engine.add_request("victim", PROMPT, _params())
    worker = engine.executor.worker  # type: ignore[attr-defined]
    launch = worker._launch

    def fail(work: Any) -> Any:
        if any(worker.rows.names[item.row] == "victim" for item in work):
            raise RuntimeError("secret text")
        return launch(work)

    worker._launch = fail


def _break_scoring(engine: Engine) -> None:
    """The logits of its prompt are not finite, those of its answer are."""
    engine.add_request("victim", PROMPT, _params(prompt_logprobs=1))
    scores = engine.executor.worker.outlets[1]  # type: ignore[attr-defined]
    inner = scores.model
    num_scored = len(PROMPT["prompt_token_ids"]) - 1

    def spoil(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = inner.logits(hidden)
        return logits * float("nan") if len(hidden) == num_scored else logits

    scores.model = _Replaced(inner, "logits", spoil)


def _fail(*_: object, **__: object) -> Any:
    raise RuntimeError("secret text")


def _break_input_building(engine: Engine) -> None:
    """The worker's row of it is lost, so that gathering its tokens fails."""
    engine.add_request("victim", PROMPT, _params())
    worker = engine.executor.worker  # type: ignore[attr-defined]
    apply = worker.rows.apply

    def lose(plan: StepPlan) -> None:
        apply(plan)
        for new in plan.new_rows:
            if new.name == "victim":
                worker.rows.block_tables = worker.rows.block_tables.copy()
                worker.rows.block_tables[new.row] = 1 << 30

    worker.rows.apply = lose


def _break_sampling(engine: Engine) -> None:
    engine.add_request("victim", PROMPT, _params(temperature=1.0))
    sampler = engine.executor.worker.outlets[0].sampler  # type: ignore[attr-defined]
    sampler.kernels = _Replaced(sampler.kernels, "draw", _fail)


class _Replaced:
    """Something with one method replaced."""

    def __init__(self, inner: Any, name: str, method: Callable[..., Any]) -> None:
        self._inner = inner
        setattr(self, name, method)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _break_update(engine: Engine) -> None:
    engine.add_request("victim", PROMPT, _params(n=3, temperature=1.0))
    engine.scheduler.requests["victim"].strategy.absorb = _fail  # type: ignore[method-assign]


def _break_text(engine: Engine, method: str, first_failure: int = 0) -> None:
    """Its text cannot be made, from some token on."""
    engine.add_request("victim", PROMPT, _params())
    processor = engine._outputs
    state_of = processor._state_of

    def broken(state: Any, sequence: Any) -> Any:
        mine = state_of(state, sequence)
        if state.request.request_id == "victim" and sequence.num_output_tokens > first_failure:
            setattr(mine.stream, method, _fail)
        return mine

    processor._state_of = broken  # type: ignore[method-assign]


def _break_output(engine: Engine) -> None:
    engine.add_request("victim", PROMPT, _params())
    processor = engine._outputs
    snapshot = processor._snapshot

    def fail(state: Any) -> RequestOutput:
        return _fail() if state.request.request_id == "victim" else snapshot(state)

    processor._snapshot = fail  # type: ignore[method-assign]


def _stream(engine: Engine) -> tuple[dict[int, list[int]], str | None]:
    """The tokens of two sequences as a stream brings them, and the error that it ends with."""
    engine.add_request(
        "a", PROMPT, _params(n=2, seed=1, temperature=1.0, output_kind=RequestOutputKind.DELTA)
    )
    seen: dict[int, list[int]] = {0: [], 1: []}
    error = None
    while engine.has_work:
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            error = output.error
            for each in output.outputs:
                seen[each.index] += each.token_ids
    return seen, error


def test_a_stream_whose_output_cannot_be_made_has_each_token_once(make_engine: MakeEngine) -> None:
    """Also those of the sequence whose share of that output had been made."""
    undisturbed, _ = _stream(make_engine())
    engine = make_engine()
    processor = engine._outputs
    complete = processor._completion

    def fail(state: Any, sequence: Any, index: int) -> Any:
        return (
            _fail()
            if sequence.index == 1 and sequence.num_output_tokens == 4
            else complete(state, sequence, index)
        )

    processor._completion = fail  # type: ignore[method-assign]
    seen, error = _stream(engine)
    assert error is not None and seen == {
        index: tokens[:4] for index, tokens in undisturbed.items()
    }


FAULTS: dict[str, Callable[[Engine], None]] = {
    "its inputs cannot be built": _break_input_building,
    "a processor raises": _break_processor,
    "a processor forbids everything": _break_mask,
    "its KV memory holds NaN": _poison_memory,
    "its prompt's logits are NaN": _break_scoring,
    "the model raises on it": _break_model,
    "sampling raises on it": _break_sampling,
    "its step cannot be taken in": _break_update,
    "its first token cannot be detokenized": lambda engine: _break_text(engine, "append"),
    "its fifth token cannot be detokenized": lambda engine: _break_text(engine, "append", 4),
    "its last token cannot be detokenized": lambda engine: _break_text(engine, "append", 11),
    "its text cannot be ended": lambda engine: _break_text(engine, "flush"),
    "its output cannot be made": _break_output,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_ends_one_request_and_no_other(
    fault: str,
    make_engine: MakeEngine,
    undisturbed: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine()
    _add_neighbours(engine)
    FAULTS[fault](engine)
    outputs = run_all(engine)
    victim = outputs["victim"]
    assert (
        victim.finished and victim.error is not None and victim.outputs[0].finish_reason == "error"
    )
    logged = [record.getMessage() for record in caplog.records if record.levelno > logging.DEBUG]
    for text in (victim.error, *logged):
        assert not any(secret in text for secret in ("Traceback", "0x", "secret", ".py", "/"))
    assert "\n" not in victim.error
    _assert_neighbours_unharmed(outputs, undisturbed)
    _assert_idle(engine)


def test_not_a_number_never_enters_the_cache(make_engine: MakeEngine) -> None:
    engine = make_engine()
    _poison_memory(engine)
    victim = engine.scheduler.requests["victim"].sequences[0]
    poisoned = victim.table.blocks[0]
    assert poisoned in engine.scheduler.manager.index, (
        "published while it was sound; the damage came from outside"
    )
    assert run_all(engine)["victim"].error == NOT_FINITE
    assert len(engine.scheduler.manager.index) == 0
    engine.add_request("again", PROMPT, _params())
    assert run_all(engine)["again"].error is None


def test_what_memory_held_before_never_matters(
    make_engine: MakeEngine, undisturbed: dict[str, Any]
) -> None:
    engine = make_engine()
    for keys, values in engine.executor.worker.memory.caches:  # type: ignore[attr-defined]
        keys.fill_(float("nan"))
        values.fill_(float("inf"))
    _add_neighbours(engine)
    _assert_neighbours_unharmed(run_all(engine), undisturbed)


class _BrokenOnce:
    """An executor whose first step is lost as a whole."""

    def __init__(self, inner: Any, error: BaseException) -> None:
        self._inner = inner
        self._error: BaseException | None = error

    def execute(self, plan: StepPlan) -> StepResult:
        if self._error is not None and plan.work:
            error, self._error = self._error, None
            raise error
        result: StepResult = self._inner.execute(plan)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_lost_step_ends_its_requests_and_the_engine_goes_on(
    make_engine: MakeEngine, undisturbed: dict[str, Any]
) -> None:
    engine = make_engine()
    engine.executor = _BrokenOnce(engine.executor, RuntimeError("gone"))
    engine.add_request("victim", PROMPT, _params())
    outputs = {o.request_id: o for o in engine.step() if isinstance(o, RequestOutput)}
    assert outputs["victim"].error is not None
    _add_neighbours(engine)
    _assert_neighbours_unharmed(run_all(engine), undisturbed)
    _assert_idle(engine)


@pytest.mark.parametrize(
    ("method", "error"),
    [
        *((method, RuntimeError("secret text")) for method in ("schedule", "update", "_grow")),
        *((method, KeyboardInterrupt()) for method in ("schedule", "update", "append")),
    ],
)
def test_a_broken_control_plane_ends_what_it_knows_and_starts_over(
    method: str, error: BaseException, make_engine: MakeEngine, undisturbed: dict[str, Any]
) -> None:
    engine = make_engine()
    processor = lambda output_ids, logits: logits  # noqa: E731
    engine.add_request(
        "victim", PROMPT, _params(n=2, temperature=1.0, logits_processors=[processor])
    )
    engine.add_request("beams", PROMPT, BeamSearchParams(beam_width=2, max_tokens=5).as_sampling())
    engine.step()

    def fail(*_: object, **__: object) -> None:
        raise error

    owner = engine.scheduler.planner if method == "_grow" else engine.scheduler
    setattr(owner, method, fail)
    outputs: dict[str, Any] = {}
    try:
        for _ in range(20):
            outputs |= {output.request_id: output for output in engine.step()}
    except KeyboardInterrupt:
        assert isinstance(error, KeyboardInterrupt)
    else:
        assert outputs.keys() == {"victim", "beams"} and all(
            output.error for output in outputs.values()
        )
    assert not engine.has_work and len(engine.executor.processors) == 0  # type: ignore[attr-defined]
    _add_neighbours(engine)
    _assert_neighbours_unharmed(run_all(engine), undisturbed)
    _assert_idle(engine)


def test_a_failed_beam_search_ends_alone(
    make_engine: MakeEngine, undisturbed: dict[str, Any]
) -> None:
    engine = make_engine()
    engine.add_request("victim", PROMPT, BeamSearchParams(beam_width=2, max_tokens=5).as_sampling())
    engine.scheduler.requests["victim"].strategy.absorb = _fail  # type: ignore[method-assign]
    _add_neighbours(engine)
    outputs: dict[str, Any] = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    victim = outputs.pop("victim")
    assert [list(each.token_ids) for each in victim.outputs] == [[]]
    assert "RuntimeError" in victim.error
    _assert_neighbours_unharmed(outputs, undisturbed)
    _assert_idle(engine)


def test_a_refused_request_leaves_no_processor_behind(make_engine: MakeEngine) -> None:
    engine = make_engine()
    params = _params(logits_processors=[lambda output_ids, logits: logits])
    engine.add_request("same", PROMPT, params)
    prompts: tuple[Prompt, ...] = (PROMPT, [3] * 300)
    for prompt in prompts:
        with pytest.raises(RequestError):
            engine.add_request("same", prompt, params)
    assert len(engine.executor.processors) == 1  # type: ignore[attr-defined]
    assert run_all(engine)["same"].error is None
    assert len(engine.executor.processors) == 0  # type: ignore[attr-defined]
    _assert_idle(engine)


def test_an_interrupt_passes_through_and_leaves_the_engine_usable(
    make_engine: MakeEngine, undisturbed: dict[str, Any]
) -> None:
    engine = make_engine()
    engine.executor = _BrokenOnce(engine.executor, KeyboardInterrupt())
    engine.add_request("victim", PROMPT, _params())
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.abort("victim")
    _add_neighbours(engine)
    _assert_neighbours_unharmed(run_all(engine), undisturbed)
    _assert_idle(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_an_abort_frees_everything_at_once(
    num_steps: int, make_engine: MakeEngine, undisturbed: dict[str, Any]
) -> None:
    engine = make_engine(max_num_batched_tokens=20)
    engine.add_request("victim", {"prompt_token_ids": [9] * 70}, _params(n=3, temperature=1.0))
    for _ in range(num_steps):
        engine.step()
    output = engine.abort("victim")
    assert output is not None and output.finished and output.outputs[0].finish_reason == "abort"
    _assert_idle(engine)
    assert engine.abort("victim") is None
    _add_neighbours(engine)
    _assert_neighbours_unharmed(run_all(engine), undisturbed)


def test_salted_prompts_share_no_cache(make_engine: MakeEngine) -> None:
    engine = make_engine()
    tokens = list(range(3, 60))
    for name, salt in (("a", "one"), ("b", "two"), ("c", "one")):
        engine.add_request(name, {"prompt_token_ids": tokens, "cache_salt": salt}, _params())
        output = run_all(engine)[name]
        assert output.metrics.num_prefix_hit_tokens == (56 if name == "c" else 0)


def test_stop_tokens_min_tokens_and_end_of_sequence(make_engine: MakeEngine) -> None:
    engine = make_engine()
    free = _params(ignore_eos=True)
    engine.add_request("free", PROMPT, free)
    tokens = run_all(engine)["free"].outputs[0].token_ids
    engine.add_request("stopped", PROMPT, _params(stop_token_ids=[tokens[3]]))
    stopped = run_all(engine)["stopped"].outputs[0]
    end = tokens.index(tokens[3]) + 1
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == (
        tokens[:end],
        "stop",
        tokens[3],
    )
    engine.request_builder.eos_token_ids = frozenset({tokens[3]})
    engine.add_request("ended", PROMPT, _params(ignore_eos=False))
    ended = run_all(engine)["ended"].outputs[0]
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == (tokens[:end], "stop", None)
    engine.add_request("late", PROMPT, _params(ignore_eos=False, min_tokens=8))
    late = run_all(engine)["late"].outputs[0]
    assert len(late.token_ids) >= 8 and tokens[3] not in late.token_ids[:8]


def test_best_of_returns_the_likeliest(make_engine: MakeEngine) -> None:
    engine = make_engine()
    common = {"temperature": 1.5, "seed": 3, "logprobs": 0}
    engine.add_request("all", PROMPT, _params(n=6, **common))
    engine.add_request("best", PROMPT, _params(n=2, best_of=6, **common))
    outputs = run_all(engine)
    ranked = sorted(outputs["all"].outputs, key=lambda each: -(each.cumulative_logprob or 0.0))
    assert [each.token_ids for each in outputs["best"].outputs] == [
        each.token_ids for each in ranked[:2]
    ]
    assert [each.index for each in outputs["best"].outputs] == [0, 1]


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final_only"])
def test_output_kinds(kind: str, make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request("x", PROMPT, _params(output_kind=kind))
    steps: list[list[int]] = []
    while engine.has_work:
        steps += [o.outputs[0].token_ids for o in engine.step() if isinstance(o, RequestOutput)]
    lengths = [len(each) for each in steps]
    assert (
        lengths == {"cumulative": list(range(1, 13)), "delta": [1] * 12, "final_only": [12]}[kind]
    )


def test_beam_search_under_memory_pressure_equals_beam_search_alone(
    make_engine: MakeEngine,
) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=14).as_sampling()

    def search(engine: Engine) -> list[Any]:
        engine.add_request("beams", {"prompt_token_ids": list(range(3, 30))}, params)
        while True:
            for output in engine.step():
                if output.request_id == "beams":
                    return [list(each.token_ids) for each in output.outputs]

    alone = search(make_engine())
    assert len(alone) == 4 and len({tuple(each) for each in alone}) == 4
    crowded = make_engine(num_blocks=5, max_model_len=64, max_num_seqs=4)
    for i in range(3):
        crowded.add_request(f"n{i}", {"prompt_token_ids": [7 + i] * 30}, _params(max_tokens=20))
    assert search(crowded) == alone
    assert crowded.scheduler.stats.num_preemptions > 0


def test_parallel_samples_share_their_prompt(make_engine: MakeEngine) -> None:
    """Eight prompts of 256 tokens, eight samples each:
    at least 55 % fewer blocks than without sharing."""

    def peak(num_requests: int, n: int) -> int:
        sizes = {
            "num_blocks": 2000,
            "max_num_seqs": 64,
            "max_model_len": 512,
            "max_num_batched_tokens": 4096,
        }
        engine = make_engine(**sizes, allow_long_context=True)
        for i in range(8):
            for j in range(num_requests):
                # A salt of its own keeps separate requests from sharing through the cache.
                prompt: PromptDict = {"prompt_token_ids": [3 + i] * 256, "cache_salt": str(j)}
                engine.add_request(
                    f"{i}-{j}", prompt, _params(n=n, temperature=1.0, max_tokens=64, logprobs=None)
                )
        run_all(engine)
        return engine.scheduler.stats.peak_num_blocks

    together, apart = peak(1, 8), peak(8, 1)
    assert together <= 0.45 * apart, (together, apart)


def test_a_closed_engine_refuses(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request("x", PROMPT, _params())
    engine.close()
    engine.close()
    assert not engine.has_work
    with pytest.raises(EngineError):
        engine.add_request("y", PROMPT, _params())


def test_a_request_that_is_over_is_gone_at_once_however_it_ended(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with no_cycles_of(Request, TokenSequence):
        _add_neighbours(engine)
        engine.add_request("several", PROMPT, _params(n=2, temperature=1.0))
        engine.add_request(
            "beams", PROMPT, BeamSearchParams(beam_width=2, max_tokens=4).as_sampling()
        )
        engine.add_request("aborted", PROMPT, _params(max_tokens=100))
        for _ in range(4):
            engine.step()
        engine.abort("aborted")
        while engine.has_work:
            engine.step()

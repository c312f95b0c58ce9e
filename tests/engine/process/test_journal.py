"""A request that goes on with another engine answers what it would have answered,
to the last bit."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cycles import no_cycles_of
from relay import Relay

from quire.config.engine import EngineConfig
from quire.core.params import BeamRules, RequestOutputKind, SamplingParams, ThinkTags
from quire.core.request import FinishReason, RequestRecord, SequenceRecord
from quire.engine.assembly.preparation import prepare_model
from quire.engine.front.outputs import RequestOutput
from quire.engine.front.requests import RequestBuilder
from quire.engine.loop.engine import Engine
from quire.engine.process.journal import Journal

pytestmark = pytest.mark.slow

MakeEngine = Callable[..., Engine]
MakeRelay = Callable[..., Relay]

LOOP = {"max_pattern_size": 2, "min_count": 3}

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "hot": {"seed": 3, "temperature": 2.0, "top_k": 40, "min_p": 0.01},
    "penalties": {
        "seed": 4,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
    },
    "biased": {"seed": 5, "logit_bias": {5: 6.0}, "min_tokens": 9, "stop_token_ids": [5]},
    "scored": {"seed": 6, "logprobs": 3, "prompt_logprobs": 2},
    "forked": {"seed": 7, "n": 3, "logprobs": 1},
    "best": {"seed": 8, "n": 2, "best_of": 4, "stop_token_ids": [17, 33, 60]},
    "unseeded": {},
    "looping": {"seed": 4, "n": 2, "allowed_token_ids": [5, 6], "repetition_detection": LOOP},
    "thinking": {
        "seed": 5,
        "n": 2,
        "thinking_token_budget": 2,
        "thinking_marks": ThinkTags("<th>", "</th>", True),
    },
    "listed": {
        "seed": 10,
        "n": 2,
        "allowed_token_ids": [*range(5, 200)],
        "logit_bias": {n: 0.1 * n for n in range(9, 40)},
        "bad_words": ["q", "Z", "the"],
        "min_tokens": 5,
        "stop_token_ids": [*range(90, 200)],
    },
    "formed": {
        "seed": 9,
        "n": 2,
        "ignore_eos": False,
        "structured_outputs": {"regex": "[a-d]{4,}[0-9]{3}"},
    },
}


@pytest.fixture
def make_relay(make_engine: MakeEngine, tiny_config: Path) -> MakeRelay:
    def make(**options: Any) -> Relay:
        loops: list[Engine] = []

        def next_engine() -> Engine:
            for each in loops:
                each.close()
            loops[:] = [make_engine(**options)]
            return loops[0]

        options.setdefault("num_threads", 1)
        options.setdefault("tokenizer", "quire-storyteller")
        config = EngineConfig(
            model=str(tiny_config),
            load_format="dummy",
            kv_cache_memory="512KiB",
            tokenizer=options["tokenizer"],
        )
        prepared = prepare_model(config)
        requests = RequestBuilder(prepared.planned.plan, prepared.tokenizer, prepared.eos_token_ids)
        return Relay(requests, Journal(prepared.tokenizer), next_engine)

    return make


def _request(
    name: str, kind: str, prompt_len: int, **params: Any
) -> tuple[str, list[int], SamplingParams]:
    rng = random.Random(f"{name} {prompt_len}")
    prompt = [rng.randrange(3, 250) for _ in range(prompt_len)]
    options = {
        "max_tokens": 10,
        "ignore_eos": True,
        "output_kind": RequestOutputKind.DELTA,
        **KINDS[kind],
        **params,
    }
    return name, prompt, SamplingParams(**options)


def _joined(outputs: list[RequestOutput]) -> list[tuple[Any, ...]]:
    """Each sequence of a stream of deltas, whole."""
    assert [each.finished for each in outputs] == [False] * (len(outputs) - 1) + [True]
    last = outputs[-1]
    assert last.error is None
    return [
        (
            [
                token
                for each in outputs
                for one in each.outputs[place : place + 1]
                for token in one.token_ids
            ],
            [
                record
                for each in outputs
                for one in each.outputs[place : place + 1]
                for record in one.logprobs or ()
            ],
            "".join(one.text for each in outputs for one in each.outputs[place : place + 1]),
            (
                final.index,
                final.cumulative_logprob,
                final.finish_reason,
                final.stop_reason,
                last.prompt_logprobs,
            ),
        )
        for place, final in enumerate(last.outputs)
    ]


def _answers(relay: Relay, *, without: str = "", **run: int) -> dict[str, list[tuple[Any, ...]]]:
    for place, kind in enumerate(KINDS):
        if kind == without:
            continue
        relay.add(*_request(kind, kind, 5 + 9 * place))
    return {name: _joined(outputs) for name, outputs in relay.run(**run).items()}


@pytest.mark.parametrize(
    "options",
    [{}, {"enable_prefix_caching": False, "max_num_batched_tokens": 16}],
    ids=["plain", "chunked"],
)
@pytest.mark.parametrize("replace_every", [1, 2, 5])
def test_another_engine_goes_on_where_the_last_one_was(
    make_relay: MakeRelay, options: dict[str, Any], replace_every: int
) -> None:
    # a grammar takes a step to be ready, and then somebody must use it
    without = "formed" if replace_every == 1 else ""
    undisturbed = _answers(make_relay(), without=without)
    if "max_num_batched_tokens" in options:
        replace_every += 20  # a prompt in pieces must have its time, or nobody ever gets anywhere
    assert (
        _answers(make_relay(**options), replace_every=replace_every, without=without) == undisturbed
    )


def test_the_server_needs_of_an_engine_only_what_the_engine_alone_gives(
    make_relay: MakeRelay, make_engine: MakeEngine
) -> None:
    """Through messages or not, the outputs are the same objects in content."""
    relayed = _answers(make_relay())
    engine = make_engine(tokenizer="quire-storyteller")
    outputs: dict[str, list[RequestOutput]] = {}
    for place, kind in enumerate(KINDS):
        _, prompt, params = _request(kind, kind, 5 + 9 * place)
        engine.add_request(kind, {"prompt_token_ids": prompt}, params)
    while engine.has_work:
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            outputs.setdefault(output.request_id, []).append(output)
    assert relayed == {name: _joined(each) for name, each in outputs.items()}


def test_an_aborted_request_ends_with_what_it_has_and_frees_its_engine(
    make_relay: MakeRelay,
) -> None:
    relay = make_relay()
    relay.add(*_request("a", "greedy", 20, max_tokens=100))
    for _ in range(5):
        relay.step()
    [last] = relay.journal.end(relay.journal.entries[1], FinishReason.ABORT)
    assert last.finished and last.outputs[0].finish_reason == "abort"
    assert not relay.journal.entries
    relay.step()
    assert not relay.service.has_work


def test_beams_are_told_at_the_end_and_found_again_by_another_engine(
    make_relay: MakeRelay, make_engine: MakeEngine
) -> None:
    def search(relay: Relay) -> None:
        relay.add(
            "b", [5, 9, 7] * 8, SamplingParams(n=3, max_tokens=10, beam_search=BeamRules(2.0))
        )
        relay.add(*_request("beside", "hot", 20, max_tokens=30))

    relay, broken = make_relay(), make_relay()
    search(relay)
    search(broken)
    relay.run()
    for _ in range(6):
        broken.step()
    assert not broken.outputs.get("b") and broken.outputs["beside"]
    broken.replace_engine()
    broken.run()
    [undisturbed], [found] = relay.outputs["b"], broken.outputs["b"]
    assert undisturbed.outputs == found.outputs and len(found.outputs) == 3
    assert relay.outputs["beside"][-1].outputs == broken.outputs["beside"][-1].outputs
    engine = make_engine(tokenizer="quire-storyteller")
    params = SamplingParams(n=3, max_tokens=10, beam_search=BeamRules(2.0))
    engine.add_request("b", {"prompt_token_ids": [5, 9, 7] * 8}, params)
    outputs = [each for _ in range(40) if engine.has_work for each in engine.step()]
    assert [each.outputs for each in outputs] == [found.outputs]
    assert all(each.drafted == () for each in found.outputs)


def test_what_a_lost_request_had_is_not_delivered_twice(make_relay: MakeRelay) -> None:
    relay = make_relay()
    relay.add(*_request("a", "greedy", 20))
    for _ in range(3):
        relay.step()
    relay.replace_engine()
    relay.run()
    deltas = [output.outputs[0].token_ids for output in relay.outputs["a"]]
    assert [len(each) for each in deltas] == [1] * 10


def test_late_words_about_ended_requests_are_ignored(make_relay: MakeRelay) -> None:
    relay = make_relay()
    relay.add(*_request("a", "greedy", 20, max_tokens=50))
    relay.step()
    [entry] = relay.journal.entries.values()
    relay.journal.end(entry, FinishReason.ABORT)
    deltas = relay.service.step()
    assert deltas is not None and deltas.deltas[0].number == entry.number
    assert relay.journal.take(deltas) == []


def test_an_engine_that_starts_over_ends_its_requests_with_the_reason(
    make_relay: MakeRelay,
) -> None:
    relay = make_relay()
    relay.add(*_request("a", "forked", 20))
    relay.step()

    def fail(now: float) -> None:
        raise RuntimeError("a bug")

    relay.service.loop.scheduler.schedule = fail  # type: ignore[method-assign,assignment]
    relay.run()
    last = relay.outputs["a"][-1]
    assert (
        last.error is not None
        and "RuntimeError" in last.error
        and last.outputs[0].finish_reason == "error"
    )


def test_messages_are_smaller_than_json(make_relay: MakeRelay) -> None:
    import msgspec

    relay = make_relay()
    relay.add(*_request("a", "greedy", 200))
    [entry] = relay.journal.entries.values()
    message = entry.to_message()
    assert len(msgspec.msgpack.encode(message)) < len(json.dumps(msgspec.to_builtins(message)))


def test_a_request_that_is_over_is_gone_at_once_on_both_sides(make_relay: MakeRelay) -> None:
    relay = make_relay()
    with no_cycles_of(RequestRecord, SequenceRecord):
        for place, kind in enumerate(("greedy", "scored", "forked", "best")):
            relay.add(*_request(kind, kind, 9 + place))
        relay.add(*_request("aborted", "hot", 20, max_tokens=100))
        for _ in range(5):
            relay.step()
        relay.journal.end(relay.journal.entries[5], FinishReason.ABORT)
        relay.run()
        relay.service.loop.record_steps()

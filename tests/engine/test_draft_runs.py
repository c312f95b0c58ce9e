"""Outputs say which of their characters came of draft tokens."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.core.params import RequestOutputKind, SamplingParams
from quire.core.speculation.drafters import Draft
from quire.core.speculation.speculator import Speculator
from quire.engine.assembly.builder import build_engine
from quire.engine.front.outputs import CompletionOutput, RequestOutput
from quire.engine.front.streams import merge_deltas
from quire.engine.loop.engine import Engine

PROMPT = "Once upon a time there was a"


class Known:
    """Implements `Drafter`: the answer, all of it."""

    def __init__(self, answer: list[int]) -> None:
        self._answer = answer

    def draft(self, sequence: Any, most: int) -> Draft:
        return Draft(self._answer[sequence.num_output_tokens :][: min(most, 5)], 1)

    def end(self, sequence: Any) -> None:
        """Nothing is kept."""


def _deltas(engine: Engine, kind: RequestOutputKind, **params: Any) -> list[RequestOutput]:
    sampling = SamplingParams(
        temperature=0.0, max_tokens=24, ignore_eos=True, output_kind=kind, **params
    )
    engine.add_request("r", PROMPT, sampling)
    found = []
    while engine.has_work:
        for output in engine.step():
            assert isinstance(output, RequestOutput) and output.error is None
            found.append(output)
    return found


@pytest.fixture(scope="module")
def engine() -> Engine:
    config = EngineConfig(model="quire-storyteller", kv_cache_memory="4MiB")
    return build_engine(config)


def test_deltas_tell_runs_and_whole_outputs_all_of_them(engine: Engine) -> None:
    engine.scheduler.look_ahead = None
    plain = _deltas(engine, RequestOutputKind.DELTA)
    assert all(each.outputs[0].drafted == () for each in plain)
    answer = [token for each in plain for token in each.outputs[0].token_ids]
    text = "".join(each.outputs[0].text for each in plain)
    tokenizer = engine.tokenizer
    assert tokenizer is not None

    engine.scheduler.look_ahead = Speculator(Known(answer), 5)
    deltas = [each.outputs[0] for each in _deltas(engine, RequestOutputKind.DELTA)]
    assert "".join(each.text for each in deltas) == text
    runs = [each for each in deltas if len(each.token_ids) > 1]
    assert len(runs) >= 3
    for each in runs:
        ((first, end),) = each.drafted
        last = tokenizer.decode(each.token_ids[-1:])
        assert (first, each.text[end:].strip()) == (0, last.strip())
    assert all(not each.drafted for each in deltas if len(each.token_ids) <= 1)

    engine.scheduler.look_ahead = Speculator(Known(answer), 5)
    whole = _deltas(engine, RequestOutputKind.CUMULATIVE)[-1].outputs[0]
    marked = "".join(whole.text[first:end] for first, end in whole.drafted)
    assert marked == "".join(each.text[f:e] for each in deltas for f, e in each.drafted)
    assert 0 < len(marked) < len(text)


def test_text_that_was_held_back_for_a_stop_string_moves_no_run(engine: Engine) -> None:
    engine.scheduler.look_ahead = None
    plain = _deltas(engine, RequestOutputKind.DELTA)
    answer = [token for each in plain for token in each.outputs[0].token_ids]
    text = "".join(each.outputs[0].text for each in plain)
    engine.scheduler.look_ahead = Speculator(Known(answer), 5)
    found = _deltas(engine, RequestOutputKind.DELTA, stop=[text[10:14] + "§"])
    pieces = [each.outputs[0] for each in found]
    assert "".join(each.text for each in pieces) == text
    for each in pieces:
        assert all(0 <= first < end <= len(each.text) for first, end in each.drafted)


def test_merged_deltas_keep_their_runs() -> None:
    def delta(text: str, *drafted: tuple[int, int]) -> RequestOutput:
        return RequestOutput("r", None, [], [CompletionOutput(0, text, [], drafted=drafted)], False)

    merged = merge_deltas(delta("abc", (0, 2)), delta("defg", (0, 1), (2, 3)))
    [one] = merged.outputs
    assert (one.text, one.drafted) == ("abcdefg", ((0, 2), (3, 4), (5, 6)))

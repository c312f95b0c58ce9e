"""A request's spec arrives at the scheduler as it was made, whatever it says,
and what is between names none of its fields."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.config.limits import SchedulerLimits
from quire.core.content import Content
from quire.core.grammars import Grammar
from quire.core.params import SamplingParams, ThinkTags
from quire.core.plan import RowSampling, ThinkingBudget, ThinkTagTokens
from quire.core.pooling import Pool, WeighTokens
from quire.core.request_spec import BeamSettings, Keep, RequestSpec, fit
from quire.core.transfers import KVTransfer, RemotePrefix
from quire.engine.front.digest import Digest
from quire.engine.front.requests import PreparedRequest
from quire.engine.loop.step_loop import StepLoop
from quire.engine.process.journal import Journal
from quire.engine.process.messages import Down
from quire.engine.process.service import Service
from quire.errors import PromptTooLongError
from quire.executor.null import NullExecutor

PACKAGE = Path(__file__).parents[2] / "quire"
MARKS = ThinkTagTokens(((0, 5, 1),), 1, ((0, 6, 1),), (6,))
OTHERS: dict[str, Any] = {
    "request_id": "a",
    "prompt_token_ids": (5, 6),
    "contents": (Content(1, 2, bytes(range(32))),),
    "undivided": ((0, 2),),
    "sampling": RowSampling(
        seed=2**64 - 1, min_p=0.25, logit_bias=((3, -1.5),), bad_words=((1, 2), (3,)),
        num_logprobs=-1,
        grammar=Grammar("regex", "a+"), thinking=ThinkingBudget(9, True, MARKS),
    ),
    "max_tokens": 11,
    "num_sequences": 3,
    "beam": BeamSettings(2, -0.5, "never"),
    "stop_token_ids": frozenset({8, 9}),
    "repetition": (1, 2, 3),
    "priority": -4,
    "tenant": "b",
    "weight": 0.5,
    "namespace": ("salt", "c"),
    "reads_cache": False,
    "keep": (Keep(7, 5.0), Keep(None, 2.5)),
    "pool": Pool(is_whole=True, dimensions=8, num_skipped=1),
    "weigh": WeighTokens((3, 7)),
    "transfer": KVTransfer("lease", RemotePrefix("other", "10.0.0.1", 14579, "theirs")),
    "arrival_s": 12.5,
}  # fmt: skip
"""For each field a value that is not its default."""


def _arrived(spec: RequestSpec) -> Any:
    """What a scheduler in another process is given for a spec."""
    limits = SchedulerLimits(num_blocks=64, max_num_seqs=8, max_model_len=256)
    service = Service(StepLoop(limits, NullExecutor(8, 64, 16, vocab_size=50), lambda: 0.0))
    journal = Journal(None)
    thinking = spec.sampling.thinking
    marks = None if thinking is None else (ThinkTags("<", ">"), thinking.marks)
    entry = journal.add(PreparedRequest(spec, Digest(SamplingParams(), spec, marks=marks), None))
    for message in journal.telling(entry):
        travelled: Any = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Down)
        assert service.handle(travelled) is None
    [request] = service.loop.scheduler.requests.values()
    return request


@pytest.mark.parametrize("field", fields(RequestSpec), ids=lambda field: field.name)
def test_every_field_reaches_the_scheduler_of_another_process(field: Any) -> None:
    spec = RequestSpec(request_id="r", prompt_token_ids=(1, 2))
    changed = replace(spec, **{field.name: OTHERS[field.name]})
    assert changed != spec, "give OTHERS a value that is not the default"
    request = _arrived(changed)
    assert {each.name: getattr(request, each.name) for each in fields(RequestSpec)} == {
        each.name: getattr(changed, each.name) for each in fields(RequestSpec)
    }


def test_a_field_is_named_where_it_is_declared_where_it_is_made_and_where_it_is_read() -> None:
    """Of a field that only the scheduler looks at; the API's word for it is another,
    which `Digester` reads."""
    named = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "reads_cache" in path.read_text("utf-8")
    }
    assert named - {"sim/scenario.py"} == {
        "core/request_spec.py",
        "engine/front/digest.py",
        "engine/pooling/requests.py",
        "core/scheduler/prompt_cache.py",
        "core/scheduler/resources.py",
        "core/scheduler/tiers.py",
        "core/scheduler/transfers.py",
    }


def test_a_spec_cannot_be_changed() -> None:
    spec = RequestSpec(request_id="r")
    with pytest.raises(AttributeError):
        spec.max_tokens = 3  # type: ignore[misc]


def test_what_could_never_be_served_is_refused_with_the_numbers() -> None:
    limits = SchedulerLimits(num_blocks=3, block_size=16, max_model_len=64)
    spec = RequestSpec(prompt_token_ids=(1,) * 60, max_tokens=4)
    with pytest.raises(
        PromptTooLongError, match=r"60 tokens.* 4 KV blocks of 16.* the whole pool has 3"
    ):
        fit(spec, limits)
    with pytest.raises(
        PromptTooLongError, match="the prompt has 64 tokens, but the context holds 64"
    ):
        fit(replace(spec, prompt_token_ids=(1,) * 64), limits)


def test_an_answer_is_bounded_by_the_context() -> None:
    limits = SchedulerLimits(num_blocks=8, block_size=16, max_model_len=64)
    spec = RequestSpec(prompt_token_ids=(1,) * 60, max_tokens=100)
    fitting = fit(spec, limits)
    assert fitting == replace(spec, max_tokens=4)
    assert fit(fitting, limits) is fitting

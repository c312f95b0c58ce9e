"""What parameters list is read once, and all requests with them refer to what was made of it,
in both processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.config.engine import EngineConfig
from quire.config.limits import SchedulerLimits
from quire.core import params as parameters
from quire.core.params import SamplingParams
from quire.core.request import FinishReason
from quire.engine.assembly.preparation import prepare_model
from quire.engine.front.prompts import ParsedPrompt
from quire.engine.front.requests import PreparedRequest, RequestBuilder
from quire.engine.loop.engine import Engine
from quire.engine.loop.step_loop import StepLoop
from quire.engine.process.journal import Journal
from quire.engine.process.messages import Abort, AddRequest, Forget, Lists
from quire.engine.process.service import Service
from quire.errors import InvalidParameterError
from quire.executor.null import NullExecutor

NUM_PROMPTS = 64
LONG: dict[str, Any] = {
    "allowed_token_ids": [*range(3, 250)] * 2,
    "logit_bias": {number: 0.5 for number in range(100)},
    "stop_token_ids": list(range(200)),
    "bad_words": [f"a bad word {number}" for number in range(40)],
    "stop": ["the end" * 20, "once"],
    "structured_outputs": {"regex": "[a-z ]{4,}"},
    "ignore_eos": False,
}

Told = Lists | Forget | AddRequest | Abort
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def builder(tiny_config: Path) -> RequestBuilder:
    prepared = prepare_model(
        EngineConfig(model=str(tiny_config), load_format="dummy", tokenizer="quire-storyteller")
    )
    return RequestBuilder(prepared.planned.plan, prepared.tokenizer, prepared.eos_token_ids)


def _requests(builder: RequestBuilder, **options: Any) -> list[PreparedRequest]:
    """Many prompts with one digest, as a body's prompts have."""
    params = SamplingParams(max_tokens=8, **options)
    digest = builder.digest(params)
    return [
        builder.sampling(
            f"r{number}", ParsedPrompt(None, [5, number]), digest.of(params.limited(8 - number % 2))
        )
        for number in range(NUM_PROMPTS)
    ]


def _sent(journal: Journal) -> list[Told]:
    """What an engine is told next; each message as it travels."""
    told: list[Any] = list(journal.take_messages())
    for entry in journal.entries.values():
        if not entry.is_sent:
            entry.is_sent = True
            told += journal.telling(entry)
    return [msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Told) for message in told]


def test_every_request_of_a_digest_refers_to_the_same_lists(builder: RequestBuilder) -> None:
    admitted = _requests(builder, **LONG)
    rows = [each.spec.sampling for each in admitted]
    for name in ("allowed_token_ids", "logit_bias", "stop_token_ids", "bad_words", "grammar"):
        assert len({id(getattr(row, name)) for row in rows}) == 1, name
    assert rows[0].allowed_token_ids == tuple(range(3, 250)), "each token once"
    assert len({id(each.spec.stop_token_ids) for each in admitted}) == 1
    assert len({id(each.digest.stop_strings) for each in admitted}) == 1
    assert [each.spec.max_tokens for each in admitted[:2]] == [8, 7]
    assert len({row.seed for row in rows}) == NUM_PROMPTS, "seeds are each request's own"


def test_bad_words_are_tokenized_once_for_all_prompts(
    builder: RequestBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = builder._tokenizer
    assert tokenizer is not None
    texts: list[str] = []
    plain = type(tokenizer).encode

    def encode(self: Any, text: str, **options: Any) -> list[int]:
        texts.append(text)
        return plain(self, text, **options)

    monkeypatch.setattr(type(tokenizer), "encode", encode)
    _requests(builder, bad_words=["one", " one", "two", "two"])
    assert sorted(texts) == [" one", " one", " one", " two", "one", "two"]


def test_words_that_the_model_has_no_tokens_for_forbid_nothing(builder: RequestBuilder) -> None:
    """The tokenizer of these tests knows more tokens than the model does."""
    tokenizer = builder._tokenizer
    assert tokenizer is not None and tokenizer.vocab_size > 256
    beyond = next(
        text
        for text in ("the", "and", "was", "ing")
        if max(tokenizer.encode(text, add_special_tokens=False)) >= 256
    )
    words = builder.digest(SamplingParams(bad_words=[beyond, "q"])).sampling.bad_words
    assert words and max(map(max, words)) < 256


def test_words_with_too_many_tokens_are_refused_by_name(
    builder: RequestBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.front.digest.MAX_BAD_WORD_TOKENS", 20)
    with pytest.raises(
        InvalidParameterError, match="bad_words: their spellings have more than 20 tokens"
    ) as caught:
        builder.digest(
            SamplingParams(
                bad_words=["something rather long to say"] * 3 + ["and something else that is long"]
            )
        )
    assert caught.value.param == "bad_words"
    assert parameters.MAX_BAD_WORD_TOKENS > 2 * 256 * 257, (
        "all that the HTTP API takes, at a token for each character"
    )


def test_what_is_listed_travels_once_and_prompts_cost_their_own_tokens(
    builder: RequestBuilder,
) -> None:
    """A body of many prompts is as long on its way as its prompts and one copy of its lists."""
    journal = Journal(builder._tokenizer)
    for request in _requests(builder, **LONG):
        journal.add(request)
    messages = _sent(journal)
    assert [type(message) for message in messages] == [Lists, *[AddRequest] * NUM_PROMPTS]
    sizes = [len(msgspec.msgpack.encode(message)) for message in messages]
    assert sizes[0] > 1500 and max(sizes[1:]) < 500, sizes[:3]


def test_an_engine_holds_one_copy_and_forgets_it_with_the_last_request(
    builder: RequestBuilder,
) -> None:
    limits = SchedulerLimits(num_blocks=256, max_num_seqs=NUM_PROMPTS, max_model_len=256)
    service = Service(
        StepLoop(limits, NullExecutor(NUM_PROMPTS, 256, 16, vocab_size=256), lambda: 0.0)
    )
    journal = Journal(builder._tokenizer)
    for request in _requests(builder, **LONG):
        journal.add(request)
    for message in _sent(journal):
        assert service.handle(message) is None
    rows = [request.sampling for request in service.loop.scheduler.requests.values()]
    assert len(rows) == NUM_PROMPTS
    for name in ("allowed_token_ids", "logit_bias", "stop_token_ids", "bad_words", "grammar"):
        assert len({id(getattr(row, name)) for row in rows}) == 1, name
    assert (
        len({id(request.stop_token_ids) for request in service.loop.scheduler.requests.values()})
        == 1
    )
    assert rows[0] == journal.entries[1].request.sampling
    for entry in list(journal.entries.values()):
        journal.end(entry, FinishReason.ABORT)
        assert bool(service._lists) is True
    for message in _sent(journal):
        service.handle(message)
    assert not service._lists and not len(journal.lists) and not service.has_work


def test_another_engine_is_told_anew_and_an_ended_body_s_number_is_not_used_again(
    builder: RequestBuilder,
) -> None:
    journal = Journal(builder._tokenizer)
    requests = _requests(builder, **LONG)
    for request in requests[:3]:
        journal.add(request)
    first = _sent(journal)
    journal.leave_engine()
    assert _sent(journal) == first, "the next engine knows nothing"
    for entry in list(journal.entries.values()):
        journal.end(entry, FinishReason.ABORT)
    assert [type(message) for message in _sent(journal)][-1] is Forget
    journal.add(requests[4])
    lists, add = _sent(journal)
    assert isinstance(lists, Lists) and isinstance(add, AddRequest)
    assert isinstance(first[0], Lists) and lists.number == add.lists != first[0].number


def test_short_lists_travel_with_their_request(builder: RequestBuilder) -> None:
    journal = Journal(builder._tokenizer)
    for request in _requests(builder, logit_bias={5: 1.0}, stop_token_ids=[7])[:2]:
        journal.add(request)
    for message in _sent(journal):
        assert isinstance(message, AddRequest) and 7 in message.spec.stop_token_ids
        assert message.spec.sampling.logit_bias == ((5, 1.0),)


def test_an_engine_reads_the_parameters_of_many_prompts_once(make_engine: MakeEngine) -> None:
    engine = make_engine(tokenizer="quire-storyteller")
    digest = engine.digest(
        SamplingParams(
            max_tokens=2, allowed_token_ids=list(range(200)), stop_token_ids=list(range(9))
        )
    )
    for number in range(5):
        engine.add_request(str(number), [1, 2, number], digest)
    held = engine.scheduler.requests.values()
    assert len({id(request.sampling.allowed_token_ids) for request in held}) == 1
    with pytest.raises(AssertionError, match="other parameters"):
        digest.of(SamplingParams(max_tokens=2))


def test_what_is_changed_after_it_was_read_does_not_count(make_engine: MakeEngine) -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=2, logit_bias={5: 1.0})
    digest = engine.digest(params)
    assert params.logit_bias is not None
    params.logit_bias[6] = 2.0
    params.max_tokens = 9
    assert digest.sampling.logit_bias == ((5, 1.0),) and digest.params.max_tokens == 2

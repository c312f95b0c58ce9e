"""The judge: every verdict is found, remembered, and never waited for without end."""

from __future__ import annotations

import asyncio
import queue
import threading
import time

import pytest
from timing import timed

from quire.core.grammars import Grammar
from quire.errors import InvalidParameterError, UnavailableError
from quire.grammar import judge as judge_module
from quire.grammar.judge import GrammarJudge

GOOD, BAD = Grammar("regex", "[a-z]+"), Grammar("lark", 'start: "a" nothing')


def test_verdicts_from_a_thread_and_from_a_loop() -> None:
    judge = GrammarJudge()
    for _ in range(2):
        judge.check(GOOD)
        asyncio.run(judge.check_async(GOOD))
        with pytest.raises(InvalidParameterError, match="unknown name") as caught:
            judge.check(BAD)
        assert caught.value.param == "structured_outputs"
        with pytest.raises(InvalidParameterError, match="unknown name"):
            asyncio.run(judge.check_async(BAD))


@timed
def test_the_loop_goes_on_while_a_grammar_is_judged() -> None:
    judge = GrammarJudge()
    large = Grammar(
        "json", '{"enum":[' + ",".join(f'"value {number}"' for number in range(9000)) + "]}"
    )

    async def main() -> tuple[float, float]:
        task = asyncio.create_task(judge.check_async(large))
        longest, last = 0.0, time.monotonic()
        began = last
        while not task.done():
            await asyncio.sleep(0.001)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        await task
        return longest, time.monotonic() - began

    longest, whole = asyncio.run(main())
    assert longest < max(0.5, whole / 2)


def test_a_slow_compiler_or_a_full_queue_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, release = threading.Event(), threading.Event()

    def validate(grammar: Grammar) -> None:
        has_begun.set()
        release.wait(100)

    monkeypatch.setattr(judge_module, "validate", validate)
    monkeypatch.setattr(judge_module, "MAX_WAIT_S", 0.05)
    judge = GrammarJudge()
    judge._queue = queue.Queue(2)
    try:
        with pytest.raises(InvalidParameterError, match="not compiled within"):
            judge.check(GOOD)
        assert has_begun.wait(60)  # the first is out of the queue
        with pytest.raises(InvalidParameterError, match="not compiled within"):
            asyncio.run(judge.check_async(Grammar("regex", "b")))
        with pytest.raises(InvalidParameterError, match="not compiled within"):
            judge.check(Grammar("regex", "c"))
        with pytest.raises(UnavailableError) as caught:
            judge.check(Grammar("regex", "d"))
        assert caught.value.state == "overloaded"
    finally:
        release.set()


def test_a_panic_of_the_library_is_a_refusal_and_the_judge_lives_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Panic(BaseException):
        pass

    def panic(grammar: Grammar) -> None:
        raise Panic

    judge = GrammarJudge()
    with monkeypatch.context() as patch:
        patch.setattr(judge_module, "validate", panic)
        with pytest.raises(InvalidParameterError, match="Panic"):
            judge.check(GOOD)
    judge.check(Grammar("regex", "other"))

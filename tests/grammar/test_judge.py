"""The judge: every verdict is found, remembered, and never waited for without end."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from contextlib import closing

import pytest

from quire.core.grammars import Grammar
from quire.errors import InvalidParameterError, UnavailableError
from quire.grammar import judge as judge_module
from quire.grammar import trial as trial_module
from quire.grammar import trial_process
from quire.grammar.judge import GrammarJudge
from quire.grammar.trial import Trial

GOOD, BAD = Grammar("regex", "[a-z]+"), Grammar("lark", 'start: "a" nothing')


def test_verdicts_from_a_thread_and_from_a_loop() -> None:
    with closing(GrammarJudge()) as judge:
        for _ in range(2):
            judge.check(GOOD)
            asyncio.run(judge.check_async(GOOD))
            with pytest.raises(InvalidParameterError, match="unknown name") as caught:
                judge.check(BAD)
            assert caught.value.param == "structured_outputs"
            with pytest.raises(InvalidParameterError, match="unknown name"):
                asyncio.run(judge.check_async(BAD))


class Stuck:
    """A compiler that holds the first grammar until it is released."""

    def __init__(self) -> None:
        self.has_begun, self.release = threading.Event(), threading.Event()

    def judge(self, grammar: Grammar) -> str | None:
        self.has_begun.set()
        self.release.wait(100)
        return None

    def close(self) -> None:
        self.release.set()


def test_the_loop_goes_on_while_a_grammar_is_judged() -> None:
    judge = GrammarJudge(stuck := Stuck())

    async def main() -> None:
        task = asyncio.create_task(judge.check_async(GOOD))
        while not stuck.has_begun.is_set():
            await asyncio.sleep(0.001)
        assert not task.done(), "the loop waited for it"
        stuck.release.set()
        await task

    with closing(judge):
        asyncio.run(main())


def test_a_slow_compiler_or_a_full_queue_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_module, "MAX_WAIT_S", 0.05)
    judge = GrammarJudge(stuck := Stuck())
    judge._queue = queue.Queue(2)
    with closing(judge):
        with pytest.raises(UnavailableError, match="not compiled within") as caught:
            judge.check(GOOD)
        assert (caught.value.state, caught.value.retry_after_s) == ("overloaded", 2)
        assert stuck.has_begun.wait(60)  # the first is out of the queue
        with pytest.raises(UnavailableError, match="not compiled within"):
            asyncio.run(judge.check_async(Grammar("regex", "b")))
        with pytest.raises(UnavailableError, match="not compiled within"):
            judge.check(Grammar("regex", "c"))
        with pytest.raises(UnavailableError, match="wait to be judged") as caught:
            judge.check(Grammar("regex", "d"))
        assert caught.value.state == "overloaded"


def test_a_panic_of_the_library_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        pass

    def panic(grammar: Grammar) -> None:
        raise Panic

    monkeypatch.setattr(trial_process, "validate", panic)
    error = trial_process._error(GOOD)
    assert error is not None and "cannot be compiled (Panic)" in error


def compiler(program: str) -> Trial:
    """A process that runs a program in place of the compiler."""
    return Trial([sys.executable, "-S", "-c", program])


REPLY = "import sys\nfor line in sys.stdin: print('[null, 0.0]', flush=True)"


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        ("import os, signal; input(); os.kill(os.getpid(), signal.SIGXCPU)", "takes more than 1 s"),
        ("import os; input(); os.abort()", "the compiler ended"),
        ("input(); print('what?', flush=True); input()", "the compiler ended"),
        ("input(); print('[null, 1.5]', flush=True); input()", "takes more than 1 s"),
    ],
)
def test_a_grammar_that_ends_the_compiler_is_refused_for_good(program: str, complaint: str) -> None:
    with closing(GrammarJudge(trial := compiler(program))) as judge:
        with pytest.raises(InvalidParameterError, match=complaint):
            judge.check(GOOD)
        trial._command = compiler(REPLY)._command
        with pytest.raises(InvalidParameterError, match=complaint):
            judge.check(GOOD)
        if "1.5" not in program:  # that compiler still serves
            judge.check(Grammar("regex", "other"))


@pytest.mark.parametrize(
    "program",
    ["import os, signal; input(); os.kill(os.getpid(), signal.SIGKILL)", "input(); input()"],
    ids=["killed", "silent"],
)
def test_what_befalls_the_compiler_is_not_held_against_a_grammar(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_module, "MAX_WAIT_S", 0.5)
    with closing(GrammarJudge(trial := compiler(program))) as judge:
        with pytest.raises(UnavailableError, match=r"killed|not compiled within 0\.5 s"):
            judge.check(GOOD)
        monkeypatch.setattr(trial_module, "MAX_WAIT_S", 60.0)
        trial._command = compiler(REPLY)._command
        judge.check(GOOD)


def test_a_compiler_that_cannot_be_started_is_no_verdict() -> None:
    with (
        closing(GrammarJudge(Trial(["/nowhere/compiler"]))) as judge,
        pytest.raises(UnavailableError, match="cannot be started: FileNotFoundError"),
    ):
        judge.check(GOOD)


def test_the_compiler_ends_with_the_judge() -> None:
    judge = GrammarJudge(trial := Trial())
    judge.check(GOOD)
    process = trial._process
    assert process is not None and process.poll() is None
    judge.close()
    assert process.returncode is not None
    with pytest.raises(UnavailableError, match="no longer"):
        judge.check(Grammar("regex", "b"))


@pytest.mark.slow
def test_work_that_the_library_does_not_count_is_bounded() -> None:
    """The intersection of 30 expressions would take hours, and its memory grows with it."""
    parts = " & ".join(f"/[a-z]*w{number}[a-z]*/" for number in range(30))
    with closing(GrammarJudge()) as judge:
        with pytest.raises(InvalidParameterError, match=r"takes more than 1 s|cannot be compiled"):
            judge.check(Grammar("lark", f"start: T\nT: {parts}"))
        judge.check(GOOD)

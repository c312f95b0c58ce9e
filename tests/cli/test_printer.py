"""The order in which answers generated together are shown."""

from __future__ import annotations

from quire.cli.printer import StreamPrinter
from quire.engine.front.outputs import CompletionOutput, RequestOutput


def output(request: int, *texts: str, finished: bool = False) -> RequestOutput:
    completions = [
        CompletionOutput(i, text, [], finish_reason="stop" if finished else None)
        for i, text in enumerate(texts)
    ]
    return RequestOutput(str(request), None, [], completions, finished)


def test_the_first_is_live_and_others_wait_for_their_turn() -> None:
    written: list[str] = []
    printer = StreamPrinter(["A", "B"], 1, written.append)
    printer.take(output(0, "one"))
    printer.take(output(1, "uno dos"))
    assert "".join(written) == "[1/2] A\none"
    printer.take(output(1, "uno dos tres", finished=True))
    printer.take(output(0, "one two"))
    assert "".join(written) == "[1/2] A\none two"
    printer.take(output(0, "one two", finished=True))
    assert "".join(written) == "[1/2] A\none two\n\n[2/2] B\nuno dos tres\n"


def test_a_single_answer_has_no_heading() -> None:
    written: list[str] = []
    printer = StreamPrinter(["A"], 1, written.append)
    printer.take(output(0, "x"))
    printer.take(output(0, "xy", finished=True))
    assert written == ["x", "y", "\n"]


def test_long_prompts_are_cut_to_one_line() -> None:
    written: list[str] = []
    printer = StreamPrinter(["word\n" * 50, "B"], 1, written.append)
    printer.take(output(0, "x"))
    assert written[0].count("\n") == 1 and written[0].endswith("…\n") and len(written[0]) < 80


def test_empty_answers_keep_their_place() -> None:
    written: list[str] = []
    printer = StreamPrinter(["A", "B"], 2, written.append)
    printer.take(output(1, "b0", "b1", finished=True))
    printer.take(output(0, "", "a1", finished=True))
    assert "".join(written) == "[1/2] A\n\n\n[1/2 #1] A\na1\n\n[2/2] B\nb0\n\n[2/2 #1] B\nb1\n"

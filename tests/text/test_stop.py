"""Streaming through the stop matcher gives the reference cut for any
stop strings and any chunking."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timing import timed

from quire.errors import InvalidParameterError
from quire.text.stop import StopMatcher, StopStrings, cut_at_stop

STOPS = st.lists(st.text("abc", min_size=1, max_size=6), max_size=5).map(tuple)
CHUNKS = st.lists(st.text("abc", max_size=7), max_size=12)


def _stream(matcher: StopMatcher, chunks: list[str]) -> tuple[str, str | None]:
    shown = ""
    for chunk in chunks:
        emit, matched = matcher.feed(chunk)
        shown += emit
        if matched is not None:
            return shown, matched
    return shown + matcher.flush(), None


@given(STOPS, CHUNKS, st.booleans())
def test_streaming_equals_the_reference_cut(
    stop: tuple[str, ...], chunks: list[str], include: bool
) -> None:
    shown = _stream(StopMatcher(stop, include_stop_str=include), chunks)
    assert shown == cut_at_stop("".join(chunks), stop, include_stop_str=include)


@given(STOPS, CHUNKS)
def test_every_prefix_is_safe_and_little_is_held(stop: tuple[str, ...], chunks: list[str]) -> None:
    matcher, shown, fed = StopMatcher(stop), "", ""
    final, _ = cut_at_stop("".join(chunks), stop, include_stop_str=False)
    for chunk in chunks:
        emit, matched = matcher.feed(chunk)
        shown, fed = shown + emit, fed + chunk
        assert final.startswith(shown)
        if matched:
            break
        num_held = len(fed) - len(shown)
        assert num_held == matcher.num_held < max(map(len, stop), default=1)
        held = fed[len(fed) - num_held :]
        assert not held or any(each.startswith(held) for each in stop), "held without need"


@given(STOPS, CHUNKS, CHUNKS, CHUNKS)
def test_forks_are_independent(
    stop: tuple[str, ...], first: list[str], left: list[str], right: list[str]
) -> None:
    matcher = StopMatcher(stop)
    shown = "".join(matcher.feed(chunk)[0] for chunk in first)
    if matcher.matched is not None:
        return
    fork = matcher.copy()
    for each, rest in ((matcher, left), (fork, right)):
        text, matched = _stream(each, rest)
        assert (shown + text, matched) == cut_at_stop(
            "".join(first + rest), stop, include_stop_str=False
        )


def test_the_first_to_be_complete_wins_and_then_the_longest() -> None:
    assert cut_at_stop("xabcd", ("abcd", "bc"), include_stop_str=False) == ("xa", "bc")
    assert cut_at_stop("xabc", ("c", "abc"), include_stop_str=False) == ("x", "abc")
    assert cut_at_stop("xabc", ("c", "abc"), include_stop_str=True) == ("xabc", "abc")


def test_nothing_is_emitted_after_a_match() -> None:
    matcher = StopMatcher(("\n\n", "END"))
    assert matcher.feed("one\n") == ("one", None)
    assert matcher.feed("two E") == ("\ntwo ", None)
    assert matcher.feed("N") == ("", None)
    assert matcher.feed("D and more") == ("", "END")
    assert matcher.feed("more") == ("", "END")
    assert (matcher.matched, matcher.flush(), matcher.num_held) == ("END", "", 0)


def test_including_the_stop_string_holds_nothing_back() -> None:
    matcher = StopMatcher(("END",), include_stop_str=True)
    assert matcher.feed("xE") == ("xE", None)
    assert matcher.feed("NDy") == ("ND", "END")


def test_without_stop_strings_all_text_passes() -> None:
    assert StopMatcher(()).feed("anything") == ("anything", None)


def test_the_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="empty string") as caught:
        StopMatcher(("a", ""))
    assert caught.value.param == "stop"


@timed
@pytest.mark.parametrize("chunk_len", [1, 4096])
def test_matching_takes_linear_time(chunk_len: int) -> None:
    stop = (*tuple("a" * length + "b" for length in range(1, 60)), "a" * 3000 + "b")

    def seconds(num_chars: int) -> float:
        times = []
        for _ in range(3):
            matcher, start = StopMatcher(stop), time.process_time()
            for _ in range(num_chars // chunk_len):
                matcher.feed("a" * chunk_len)
            times.append(time.process_time() - start)
        return min(times)

    # Eight times the text; quadratic work would take 64 times as long.
    assert seconds(8 * 8192) < 20 * seconds(8192) + 0.02


@pytest.mark.slow
@timed
@pytest.mark.parametrize(
    "stop",
    [
        ("a" * 1023 + "b",),
        ("ab" * 500, "ba" * 500 + "c"),
        ("bb", "ab" * 40, "a" * 70, "aa" * 32 + "c"),
    ],
)
def test_t12_a_megabyte_takes_linear_time(stop: tuple[str, ...]) -> None:
    """Text that almost matches all the time, in the small pieces of a stream."""

    def cost_s(num_chars: int) -> float:
        text = ("a" * 64 + "ab" * 32) * (num_chars // 128)
        best_s = float("inf")
        for _ in range(2):
            matcher = StopMatcher(stop)
            began_s = time.process_time()
            for start in range(0, len(text), 64):
                matcher.feed(text[start : start + 64])
            best_s = min(best_s, time.process_time() - began_s)
        return best_s

    # Three doublings at 2.5 each; quadratic work would take 64 times as long.
    assert cost_s(1 << 20) < 15.6 * cost_s(1 << 17)


def test_all_answers_look_for_stop_strings_with_what_was_made_once() -> None:
    strings = StopStrings(("the end", "fin"), include_stop_str=True)
    first, second = strings.matcher(), strings.matcher()
    assert first is not None and second is not None
    assert first._automaton is second._automaton
    assert first.feed("the e") == ("the e", None) and second.feed("fin.") == ("fin", "fin")
    assert first.feed("nd") == ("nd", "the end")
    assert StopStrings().matcher() is None

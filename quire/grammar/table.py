"""The compiled grammars of one executor: made in a thread beside the steps, kept within a budget,
copied for each row.

Owns the thread and the vocabulary's trie, which is built in that thread when the first grammar
comes. A grammar that was dropped to make room is compiled again where it is needed: what is kept
never decides what is sampled.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from quire.core.grammars import Grammar, GrammarVerdict
from quire.errors import RequestError
from quire.grammar.deep_stack import with_deep_stack
from quire.grammar.matcher import Matcher

if TYPE_CHECKING:
    from quire.grammar.backend import NativeVocabulary, Vocabulary

MAX_GRAMMARS = 256
MAX_TEXT_BYTES = 4 << 20
"""Of the texts of the grammars kept; compiled ones take about thirty times as much."""
_COMPILE_TIMEOUT_S = 30.0
"""For a grammar that is compiled while its row waits;
the limits of the compiler end it a hundred times sooner."""


class GrammarTable:
    """Grammars by what they say. `make_vocabulary` is called once, in the compiling thread; it may
    take seconds, and raises RequestError where the model's texts are not known here.
    """

    def __init__(self, make_vocabulary: Callable[[], Vocabulary] | None = None) -> None:
        self._make_vocabulary = make_vocabulary or _no_vocabulary
        self._vocabulary: NativeVocabulary | None = None
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()
        self._lock = threading.Lock()
        """Guards `_compiled`."""
        self._asked: queue.SimpleQueue[Grammar | None] = queue.SimpleQueue()
        self._verdicts: queue.SimpleQueue[GrammarVerdict] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._num_pending = 0

    def __len__(self) -> int:
        return len(self._compiled)

    def ask(self, grammars: Sequence[Grammar]) -> None:
        """Begin to compile; a verdict on each follows."""
        for grammar in grammars:
            self._asked.put(grammar)
            self._num_pending += 1
        if grammars and self._thread is None:
            self._thread = with_deep_stack(self._run, "quire-grammars")

    def take_verdicts(self, wait_s: float = 0.0) -> tuple[GrammarVerdict, ...]:
        """Return what has been found out since the last call; waits so long for a first one,
        where one is to come."""
        if not self._num_pending:
            return ()
        found: list[GrammarVerdict] = []
        with contextlib.suppress(queue.Empty):
            if wait_s:
                found.append(self._verdicts.get(timeout=wait_s))
            while True:
                found.append(self._verdicts.get_nowait())
        self._num_pending -= len(found)
        return tuple(found)

    def begin(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the grammar's start. Raises RequestError where it cannot be
        compiled."""
        with self._lock:
            compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compile_now(grammar)
        assert self._vocabulary is not None
        return Matcher(compiled.deep_copy(), self._vocabulary.texts)

    def close(self) -> None:
        """End the thread, once it is done with what it has."""
        self._asked.put(None)

    def _run(self) -> None:
        while (grammar := self._asked.get()) is not None:
            error = None
            try:
                self._compile(grammar)
            except RequestError as problem:
                error = str(problem)
            # A bug of ours or a panic of the library's ends the requests that wait for it, and no
            # others.
            except BaseException as problem:
                error = f"the grammar could not be compiled: {type(problem).__name__}"
            self._verdicts.put(GrammarVerdict(grammar, error))

    def _compile(self, grammar: Grammar) -> Any:
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
                return compiled
        # in its thread, where nothing waits for the import of a compiler that may never be needed
        from quire.grammar.backend import NativeVocabulary, compile_grammar

        if self._vocabulary is None:
            self._vocabulary = NativeVocabulary(self._make_vocabulary())
        compiled = compile_grammar(grammar, self._vocabulary)
        with self._lock:
            self._compiled[grammar] = compiled
            num_bytes = sum(len(each.text) for each in self._compiled)
            while len(self._compiled) > 1 and (
                len(self._compiled) > MAX_GRAMMARS or num_bytes > MAX_TEXT_BYTES
            ):
                dropped, _ = self._compiled.popitem(last=False)
                num_bytes -= len(dropped.text)
        return compiled

    def _compile_now(self, grammar: Grammar) -> Any:
        """Compile and wait: for a row that is resumed long after its grammar was dropped."""
        outcome: list[Any] = []

        def compile_it() -> None:
            try:
                outcome.append(self._compile(grammar))
            except BaseException as error:
                outcome.append(error)

        with_deep_stack(compile_it, "quire-grammar").join(_COMPILE_TIMEOUT_S)
        if not outcome or isinstance(outcome[0], BaseException):
            raise RequestError("the form that the answer must have cannot be compiled")
        return outcome[0]


def _no_vocabulary() -> Vocabulary:
    raise RequestError("this engine has no tokenizer, without which no output can be given a form")

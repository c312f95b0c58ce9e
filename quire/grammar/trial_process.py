"""The other end of `trial`: reads grammars, a JSON list a line, and writes what is wrong with each
and what it cost. Ends with its input, and by the limits that it sets itself.
"""

from __future__ import annotations

import json
import resource
import sys
import time

from quire.core.grammars import Grammar
from quire.errors import InvalidParameterError
from quire.grammar.backend import validate
from quire.grammar.deep_stack import with_deep_stack
from quire.grammar.trial import MAX_BYTES, MAX_COST_S


def main() -> None:
    """Serve until the input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _lower(resource.RLIMIT_AS, MAX_BYTES)
    with_deep_stack(_serve, "quire-grammar-trial").join()


def _serve() -> None:
    for line in sys.stdin.buffer:
        kind, text = json.loads(line)
        # The limit is in whole seconds of all that the process ever took.
        _lower(resource.RLIMIT_CPU, int(time.process_time() + MAX_COST_S) + 2)
        began_s = time.thread_time()
        error = _error(Grammar(kind, text))
        seconds = time.thread_time() - began_s
        sys.stdout.buffer.write(json.dumps([error, seconds]).encode() + b"\n")
        sys.stdout.buffer.flush()


def _error(grammar: Grammar) -> str | None:
    try:
        validate(grammar)
    except InvalidParameterError as error:
        return str(error)
    except BaseException as error:  # a panic of the library's is no Exception
        return f"structured_outputs: the grammar cannot be compiled ({type(error).__name__})"
    return None


def _lower(what: int, limit: int) -> None:
    """Set a soft limit, as far as the hard one allows."""
    _, hard = resource.getrlimit(what)
    soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(what, (soft, hard))


if __name__ == "__main__":
    main()

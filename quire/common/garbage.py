"""Python's cycle collector where it would find nothing: while modules are imported, and in a
process that serves for long, which must not look again and again at what stays for good.

A full collection goes through every object there is, for a tenth of a second in a process that has
imported what a server needs, and all streams wait for it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (10_000, 5, 10)
"""New objects before the youngest are looked at, and how many such looks before an older
generation's. One step of 200 streams makes some 1,500 objects that the next one frees without any
collector: with Python's 700, the collector took 7 % of the HTTP process. With more than these, what
is left in cycles lies about longer.
"""


def settle() -> None:
    """Call once the process is ready: what exists now stays,
    and only what comes later is watched."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


@contextmanager
def uncollected() -> Iterator[None]:
    """Run without passes of the collector: imports make a million objects, of which none is
    garbage, and a full pass behind torch's takes as long as importing half of Quire."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

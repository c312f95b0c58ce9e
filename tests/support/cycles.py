"""What only the collector of reference cycles would free:
a server makes it look so rarely that it might as well leak."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_cycles_of(*kinds: type) -> Iterator[None]:
    """What is dropped inside must be free at once, as far as it is of these kinds."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kept = [each for each in gc.garbage if isinstance(each, kinds)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not kept, f"{len(kept)} objects refer to each other, e.g. a {type(kept[0]).__name__}"

"""The C library's heap in a process that computes: memory that a step borrows is the system's again
after it.

glibc keeps freed blocks of up to 32 MiB for itself once it has seen such sizes, and what is kept
lies in pieces that larger ones do not fit into. So one process took 296 to 361 MiB for the same
work, differently each time; with this it took 303 to 309.
"""

from __future__ import annotations

import ctypes
import logging
import os

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MAPPED_BYTES = 4 << 20
"""Blocks from this size on are mapped one by one. Smaller ones are many,
and mapping costs a fault for each of their pages."""
_KEPT_BYTES = 32 << 20
"""Freed memory at the heap's end that stays for the next step."""


def return_large_blocks() -> None:
    """Call before weights are loaded. Does nothing where the user has tuned the allocator,
    or where it is not glibc's."""
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        tune = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    if not (tune(_M_MMAP_THRESHOLD, _MAPPED_BYTES) and tune(_M_TRIM_THRESHOLD, _KEPT_BYTES)):
        logger.debug("the allocator takes no settings")

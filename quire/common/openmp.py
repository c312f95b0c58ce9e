"""How long OpenMP's idle threads spin before they sleep.

libgomp reads its environment once, when it is loaded (with torch), and by default lets a thread spin for some 300,000 rounds
at every barrier. On a machine that has anything else to do, spinning threads keep the ones they wait for off the cores: with
one foreign process on two cores, decoding a small model was 3 to 12 times faster with this setting than without it.
"""

from __future__ import annotations

import os
import sys

_SPIN_COUNT = "2000"
"""About 0.1 ms: longer than the gaps between the kernels of a step, far shorter than a scheduler's time slice."""


def limit_spinning() -> None:
    """Ask for short spinning, unless the user has said otherwise or libgomp is loaded already."""
    if "torch" not in sys.modules and not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = _SPIN_COUNT

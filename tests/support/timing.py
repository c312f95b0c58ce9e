"""A mark for tests that bound times: what is too slow is too slow every time,
what a busy machine holds up once is not."""

from __future__ import annotations

import pytest

timed = pytest.mark.flaky(reruns=4, reruns_delay=3)
"""Fails only if five attempts do, seconds apart."""

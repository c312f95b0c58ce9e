"""Errors as other processes see them."""

from __future__ import annotations

import copy
import pickle

import pytest

from quire.errors import EngineError, InvalidParameterError, QuireError, UnavailableError
from quire.executor.interface import StepLostError


@pytest.mark.parametrize(
    "error",
    [
        EngineError("gone"),
        InvalidParameterError("wrong", param="top_p"),
        UnavailableError("full", state="overloaded", retry_after_s=3),
        StepLostError("lost", costs_requests=True),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel_between_processes(error: QuireError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert (again.args, vars(again), str(again)) == (error.args, vars(error), str(error))

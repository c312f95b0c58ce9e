"""What is said where some of several engines did not carry out a command."""

from __future__ import annotations

from collections.abc import Mapping

from quire.errors import EngineError, NotAvailableError, QuireError, UnavailableError


def like(error: QuireError, message: str) -> QuireError:
    """Return an error of one engine as one of all, with what is to be said of it."""
    if isinstance(error, UnavailableError):
        return UnavailableError(message, state=error.state, retry_after_s=error.retry_after_s)
    return (NotAvailableError if isinstance(error, NotAvailableError) else EngineError)(message)


def not_awake(failed: Mapping[int, QuireError]) -> str:
    """Name the engines that could not be woken."""
    return "; ".join(f"replica {each} does not wake up: {error}" for each, error in failed.items())


def divided(failed: Mapping[int, QuireError]) -> str:
    """Name the engines that could not go back to the weights that the others have."""
    named = "; ".join(f"replica {each}: {error}" for each, error in failed.items())
    return (
        "replicas compute with different weights, and the former ones cannot be loaded "
        f"({named}); update the weights again, or restart the server"
    )

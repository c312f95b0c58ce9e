"""Every error Quire raises on purpose, as one tree.

A `QuireError` is a mistake of a user, a file or a machine: its message says what
is wrong, with the value, and what to do about it. A bug of our own is an `assert` or a plain Python
exception, never a `QuireError`.

    QuireError
    ├── ConfigError              an option, or a combination of options, that cannot work
    │   ├── CapacityError        the memory given does not hold what was requested
    │   ├── NotAvailableError    a feature that this version does not have
    │   └── UnsupportedModelError  a model, or a key of its config.json, that is not implemented
    ├── ModelNotFoundError       no such folder, file, shipped model or reachable hub name
    ├── CheckpointError          a model file that is malformed, truncated or inconsistent
    ├── RequestError             one request cannot be served; other requests are not affected
    │   ├── InvalidParameterError  a sampling parameter or an argument out of its range
    │   └── PromptTooLongError   the prompt exceeds the context, or the whole KV pool
    └── EngineError              the engine itself failed or was closed
        └── UnavailableError     nothing can be taken now; the same request may succeed later
"""

from __future__ import annotations

import copyreg


class QuireError(Exception):
    """Base of all errors that are not bugs of Quire's own."""

    def __reduce__(self) -> tuple[object, ...]:  # whatever a constructor needs
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConfigError(QuireError):
    """An option, or a combination of options, that cannot work."""


class CapacityError(ConfigError):
    """The memory given does not hold what was requested."""


class NotAvailableError(ConfigError):
    """A feature that others have and this version does not; the message says what to do instead."""


class UnsupportedModelError(ConfigError):
    """A model, or a key of its `config.json`, that Quire does not implement."""


class ModelNotFoundError(QuireError):
    """No such folder, file, shipped model or reachable hub name."""


class CheckpointError(QuireError):
    """A model file that is malformed, truncated or inconsistent."""


class RequestError(QuireError):
    """One request cannot be served; other requests are not affected."""

    place: str | None = None
    """Which of several prompts it is about (`prompts[3]`), where a call was given several."""

    def __str__(self) -> str:
        text = super().__str__()
        return text if self.place is None else f"{self.place}: {text}"


class InvalidParameterError(RequestError):
    """A sampling parameter or an argument out of its range.

    `param` is the name of the offending parameter, for programs that report it (an HTTP body, a
    form).
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(RequestError):
    """The prompt exceeds the context length, or could never fit the whole KV pool."""


class EngineError(QuireError):
    """The engine itself failed or was closed."""


class UnavailableError(EngineError):
    """Nothing can be taken now: the engine is full, draining or gone. The same request may succeed
    later.

    `state` says which ("overloaded", "draining", "failed" or "closed"); `retry_after_s` when to try
    again, if ever.
    """

    def __init__(self, message: str, *, state: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.state = state
        self.retry_after_s = retry_after_s

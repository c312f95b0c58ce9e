"""Methods and classes that scripts for other engines use and that this version does not have:
each raises one clear line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from quire.errors import EngineError, NotAvailableError


def absent(name: str, advice: str) -> Callable[..., NoReturn]:
    """Return a method `name` that raises NotAvailableError with what to do instead,
    whatever it is given."""

    def method(*_: Any, **__: Any) -> NoReturn:
        raise NotAvailableError(f"{name}() is not available in this version; {advice}")

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"Not available in this version; raises NotAvailableError: {advice}."
    return method


class BoundToProcess:
    """What has an engine's memory and threads, so that no copy of it can be of use."""

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise EngineError(
            f"{name} can be neither pickled nor copied: its memory and threads are of this "
            f"process; send the model's name and the options, and make {name} of them there"
        )


NO_PROFILE = "profile the whole program (py-spy, perf), or measure with quire bench"
NO_MODEL_CALL = "the model is a declaration and compiled kernels, not a module"


def refuse_media(mm_processor_kwargs: object) -> None:
    """Raises NotAvailableError where options of media are given."""
    if mm_processor_kwargs:
        raise NotAvailableError(
            "mm_processor_kwargs is not available in this version; images are prepared as the "
            "model's preprocessor_config.json says"
        )


class ModelRegistry:
    """Models that a program brings along. Calling anything of it raises NotAvailableError."""

    register_model = staticmethod(
        absent("ModelRegistry.register_model", "declare the model in quire/models, see docs/howto")
    )
    get_supported_archs = staticmethod(
        absent("ModelRegistry.get_supported_archs", "see the registry in quire/models")
    )

"""The types of what a script gives to `LLM.chat`, looked at before a template meets it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.errors import InvalidParameterError


def check_chat(messages: object, tools: object, template: object, kwargs: object) -> None:
    """Raise InvalidParameterError naming the argument that is of another type."""
    _require("messages", messages, Sequence)
    for name, value, kinds in (
        ("tools", tools, (list, tuple)),
        ("chat_template", template, (str,)),
        ("chat_template_kwargs", kwargs, (Mapping,)),
    ):
        if value is not None:
            _require(name, value, *kinds)


def _require(name: str, value: object, *kinds: type) -> None:
    if not isinstance(value, kinds):
        known = " or ".join(kind.__name__ for kind in kinds)
        raise InvalidParameterError(
            f"{name} must be a {known}, not {type(value).__name__}", param=name
        )

"""What a plan says of speculation."""

from __future__ import annotations

from collections.abc import Iterator

from quire.config.speculation import SpeculationConfig


def speculation_decisions(config: SpeculationConfig | None) -> Iterator[tuple[str, str, str]]:
    """Name, value and reason of what is decided."""
    if config is None:
        return
    source = "the request's own text"
    if config.method == "suffix" and config.suffix_decoding_max_cached_requests:
        source += " and recent outputs of its tenant"
    yield (
        "speculation",
        f"{config.method}, {config.max_tokens}",
        f"given; at most so many draft tokens of a sequence in a step, from {source}",
    )

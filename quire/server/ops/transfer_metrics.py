"""What `/metrics` says of keys and values that pass between engines."""

from __future__ import annotations

from quire.engine.loop.counters import EngineCounters


def staged_bytes(status: EngineCounters) -> tuple[str, float]:
    """Return the text and the value of what is kept for other engines now."""
    return "Bytes of prompts kept for other engines now.", float(status.num_staged_kv_bytes)


def transfer_counts(status: EngineCounters) -> tuple[tuple[str, str, float], ...]:
    """Return name, text and value of each total."""
    return (
        (
            "kv_transfer_prompts_staged",
            "Prompts that were kept for other engines.",
            status.num_staged_prompts,
        ),
        (
            "kv_transfer_prompts_pulled",
            "Prompts whose KV came from another engine.",
            status.num_pulled_prompts,
        ),
        ("kv_transfer_bytes_pulled", "Bytes of these.", status.num_pulled_kv_bytes),
        (
            "kv_transfer_failures",
            "Transfers that came to nothing, so that prompts were computed.",
            status.num_failed_kv_transfers,
        ),
        (
            "kv_transfer_late",
            "Of these, given up because they took too long.",
            status.num_late_kv_transfers,
        ),
    )

"""Every allocation of a block fails once: the control plane may be half-way through a change then,
and is replaced.

Nobody waits for ever, nobody gets a wrong answer, no block is lost, and the engine serves on.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engines import run_all

from quire.core.kvcache.audit import audit_manager
from quire.core.kvcache.pool import BlockPool
from quire.core.params import SamplingParams
from quire.engine.loop.engine import Engine

PREFIX = list(range(3, 24))
PROMPTS = [PREFIX, [*PREFIX, 40, 41], [50, 51, 52], [*PREFIX[:13], 60], list(range(100, 130))]


def _outcome(engine: Engine) -> list[tuple[str | None, list[list[int]]]]:
    """Run the workload to its end: what each request ended with, and its sequences' tokens."""
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            n=1 + number % 3, max_tokens=7, seed=number, ignore_eos=True, detokenize=False
        )
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    outputs = run_all(engine)
    assert set(outputs) == {str(number) for number in range(len(PROMPTS))}
    assert all(output.finished for output in outputs.values())
    return [
        (output.error, [each.token_ids for each in output.outputs])
        for _, output in sorted(outputs.items())
    ]


def _failing_at(number: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Make the allocation of that number (from 0) raise; how many there have been is counted."""
    take, count = BlockPool.take, 0

    def fail_once(pool: BlockPool) -> int:
        nonlocal count
        count += 1
        if count == number + 1:
            raise MemoryError("no block, says the test")
        return take(pool)

    monkeypatch.setattr(BlockPool, "take", fail_once)
    return lambda: count


def test_every_single_allocation_may_fail(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        "num_blocks": 20,
        "block_size": 4,
        "max_model_len": 64,
        "max_num_batched_tokens": 24,
        "skip_tokenizer_init": True,
    }
    clean = _outcome(make_engine(**options))
    assert all(error is None for error, _ in clean)
    engine, number = make_engine(**options), 0
    while True:
        with monkeypatch.context() as patch:
            count = _failing_at(number, patch)
            outcome = _outcome(engine)
        for (error, tokens), (_, expected) in zip(outcome, clean, strict=True):
            assert error is not None or tokens == expected
            assert all(
                got == wanted[: len(got)] for got, wanted in zip(tokens, expected, strict=False)
            )
        manager = engine.scheduler.manager
        assert manager.pool.num_free == manager.pool.num_blocks
        audit_manager(manager, [])
        if count() <= number:
            break
        assert any(error is not None for error, _ in outcome)
        assert not list(manager.index.nodes()), (
            "the next round begins like this one, with an empty cache"
        )
        number += 1
    assert number > 20
    assert _outcome(engine) == clean

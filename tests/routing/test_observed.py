"""A replica's cache as it tells of it: chunks of bytes count as cached while their blocks are."""

from __future__ import annotations

import pytest

from quire.router.feed import FeedBatch, FeedEvent, take
from quire.routing import observed
from quire.routing.ask import Ask
from quire.routing.choices import make_balancer
from quire.routing.observed import NUM_UNDER_WAY, ObservedMemory


def ask(name: str, *chunks: int) -> Ask:
    """A prompt of chunks of 100 estimated tokens."""
    return Ask(None, chunks, 100, 100 * len(chunks), 10, name)


def batch(*events: FeedEvent, is_snapshot: bool = False) -> FeedBatch:
    return FeedBatch("kv_events", "log", 1, 16, is_snapshot, list(events))


def prompt(name: str, num_tokens: int, *blocks: str) -> FeedEvent:
    return FeedEvent("PromptBlocks", list(blocks), f"{name}.1f", num_tokens)


BLOCKS = [f"b{place}" for place in range(20)]


def followed() -> ObservedMemory:
    memory = ObservedMemory(1000)
    take(memory, batch(is_snapshot=True))
    return memory


def test_chunks_are_cached_while_their_blocks_are() -> None:
    memory = followed()
    memory.add(ask("r", 1, 2, 3, 4))
    assert memory.match((1, 2, 3, 4)) == 4, "on its way"
    # in truth 320 tokens: a chunk is five blocks
    take(memory, batch(prompt("r", 320, *BLOCKS), FeedEvent("BlockStored", BLOCKS)))
    assert memory.match((1, 2, 3, 4)) == 4
    take(memory, batch(FeedEvent("BlockRemoved", BLOCKS[12:])))
    assert memory.match((1, 2, 3, 4)) == 2 and memory.match((1, 9)) == 1
    take(memory, batch(FeedEvent("BlockStored", BLOCKS[12:15])))
    assert memory.match((1, 2, 3, 4)) == 3
    take(memory, batch(FeedEvent("BlockStored", BLOCKS[:5]), is_snapshot=True))
    assert memory.match((1, 2, 3, 4)) == 1
    take(memory, batch(FeedEvent("AllBlocksCleared")))
    assert memory.match((1, 2, 3, 4)) == 0


def test_a_prompt_that_is_never_computed_counts_for_a_while() -> None:
    memory = followed()
    memory.add(ask("lost", 1, 2))
    for number in range(NUM_UNDER_WAY - 1):
        memory.add(ask(f"r{number}", 100 + number))
    assert memory.match((1, 2)) == 2
    memory.add(ask("one more", 7))
    assert memory.match((1, 2)) == 0


def test_without_events_the_router_guesses() -> None:
    memory = ObservedMemory(1000)
    memory.add(ask("r", 1, 2))
    take(memory, batch(is_snapshot=True))
    memory.unfollow()
    assert memory.match((1, 2, 3)) == 2
    memory.clear()
    assert memory.match((1, 2, 3)) == 0


def test_what_is_remembered_of_prompts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed, "MAX_ASKED_CHUNKS", 10)
    memory = followed()
    for number in range(5):
        memory.add(ask(f"r{number}", *range(4 * number, 4 * number + 4)))
    take(memory, batch(FeedEvent("BlockStored", BLOCKS), prompt("r2", 320, *BLOCKS)))
    take(memory, batch(prompt("r4", 320, *BLOCKS)))
    for number in range(NUM_UNDER_WAY):  # whatever is still counted as under way is so no more
        memory.add(ask(f"s{number}", 1000 + number))
    assert memory.match((8, 9, 10, 11)) == 0, "forgotten before its blocks were told"
    assert memory.match((16, 17, 18, 19)) == 4
    memory.unfollow()
    assert memory.match((16, 17, 18, 19)) == 4, "guessed: it was sent there"
    take(memory, batch(prompt("s3", 320, *BLOCKS), is_snapshot=True))
    assert memory.match((1003,)) == 0, "what was sent before it was lost from sight is unknown"


def test_a_replica_that_has_evicted_a_prompt_is_not_taken_to_have_it() -> None:
    balancer = make_balancer("kv-aware")
    loads = [balancer.add(name) for name in ("a", "b")]
    for each in loads:
        memory = balancer.memory(each.name)
        assert memory is not None
        take(memory, batch(is_snapshot=True))
    share, num_cached = balancer.send(ask("first", *range(8)), loads)
    home = share.load
    share.end()
    memory = balancer.memory(home.name)
    assert memory is not None and num_cached == 0
    take(memory, batch(prompt("first", 320, *BLOCKS), FeedEvent("BlockStored", BLOCKS)))
    share, num_cached = balancer.send(ask("again", *range(8)), loads)
    share.end()
    assert share.load is home and num_cached == 799
    take(memory, batch(FeedEvent("AllBlocksCleared"), prompt("again", 320)))
    assert balancer.send(ask("later", *range(8)), loads)[1] == 0


def test_what_a_tier_below_the_pool_has_counts_as_cached() -> None:
    memory = followed()
    memory.add(ask("r", 1, 2))
    take(memory, batch(prompt("r", 160, *BLOCKS[:10]), FeedEvent("BlockStored", BLOCKS[:10])))
    take(memory, batch(FeedEvent("BlockStored", BLOCKS[:10], medium="disk")))
    take(memory, batch(FeedEvent("BlockStored", BLOCKS[:5], medium="host")))
    take(memory, batch(FeedEvent("AllBlocksCleared")))
    assert memory.match((1, 2)) == 2 and len(memory) == 10
    take(memory, batch(FeedEvent("BlockRemoved", BLOCKS[:10], medium="disk")))
    assert memory.match((1, 2)) == 1
    take(memory, batch(FeedEvent("BlockRemoved", BLOCKS[:1], medium="pool")))
    assert memory.match((1, 2)) == 1
    take(memory, batch(FeedEvent("BlockRemoved", BLOCKS[:5], medium="host")))
    assert memory.match((1, 2)) == 0
    snapshot = [FeedEvent("BlockStored", BLOCKS[:10], medium="disk")]
    take(memory, batch(*snapshot, is_snapshot=True))
    assert memory.match((1, 2)) == 2

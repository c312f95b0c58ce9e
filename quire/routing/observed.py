"""What a replica's prefix cache holds, as the replica says: events about blocks, brought together
with the chunks of prompts that were sent there.

A router knows a prompt as bytes, a replica as tokens; neither says what it knows. What joins them
is the request: an event lists the blocks of its prompt, and a chunk of bytes belongs to the block
at the same share of the prompt's length. That is exact enough to compare replicas by. A chunk
counts as cached while its block is, or while its prompt is one of the last that were sent there,
which may not be computed yet. As long as a replica is not followed, the router's own guess counts.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from quire.routing.ask import Ask
from quire.routing.memory import PrefixMemory

NUM_UNDER_WAY = 64
"""Of the last prompts: more than are computed between two batches of events."""
MAX_ASKED, MAX_ASKED_CHUNKS = 4096, 1 << 18
"""Requests whose events may yet come, and chunks of them together (some 10 MB)."""


POOL = "pool"
"""The tier that a block is in where nothing else is said; from those below it is restored."""


class ObservedMemory:
    """One replica's cache. Bounded as `PrefixMemory` is, and by `MAX_ASKED_CHUNKS`."""

    def __init__(self, max_chunks: int) -> None:
        self._guess = PrefixMemory(max_chunks)
        self._max_chunks = max_chunks
        self._asked: OrderedDict[str, Ask] = OrderedDict()
        self._num_asked_chunks = 0
        self._under_way: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        """Chunks of the prompts that are not yet known to be computed, by their requests."""
        self._num_under_way = Counter[int]()
        self._awaited: dict[str, str] = {}
        """By the last block of a prompt: whose it is."""
        self._blocks: OrderedDict[int, str] = OrderedDict()
        """By the chunk: the block that holds its last token."""
        self._stored: dict[str, set[str]] = {}
        """Blocks by the tier that has them."""
        self.is_followed = False
        """Whether the replica tells what it holds."""

    def __len__(self) -> int:
        return len(set().union(*self._stored.values()))

    @property
    def num_under_way(self) -> int:
        """Prompts that were sent there and are not yet known to be computed."""
        return len(self._under_way)

    def match(self, chunks: Sequence[int]) -> int:
        """Return how many chunks of a prompt's beginning it should have."""
        if not self.is_followed:
            return self._guess.match(chunks)
        for number, chunk in enumerate(chunks):
            block = self._blocks.get(chunk)
            is_stored = block is not None and self._is_stored(block)
            if not is_stored and chunk not in self._num_under_way:
                return number
        return len(chunks)

    def add(self, ask: Ask) -> None:
        """Note a prompt that is sent there."""
        self._guess.add(ask.chunks)
        if not self.is_followed or not ask.request_id or not ask.chunks:
            return
        self._take(ask.request_id)
        self._asked[ask.request_id] = ask
        self._num_asked_chunks += len(ask.chunks)
        while len(self._asked) > MAX_ASKED or self._num_asked_chunks > MAX_ASKED_CHUNKS:
            self._take(next(iter(self._asked)))
        self._arrive(ask.request_id)
        self._under_way[ask.request_id] = ask.chunks
        self._num_under_way.update(ask.chunks)
        if len(self._under_way) > NUM_UNDER_WAY:
            self._arrive(next(iter(self._under_way)))

    def clear(self) -> None:
        """Forget everything: the replica was replaced, or is not followed any more."""
        self._guess.clear()
        self.unfollow()

    def unfollow(self) -> None:
        """Go back to guessing."""
        self.is_followed = False
        self._asked.clear()
        self._num_asked_chunks = 0
        self._under_way.clear()
        self._num_under_way.clear()
        self._awaited.clear()
        self._stored.clear()
        self._blocks.clear()

    # -- what the replica says
    # ----------------------------------------------------------------------------------------------

    def reset(self, blocks: Iterable[str]) -> None:
        """Take a snapshot: these blocks, and no others."""
        self._stored.clear()
        self.stored(blocks)
        self.is_followed = True

    def stored(self, blocks: Iterable[str], medium: str = POOL) -> None:
        """Note blocks that a tier has from now on."""
        tier = self._stored.setdefault(medium, set())
        for block in blocks:
            tier.add(block)
            if block in self._awaited:
                self._arrive(self._awaited.pop(block))

    def removed(self, blocks: Iterable[str], medium: str = POOL) -> None:
        """Note blocks that a tier has no more."""
        self._stored.get(medium, set()).difference_update(blocks)

    def cleared(self) -> None:
        """Note that the pool has none any more."""
        self._stored.pop(POOL, None)

    def _is_stored(self, block: str) -> bool:
        return any(block in tier for tier in self._stored.values())

    def asked(
        self, request_id: str, blocks: Sequence[str], num_tokens: int, block_size: int
    ) -> None:
        """Note of which blocks the prompt of a request consists."""
        ask = self._take(request_id)
        if ask is None or num_tokens <= 0 or ask.num_prompt_tokens <= 0:
            return
        if not blocks or self._is_stored(blocks[-1]):
            self._arrive(request_id)
        elif request_id in self._under_way:
            self._awaited[blocks[-1]] = request_id
        tokens_per_chunk = num_tokens * ask.chunk_tokens / ask.num_prompt_tokens
        for number in range(len(ask.chunks) - 1, -1, -1):
            place = int((number + 1) * tokens_per_chunk) // block_size - 1
            if place < len(blocks):
                self._blocks[ask.chunks[number]] = blocks[max(0, place)]
                self._blocks.move_to_end(ask.chunks[number])
        while len(self._blocks) > self._max_chunks:
            self._blocks.popitem(last=False)
        while len(self._awaited) > MAX_ASKED:
            del self._awaited[next(iter(self._awaited))]

    def _take(self, request_id: str) -> Ask | None:
        ask = self._asked.pop(request_id, None)
        self._num_asked_chunks -= 0 if ask is None else len(ask.chunks)
        return ask

    def _arrive(self, request_id: str) -> None:
        """Count a prompt as under way no more."""
        for chunk in self._under_way.pop(request_id, ()):
            self._num_under_way[chunk] -= 1
            if not self._num_under_way[chunk]:
                del self._num_under_way[chunk]

"""The scarce things a sequence needs before it may run, behind one small protocol.

The scheduler asks every resource whether it can admit a sequence, and reserves from all or from
none. A new scarce thing (adapter slots, an encoder cache) is a new `Resource`, not a branch in the
scheduler; what must only be made ready is a `Prerequisite` (`quire.core.scheduler.prerequisites`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from quire.core.kvcache.manager import NO_MATCH, KVCacheManager, PrefixMatch
from quire.core.plan import BlockCopy, TokenLogprobs
from quire.core.request import Sequence


class Resource(Protocol):
    """One scarce thing."""

    def refusal(self, sequence: Sequence) -> str | None:
        """Return why the sequence cannot have its share now; None if it can. Changes nothing."""
        ...

    def reserve(self, sequence: Sequence) -> None:
        """Take the share; only right after `refusal` returned None."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Give everything back."""
        ...


class RowSlots:
    """Rows of the worker's batch. The lowest free row is handed out first,
    so that rows stay dense."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows that are free."""
        return len(self._free)

    def refusal(self, sequence: Sequence) -> str | None:
        return None if self._free else f"all {self.num_rows} rows are taken"

    def reserve(self, sequence: Sequence) -> None:
        sequence.row = self._free.pop()

    def release(self, sequence: Sequence) -> None:
        self._free.append(sequence.row)
        sequence.row = -1


class _Offer(NamedTuple):
    """What a sequence would get if it were admitted now."""

    sequence: Sequence
    match: PrefixMatch
    records: list[TokenLogprobs | None]
    """Prompt log-probabilities that come with the blocks and that the request lacks."""


class KVBlocks:
    """Blocks of the KV pool, with everything a sequence's known tokens will need promised at
    admission.

    Because of that promise a prefill, once admitted, never waits for memory; only growth beyond the
    known tokens competes.
    """

    def __init__(self, manager: KVCacheManager, num_watermark_blocks: int) -> None:
        self.manager = manager
        self.num_reserved = 0
        """Blocks promised and not yet taken; always at most `manager.pool.num_free`."""
        self.num_queried_tokens = self.num_hit_tokens = 0
        self._num_watermark_blocks = num_watermark_blocks
        self._offer: _Offer | None = None
        self._num_matched: tuple[Sequence | None, int] = (None, 0)
        self._copies: list[BlockCopy] = []

    @property
    def num_available(self) -> int:
        """Free blocks that are neither reserved nor needed for references that count as blocks (see
        `quire.core.kvcache.manager`): below zero where forks have made many of these."""
        manager = self.manager
        return manager.pool.num_free - self.num_reserved - manager.num_extra_references

    def forget_matches(self) -> None:
        """Forget what was found in the cache: it is about to be emptied."""
        self._offer, self._num_matched = None, (None, 0)

    def take_copies(self) -> list[BlockCopy]:
        """Return copies that adoptions since the last call need."""
        copies, self._copies = self._copies, []
        return copies

    def refusal(self, sequence: Sequence) -> str | None:
        manager = self.manager
        match, records = self._match(sequence)
        self._num_matched = (sequence, len(match.nodes))
        watermark = self._num_watermark_blocks if manager.pool.num_used else 0
        num_places = manager.num_places_for(len(sequence.token_ids))
        num_wanted = manager.num_wanted(match, num_places)
        if num_wanted + watermark > self.num_available:
            self._offer = None
            return (
                f"needs {num_wanted} blocks, {max(0, self.num_available - watermark)} are available"
            )
        self._offer = _Offer(sequence, match, records)
        return None

    def reserve(self, sequence: Sequence) -> None:
        offer, self._offer = self._offer, None
        assert offer is not None and offer.sequence is sequence, (
            "reserve() without a preceding refusal()"
        )
        match = offer.match
        self._copies += self.manager.adopt(sequence.table, match)
        sequence.num_computed = sequence.num_planned = match.num_tokens
        self.settle(sequence)
        sequence.request.prompt_logprobs.extend(offer.records)
        metrics = sequence.request.metrics
        if metrics.first_scheduled_s is None:
            metrics.num_prefix_hit_tokens = match.num_tokens
            self.num_queried_tokens += sequence.num_prompt_tokens
            self.num_hit_tokens += match.num_tokens

    def settle(self, sequence: Sequence) -> None:
        """Promise a sequence what it still needs for its known tokens, no more and no less."""
        num_places = self.manager.num_places_for(len(sequence.token_ids))
        num_promised = self.manager.num_promised(sequence.table, num_places)
        self.num_reserved += num_promised - sequence.num_reserved
        sequence.num_reserved = num_promised

    def release(self, sequence: Sequence) -> None:
        keep = sequence.request.error is None
        self.num_reserved -= sequence.num_reserved
        sequence.num_reserved = 0
        self.manager.release(sequence.table, sequence.content_ids, sequence.num_computed, keep=keep)
        sequence.table.chain = sequence.keys.root if sequence.keys is not None else None
        sequence.table.num_chained = 0
        sequence.num_computed = sequence.num_planned = 0

    def _match(self, sequence: Sequence) -> tuple[PrefixMatch, list[TokenLogprobs | None]]:
        """Return what the cache holds of the sequence, and the prompt log-probabilities that come
        with it.

        The last token is always computed, since its logits are needed.
        """
        request = sequence.request
        if sequence.keys is None or not request.reads_cache:
            return NO_MATCH, []
        match = self.manager.match(sequence.keys, sequence.content_ids, len(sequence.token_ids) - 1)
        if request.scoring is None:
            return match, []
        records = self._shared_records(sequence, match)
        num_scored = len(request.prompt_logprobs) + len(records)
        if num_scored < sequence.num_prompt_tokens and num_scored <= match.num_tokens:
            # The token after the last one taken from the cache is scored by a position that will
            # not be computed, so the match must end one token before the last scored one.
            match = self.manager.match(sequence.keys, sequence.content_ids, num_scored - 1)
        return match, records

    def _shared_records(self, sequence: Sequence, match: PrefixMatch) -> list[TokenLogprobs | None]:
        """Return records of the prompt tokens that follow those the request has scored,
        as far as whole shared blocks have them."""
        request, size = sequence.request, self.manager.block_size
        num_known, records = len(request.prompt_logprobs), list[TokenLogprobs | None]()
        for place, node in enumerate(match.nodes):
            num_missing = (place + 1) * size - num_known - len(records)
            if num_missing > 0:
                if node.records is None or node.scoring != request.scoring:
                    break
                records.extend(node.records[-num_missing:])
        # beyond, another prompt's tokens are this answer's
        return records[: sequence.num_prompt_tokens - num_known]

    def num_matched_blocks(self, sequence: Sequence) -> int:
        """Whole blocks that the cache held of the sequence when it was last asked about."""
        known, num_matched = self._num_matched
        return num_matched if known is sequence else len(self._match(sequence)[0].nodes)

    def publish(self, sequence: Sequence) -> list[int]:
        """Publish what has become full; returns the entries of the
        table that a merge has changed."""
        if sequence.keys is None:
            return []
        first = sequence.table.num_chained
        merged = self.manager.publish(
            sequence.table, sequence.keys, sequence.content_ids, sequence.num_computed
        )
        if sequence.request.scoring is not None:
            self._attach_records(sequence, first)
        if first * self.manager.block_size < sequence.num_prompt_tokens:
            self._count_written(sequence)
        return merged

    def _count_written(self, sequence: Sequence) -> None:
        """Count prompt tokens that the cache holds by now and did not hold before the request; not
        those of the block that the answer fills, so that the count is known with the first token.
        """
        metrics, table, size = sequence.request.metrics, sequence.table, self.manager.block_size
        # where publishing has ended, the last place's digest is taken by other content
        num_places = table.num_chained - (table.chain is None)
        end = min(num_places, sequence.num_prompt_tokens // size) * size
        num_written = end - metrics.num_prefix_hit_tokens
        metrics.num_cache_write_tokens = max(metrics.num_cache_write_tokens, num_written)

    def _attach_records(self, sequence: Sequence, first: int) -> None:
        size, records = self.manager.block_size, sequence.request.prompt_logprobs
        for place in range(first, sequence.table.num_chained):
            block = sequence.table.blocks[place * self.manager.num_groups]
            node = self.manager.index.node_of(block)
            slot_records = records[place * size : (place + 1) * size]
            if node is not None and len(slot_records) == size:
                node.records, node.scoring = tuple(slot_records), sequence.request.scoring


class PrefixTurns:
    """Implements `Turn`: a sequence waits for its next block where another sequence is computing it
    right now.

    It is handed back when the block is published, or will not be, because its owner was preempted
    or aborted.
    """

    REASON = "waits for a shared prefix that another request is computing"

    def __init__(self, blocks: KVBlocks) -> None:
        self._blocks = blocks
        self._owners: dict[bytes, Sequence] = {}
        self._waiting: dict[bytes, list[Sequence]] = {}

    def refusal(self, sequence: Sequence) -> str | None:
        return None if self._awaited(sequence) is None else self.REASON

    def park(self, sequence: Sequence) -> None:
        """Keep a refused sequence until its block is ready."""
        digest = self._awaited(sequence)
        assert digest is not None
        self._waiting.setdefault(digest, []).append(sequence)

    def unpark(self, sequence: Sequence) -> None:
        """Forget a parked sequence that was aborted."""
        for parked in self._waiting.values():
            if sequence in parked:
                parked.remove(sequence)

    def parked(self) -> list[Sequence]:
        return [sequence for parked in self._waiting.values() for sequence in parked]

    def reserve(self, sequence: Sequence) -> None:
        """Announce the blocks that the sequence is about to compute."""
        if sequence.keys is not None:
            for digest in sequence.keys.digests[sequence.table.num_chained :]:
                self._owners.setdefault(digest, sequence)

    def published(self, sequence: Sequence, first: int) -> list[Sequence]:
        """Return the sequences that waited for blocks, as those of `sequence` from `first` on are
        published."""
        assert sequence.keys is not None
        return self._withdraw(sequence, sequence.keys.digests[first : sequence.table.num_chained])

    def withdraw(self, sequence: Sequence) -> list[Sequence]:
        """Return the sequences that need another owner, as `sequence` stops computing."""
        if sequence.keys is None:
            return []
        return self._withdraw(sequence, sequence.keys.digests[sequence.table.num_chained :])

    def _withdraw(self, sequence: Sequence, digests: list[bytes]) -> list[Sequence]:
        freed: list[Sequence] = []
        for digest in digests:
            if self._owners.get(digest) is sequence:
                del self._owners[digest]
                freed.extend(self._waiting.pop(digest, ()))
        return freed

    def _awaited(self, sequence: Sequence) -> bytes | None:
        keys, request = sequence.keys, sequence.request
        if (
            not self._owners
            or keys is None
            or not request.reads_cache
            or request.scoring is not None
        ):
            return None
        place = self._blocks.num_matched_blocks(sequence)
        if place >= len(keys.digests) or (place + 1) * keys.block_size >= len(sequence.token_ids):
            return None
        digest = keys.digests[place]
        return digest if digest in self._owners else None

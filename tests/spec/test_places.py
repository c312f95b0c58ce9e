"""Which blocks a draft model has computed, as plans give them out, share them and restore them."""

from __future__ import annotations

from quire.core.plan import (
    AppendedBlocks,
    BlockCopy,
    NewRow,
    ReplacedBlock,
    RowSampling,
    RowWork,
    StepPlan,
)
from quire.core.tiers import TIERS, TierOrder
from quire.core.transfers import TRANSFERS, TransferOrder
from quire.spec.places import DraftPlaces
from quire.worker.rows import RowTable


class Places:
    """One row table of blocks of four, and what is copied."""

    def __init__(self) -> None:
        self.rows = RowTable(2, 4)
        self.copies: list[BlockCopy] = []
        self.places = DraftPlaces(self.rows, 16, 2, self.copies.extend)

    def apply(self, plan: StepPlan) -> None:
        self.places.begin(plan)
        self.rows.apply(plan)

    def enter(self, row: int, blocks: tuple[int, ...], num_tokens: int, start: int) -> None:
        tokens = tuple(range(num_tokens))
        new = NewRow(row, "", tokens, num_tokens, blocks, RowSampling())
        work = RowWork(row, start, num_tokens - start)
        self.apply(StepPlan(1, (work,), new_rows=(new,)))

    def first(self, row: int) -> int:
        return self.places.span(row).first

    def compute(self, row: int, drafted: tuple[int, ...] = ()) -> None:
        span = self.places.span(row)
        self.places.computed(span, span.num_known, drafted)


def test_what_is_computed_is_shared_and_what_is_given_out_again_is_not() -> None:
    both = Places()
    both.enter(0, (3, 5, 7), 10, 0)
    assert both.first(0) == 0
    both.compute(0)
    both.enter(1, (3, 5, 8), 11, 8)  # finds two blocks
    assert both.first(1) == 8
    both.enter(1, (3, 5, 8), 11, 4)  # the second is written anew
    assert both.first(1) == 4
    both.compute(1)
    both.apply(StepPlan(2, copies=(BlockCopy(3, 5),)))
    assert both.first(1) == 4
    both.compute(1)
    restored = TierOrder("place", 1, blocks=((3,),))
    both.apply(StepPlan(3, orders={TIERS: (restored,)}))
    assert both.first(1) == 0
    both.compute(1)
    pulled = TransferOrder("place", 1, blocks=((5,),))
    both.apply(StepPlan(4, orders={TRANSFERS: (pulled,)}))
    assert both.first(1) == 4


def test_drafts_that_were_right_are_kept_and_move_to_the_pool() -> None:
    one = Places()
    one.enter(0, (3, 5), 7, 0)
    one.compute(0, drafted=(7, 8, 60))
    one.apply(StepPlan(2, appended_blocks=(AppendedBlocks(0, (9,)),)))
    for token_id in (7, 8, 9):
        one.rows.append_token(0, token_id)
    span = one.places.span(0)
    assert (span.first, span.num_whole) == (9, 2)
    own = one.places.own_blocks(0).tolist()
    assert one.copies == [BlockCopy(own[0], 5), BlockCopy(own[1], own[0])]
    one.places.computed(span, 10)
    one.apply(StepPlan(3, replaced_blocks=(ReplacedBlock(0, 1, 11),)))
    assert one.copies[2:] == [BlockCopy(5, 11)]
    assert one.first(0) == 9  # the last token's position, for its states

"""What is in doubt is dropped from the tiers, whatever happens to the orders and to the disk."""

from __future__ import annotations

from quire.core.kvcache.manager import KVCacheManager
from quire.core.kvcache.prefix import PrefixNode
from quire.core.scheduler.resources import KVBlocks
from quire.core.scheduler.tiers import RestoreCosts, StoredPrefixes, TierStats
from quire.core.step_cost import NUM_COSTS, StepCostModel, UnitCosts
from quire.core.tiers import TierNews, TierOrder


class Stored:
    """One block that is stored, and the control plane's half that knows it."""

    def __init__(self) -> None:
        self.manager = KVCacheManager(8, 4)
        costs = RestoreCosts(StepCostModel(UnitCosts(*(1.0,) * NUM_COSTS)), 0.0)
        self.half = StoredPrefixes(costs, TierStats())
        self.half.attach(KVBlocks(self.manager, 0))
        self.keys = self.manager.index.keys(())
        self.node = self.publish()
        assert [each.verb for each in self.orders()] == ["begin", "keep"]
        self.hear(
            TierNews("complete", 1), TierNews("known", 0, (self.node.digest,), 1, medium="disk")
        )
        assert self.half.num_stored(self.keys, 0, 1) == 1

    def publish(self) -> PrefixNode:
        """Compute the block, and give it back."""
        table, tokens = self.manager.new_table(()), [1, 2, 3, 4]
        self.manager.extend(table, 0, 4)
        self.manager.publish(table, self.keys, tokens, 4)
        node = table.chain
        assert node is not None
        self.manager.release(table, tokens, 4)
        return node

    def doubt(self) -> None:
        """A sequence that has computed on the block has failed."""
        assert self.manager.forget_node(self.node) == 1

    def orders(self) -> list[TierOrder]:
        return [TierOrder._make(each) for each in self.half.take_orders(0.0)]

    def hear(self, *news: TierNews) -> None:
        self.half.take_news(news, 0.0)

    def drops(self, orders: list[TierOrder]) -> list[bytes]:
        return [key.digest for each in orders if each.verb == "drop" for key in each.keys]


def test_a_drop_that_no_plan_has_carried_outlives_the_end_of_storing() -> None:
    run = Stored()
    run.doubt()
    run.hear(TierNews("off"))
    assert run.drops(run.orders()) == [run.node.digest]


def test_what_comes_to_be_in_doubt_after_the_end_of_storing_is_dropped() -> None:
    run = Stored()
    run.hear(TierNews("off"))
    run.doubt()
    assert run.drops(run.orders()) == [run.node.digest]


def test_a_drop_whose_plan_is_lost_is_ordered_before_the_new_list() -> None:
    run = Stored()
    run.doubt()
    assert run.drops(run.orders()) == [run.node.digest]
    run.half.lose_flights()
    orders = run.orders()
    assert [each.verb for each in orders] == ["drop", "begin"]
    assert run.drops(orders) == [run.node.digest]


def test_what_is_computed_anew_is_not_taken_for_what_was_in_doubt() -> None:
    run = Stored()
    run.doubt()
    run.orders()
    run.publish()
    assert [each.verb for each in run.orders()] == ["drop", "keep"]

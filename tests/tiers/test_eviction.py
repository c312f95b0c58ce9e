"""What is removed first: the least worth of segments, and of blocks those that nothing continues."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.core.step_cost import NUM_COSTS, StepCostModel, UnitCosts, block_costs
from quire.tiers.eviction import LeavesFirst, Standing, least_worth_first

ALONE = frozenset[int]()


def test_of_equal_cost_the_least_recently_used_goes_first() -> None:
    standings = {number: Standing(2.0, number, ALONE) for number in (5, 3, 9)}
    assert least_worth_first(standings) == [9, 5, 3]


def test_worth_is_cost_over_the_uses_since() -> None:
    standings = {1: Standing(2.9, 3, ALONE), 2: Standing(2.0, 2, ALONE)}
    assert least_worth_first(standings) == [1, 2]
    standings[1] = Standing(3.1, 3, ALONE)
    assert least_worth_first(standings) == [2, 1]


def test_what_others_continue_stays_as_long_as_they() -> None:
    standings = {
        1: Standing(1.0, 30, ALONE),
        2: Standing(1.0, 20, ALONE),
        3: Standing(1.0, 10, frozenset({1})),
    }
    assert least_worth_first(standings) == [2, 3, 1]


def test_segments_that_continue_each_other_are_ordered_nevertheless() -> None:
    standings = {1: Standing(1.0, 2, frozenset({2})), 2: Standing(1.0, 1, frozenset({1, 7}))}
    assert sorted(least_worth_first(standings)) == [1, 2]


@given(
    st.lists(
        st.tuples(st.floats(0.5, 50.0), st.frozensets(st.integers(0, 9), max_size=3)), max_size=10
    )
)
def test_no_segment_goes_before_one_that_continues_it(
    drawn: list[tuple[float, frozenset[int]]],
) -> None:
    """Later segments continue earlier ones, as they are written."""
    standings = {
        number: Standing(cost, 10 - number, frozenset(each for each in continued if each < number))
        for number, (cost, continued) in enumerate(drawn)
    }
    order = least_worth_first(standings)
    assert sorted(order) == sorted(standings)
    for number, (_, _, continued) in standings.items():
        assert all(order.index(number) < order.index(each) for each in continued)


def test_a_block_costs_more_the_more_are_before_it_up_to_the_longest_sequence() -> None:
    cost_of = block_costs(StepCostModel(UnitCosts(*(1.0,) * NUM_COSTS)), 16, 128)
    costs = [cost_of(place) for place in range(8)]
    assert costs == sorted(costs) and costs[0] < costs[-1] == cost_of(2**32 - 1)


@given(st.lists(st.tuples(st.sampled_from(["add", "use", "remove", "first"]), st.integers(0, 15))))
def test_leaves_go_first_in_the_order_of_their_uses(steps: list[tuple[str, int]]) -> None:
    """Block n continues (n - 1) // 2, stored or not. Compared with a search through all."""
    order, used = LeavesFirst(), dict[int, int]()
    for now, (verb, number) in enumerate(steps):
        if verb == "add" and number not in used:
            order.add(bytes([number]), bytes([(number - 1) // 2 if number else 99]))
            used[number] = now
        elif verb == "use" and number in used:
            order.use(bytes([number]))
            used[number] = now
        elif verb == "remove" and number in used:
            order.remove(bytes([number]))
            del used[number]
        elif verb == "first" and used:
            leaves = [each for each in used if not {2 * each + 1, 2 * each + 2} & used.keys()]
            assert order.first() == bytes([min(leaves, key=used.__getitem__)])

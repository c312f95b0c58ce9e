"""Totals are the sums of their entries, whatever is done in whatever order."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.quota.ledger import Ledger

OWNERS = st.sampled_from(["a", "b", "c"])
NAMES = st.sampled_from(["x", "y", "z"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), OWNERS, NAMES, st.integers(0, 1 << 40)),
        st.tuples(st.sampled_from(["drop", "touch"]), OWNERS, NAMES, st.just(0)),
        st.tuples(st.just("drop_owner"), OWNERS, st.just(""), st.just(0)),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(STEPS)
def test_no_sequence_of_calls_leaves_a_total_that_is_not_the_sum(
    steps: list[tuple[str, str, str, int]],
) -> None:
    ledger: Ledger[str, str] = Ledger()
    entries: OrderedDict[tuple[str, str], int] = OrderedDict()
    for what, owner, name, num_bytes in steps:
        if what == "put":
            ledger.put(owner, name, num_bytes)
            entries[owner, name] = num_bytes
            entries.move_to_end((owner, name))
        elif what == "drop":
            assert ledger.drop(owner, name) == entries.pop((owner, name), 0)
        elif what == "touch" and (owner, name) in entries:
            ledger.touch(owner, name)
            entries.move_to_end((owner, name))
        elif what == "drop_owner":
            ledger.drop_owner(owner)
            entries = OrderedDict((key, size) for key, size in entries.items() if key[0] != owner)
        _compare(ledger, entries)


def _compare(ledger: Ledger[str, str], entries: OrderedDict[tuple[str, str], int]) -> None:
    assert (ledger.num_entries, ledger.num_bytes) == (len(entries), sum(entries.values()))
    assert set(ledger.owners()) == {owner for owner, _ in entries}
    for owner in "abc":
        mine = [name for each, name in entries if each == owner]
        assert ledger.names(owner) == mine and ledger.entries_of(owner) == len(mine)
        assert ledger.bytes_of(owner) == sum(entries[owner, name] for name in mine)
        assert all(ledger.size(owner, name) == entries.get((owner, name)) for name in "xyz")
        assert not mine or ledger.oldest(owner) == mine[0]

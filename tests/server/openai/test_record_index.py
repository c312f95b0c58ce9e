"""Lists in parts are the list, whichever way they are walked,
and narrowing them leaves nothing out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.api.openai import record_index
from quire.server.api.openai.record_index import RecordIndex


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["p", "q"]), max_size=30),
    st.sets(st.integers(0, 29)),
    st.integers(1, 7),
    st.booleans(),
    st.sampled_from(["", "p", "q"]),
)
def test_walking_in_parts_gives_everything_once(
    tags: list[str], dropped: set[int], limit: int, is_ascending: bool, tag: str
) -> None:
    index = RecordIndex()
    for number, each in enumerate(tags):
        index.add(f"r{number}", each)
    for number in dropped:
        index.drop(f"r{number}")
    wanted = [
        f"r{number}"
        for number, each in enumerate(tags)
        if number not in dropped and tag in ("", each)
    ]
    found: list[str] = []
    has_more = True
    while has_more:
        ids, has_more = index.page(
            found[-1] if found else "", limit, is_ascending=is_ascending, tag=tag
        )
        assert len(ids) <= limit and (len(ids) == limit or not has_more)
        found += ids
    assert found == (wanted if is_ascending else wanted[::-1])


def test_numbers_only_grow() -> None:
    index = RecordIndex()
    assert [index.add("a", ""), index.add("b", "", 7), index.add("c", "")] == [1, 7, 8]
    index.drop("c")
    assert index.add("d", "") == 9
    index.set_tag("d", "done")
    assert index.ids(without=frozenset({"done"})) == ["a", "b"]
    with pytest.raises(KeyError):
        index.page("e", 5, is_ascending=True)


@settings(deadline=None)
@given(st.integers(0, 20), st.integers(1, 7), st.booleans(), st.data())
def test_a_list_can_be_walked_while_it_is_deleted(
    count: int, limit: int, is_ascending: bool, data: st.DataObject
) -> None:
    index = RecordIndex()
    names = [f"r{number}" for number in range(count)]
    for name in names:
        index.add(name, "")
    found: list[str] = []
    has_more, after = True, ""
    while has_more:
        ids, has_more = index.page(after, limit, is_ascending=is_ascending)
        for name in ids:
            if data.draw(st.booleans()):
                index.drop(name)
                index.drop(name)  # as two clients may
        after = ids[-1] if ids else ""
        found += ids
    assert found == (names if is_ascending else names[::-1])


def test_so_many_places_of_deleted_records_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_index, "MAX_DROPPED", 2)
    index = RecordIndex()
    for name in "abcd":
        index.add(name, "")
    for name in "abc":
        index.drop(name)
    assert index.page("b", 5, is_ascending=True) == (["d"], False)
    with pytest.raises(KeyError):
        index.page("a", 5, is_ascending=True)

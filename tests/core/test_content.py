"""What stands at each position: whole digests, told apart wherever a prefix ends."""

from __future__ import annotations

from array import array

from quire.core.content import Content, content_bytes, content_ids, short_ids
from quire.core.images import Image, PlacedImage, contents_of
from quire.core.kvcache.manager import KVCacheManager
from quire.core.tiers import StoredKey
from quire.tiers.segments import CacheIdentity, decode, encode

DIGEST = bytes(range(32))
LATE = DIGEST[:31] + b"x"
"""Agrees in all bits but the last ones."""


def _ids(digest: bytes, num_places: int = 10, text: tuple[int, ...] = (3, 4)) -> tuple[int, ...]:
    tokens = [*text, *[9] * num_places, *text]
    found = content_ids(tokens, [Content(len(text), len(text) + num_places, digest)])
    assert found is not None
    return found


def test_the_first_place_of_an_image_has_its_whole_digest() -> None:
    ids, theirs = _ids(DIGEST), _ids(LATE)
    assert ids[2] != theirs[2] and ids[2] < -(2**31) > theirs[2]
    assert all(-(2**31) < each < 0 for each in ids[3:12])
    assert ids[:2] == ids[12:] == (3, 4), "text is its tokens"
    assert content_ids([1], []) is None
    image = Image(DIGEST, b"", 1, 1, 10)
    assert contents_of([PlacedImage(2, image)]) == (Content(2, 12, DIGEST),)


def test_no_prefix_is_shared_by_digests_that_agree_in_their_first_31_bits() -> None:
    """Each of the first blocks ends within the image; a table that publishes one place of it must
    not meet the other image's block."""
    manager = KVCacheManager(16, 3)
    first, second = _ids(DIGEST), _ids(LATE)
    tables = []
    for ids in (first, second):
        keys, table = manager.index.keys(()), manager.new_table(())
        match = manager.match(keys, ids, len(ids) - 1)
        assert match.num_tokens == (0 if ids is first else 2), "the text before the image"
        manager.extend(table, 0, len(ids))
        assert not manager.publish(table, keys, ids, len(ids)), "nothing is merged"
        tables.append((keys, table))
    assert tables[0][0].digests[0] != tables[1][0].digests[0]


def test_an_image_of_one_place_is_told_by_all_of_its_digest() -> None:
    assert _ids(DIGEST, 1)[2] != _ids(LATE, 1)[2]


def test_bytes_are_equal_for_equal_ids_alone() -> None:
    one, other = _ids(DIGEST)[2], _ids(LATE)[2]
    sign = -(2**31)
    rows = [
        (1, 2, 3), (1, 2, -3), (one, 2, 3), (other, 2, 3), (2, one, 3), (one, other, 3),
        (other, one, 3), (one, one, 3), (sign + 1, 2, 3),
    ]  # fmt: skip
    assert len({content_bytes(each) for each in rows}) == len(rows)
    assert content_bytes((1, 2, -3)) == array("i", (1, 2, -3)).tobytes()


def test_no_word_of_a_digest_is_what_stands_for_a_digest() -> None:
    assert min(_ids(bytes(32))[3:12]) > -(2**31)


def test_ids_that_are_shown_have_32_bits() -> None:
    assert short_ids((5, -7)) == (5, -7) and short_ids(()) == ()
    shown = short_ids(_ids(DIGEST))
    array("i", shown)
    assert all(each < 0 for each in shown[2:12])


def test_a_stored_block_is_believed_by_the_whole_digest() -> None:
    identity = CacheIdentity(DIGEST, 3, 8)
    keys = [StoredKey(bytes(16), bytes(16), _ids(each)[:3]) for each in (DIGEST, LATE)]
    same_bits = keys[1]._replace(content_ids=(3, 4, keys[0].content_ids[2] - (1 << 31)))
    record = memoryview(b"".join(encode(keys[0], memoryview(bytes(8)))))
    assert len(record) == identity.record_bytes
    payload = decode(record, keys[0])
    assert payload is not None and bytes(payload) == bytes(8)
    assert decode(record, keys[1]) is None and decode(record, same_bits) is None

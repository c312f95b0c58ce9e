"""The prefix index: what is found, what is not, and that a digest alone is never believed."""

from array import array

import pytest

from quire.core.kvcache.prefix import PrefixIndex, PrefixNode, common_prefix_len, keyed_digest

SIZE = 4


def _publish(
    index: PrefixIndex, tokens: list[int], blocks: list[int], namespace: tuple[str, ...] = ()
) -> PrefixNode:
    keys = index.keys(namespace)
    keys.extend_to(tokens)
    node = keys.root
    for content, digest, block in zip(keys.tokens, keys.digests, blocks, strict=True):
        inserted = index.insert_full(node, content, digest, [block])
        assert inserted is not None
        node = inserted
    return node


def _lookup(index: PrefixIndex, tokens: list[int], namespace: tuple[str, ...] = ()) -> list[int]:
    keys = index.keys(namespace)
    keys.extend_to(tokens)
    node, blocks = keys.root, []
    for content, digest in zip(keys.tokens, keys.digests, strict=True):
        child = index.child(node, content, digest)
        if child is None:
            break
        node = child
        blocks += child.blocks
    return blocks


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(SIZE, keyed_digest(b"key"))


def test_a_published_chain_is_found_block_by_block(index: PrefixIndex) -> None:
    _publish(index, [1, 2, 3, 4, 5, 6, 7, 8], [10, 11])
    assert _lookup(index, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == [10, 11]
    assert _lookup(index, [1, 2, 3, 4, 5, 6, 7, 9]) == [10]
    assert _lookup(index, [5, 6, 7, 8]) == []
    assert len(index) == 2 and 10 in index and 12 not in index


def test_namespaces_never_share(index: PrefixIndex) -> None:
    _publish(index, [1, 2, 3, 4], [0], ("tenant", "adapter"))
    for other in ((), ("tenant",), ("tenantadapter",), ("adapter", "tenant"), ("tenant\0adapter",)):
        assert _lookup(index, [1, 2, 3, 4], other) == []
    assert _lookup(index, [1, 2, 3, 4], ("tenant", "adapter")) == [0]


def test_different_namespaces_have_different_digests(index: PrefixIndex) -> None:
    names = [(), ("",), ("a", "b"), ("a\0b",), ("ab",), ("\ud800",)]
    assert len({index.root(name).digest for name in names}) == len(names)


def test_another_key_gives_other_digests() -> None:
    assert keyed_digest(b"a")(b"", b"x") != keyed_digest(b"b")(b"", b"x")
    assert len(keyed_digest(b"a")(b"", b"x")) == 16


def test_a_collision_costs_a_miss_and_never_returns_other_content() -> None:
    index = PrefixIndex(SIZE, lambda parent, content: bytes(16))
    _publish(index, [1, 2, 3, 4], [0])
    assert _lookup(index, [9, 9, 9, 9]) == []
    keys = index.keys(())
    keys.extend_to([9, 9, 9, 9])
    assert index.insert_full(keys.root, keys.tokens[0], keys.digests[0], [1]) is None
    assert _lookup(index, [1, 2, 3, 4]) == [0]


def test_the_same_tokens_after_another_prefix_collide_without_harm() -> None:
    index = PrefixIndex(SIZE, lambda parent, content: content[:16])
    _publish(index, [1, 2, 3, 4], [0])
    node = index.child(
        index.root(()), (1, 2, 3, 4), index.digest(b"", array("i", (1, 2, 3, 4)).tobytes())
    )
    assert node is not None
    assert index.child(node, node.tokens, node.digest) is None, "found under the wrong parent"


def test_hits_are_counted_to_the_token(index: PrefixIndex) -> None:
    _publish(index, [1, 2, 3, 4], [0])
    index.insert_partial(index.root(()), (1, 2, 7), [1])
    root = index.root(())
    for tokens, block, length in (
        ((1, 2, 3, 9), 0, 3), ((1, 2, 7, 7), 1, 3), ((1, 2), 0, 2), ((1, 9), 0, 1),
        ((1, 2, 5), 0, 2), ((0,), -1, 0),
    ):  # fmt: skip
        node, found = index.closest_child(root, tokens)
        assert found == length
        assert node is None or common_prefix_len(node.tokens, tokens) == length
        assert (node.blocks[0] in (0, 1)) if node is not None else block == -1


def test_a_partial_block_that_adds_nothing_is_not_published(index: PrefixIndex) -> None:
    _publish(index, [1, 2, 3, 4], [0])
    assert not index.insert_partial(index.root(()), (1, 2), [1])
    assert index.insert_partial(index.root(()), (1, 3), [1])
    assert not index.insert_partial(index.root(()), (1, 3), [2])


def test_removing_a_block_removes_what_continued_it(index: PrefixIndex) -> None:
    _publish(index, list(range(12)), [0, 1, 2])
    index.remove(1)
    assert _lookup(index, list(range(12))) == [0]
    assert 2 not in index
    index.remove(1)  # not cached any more: nothing to do
    index.remove(0)
    assert len(index) == 0 and not index._roots, "an empty namespace is remembered"


def test_a_root_that_was_dropped_and_made_anew_still_works_for_old_holders(
    index: PrefixIndex,
) -> None:
    old = index.keys(())
    _publish(index, [1, 2, 3, 4], [0])
    index.remove(0)
    _publish(index, [5, 6, 7, 8], [1])
    old.extend_to([5, 6, 7, 8])
    assert index.child(old.root, old.tokens[0], old.digests[0]) is index.node_of(1)


def test_keys_are_computed_once_and_forks_grow_apart(index: PrefixIndex) -> None:
    calls: list[bytes] = []

    def digest(parent: bytes, content: bytes) -> bytes:
        calls.append(content)
        return bytes([len(calls)]) * 16

    counting = PrefixIndex(SIZE, digest)
    keys = counting.keys(())
    keys.extend_to([1, 2, 3, 4, 5])
    keys.extend_to([1, 2, 3, 4, 5, 6, 7, 8])
    assert len(calls) == 3  # the root's and two blocks'
    twin = keys.copy()
    twin.extend_to([1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0])
    assert len(keys.digests) == 2 and len(twin.digests) == 3

"""What is kept stays within everyone's share, whoever uses it next."""

from __future__ import annotations

from quire.core.kvcache.kept import TENANT_SHARE, KeptNodes
from quire.core.kvcache.pool import BlockPool
from quire.core.kvcache.prefix import PrefixIndex, PrefixNode, keyed_digest


def test_a_tenant_has_its_share_alone_where_others_bring_its_blocks_back() -> None:
    pool = BlockPool(16)
    index = PrefixIndex(4, keyed_digest(b""), (None, 8))
    node, nodes = index.root(()), list[PrefixNode]()
    blocks = [pool.take() for _ in range(8)]
    for number in range(4):
        tokens = (number,) * 4
        digest = index.digest(node.digest, repr(tokens).encode())
        made = index.insert_full(node, tokens, digest, blocks[2 * number : 2 * number + 2])
        assert made is not None
        node = made
        nodes.append(made)
    for number in range(2):  # a window has passed what these have of it
        index.remove(blocks[2 * number + 1])
    kept = KeptNodes(pool)
    kept.keep(nodes[:3], "a", 10.0)
    assert kept.num_of("a") == 4 == TENANT_SHARE * 16
    for number in range(2):
        index.restore(nodes[number], 1, blocks[2 * number + 1])
    kept.keep(nodes[:2], "b", 5.0)
    assert kept.num_of("a") <= TENANT_SHARE * 16 and kept.num_of("b") == 0

"""Agreement without talking: the order of replicas for a key, the same in every router.

Rendezvous hashing (Thaler and Ravishankar, 1998): every replica's score for the key is a hash of
both, and the highest wins. Adding or removing a replica moves only the keys that it wins or won.
Loads are bounded as in consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam,
2018): a replica at its bound is passed over for the next in the order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from quire.routing.load import ReplicaLoad


def score(key: bytes, name: str) -> int:
    """Return a replica's score for a key."""
    digest = hashlib.blake2b(name.encode(), key=key[:64], digest_size=8).digest()
    return int.from_bytes(digest, "little")


def ranked(key: bytes, loads: Sequence[ReplicaLoad]) -> list[ReplicaLoad]:
    """Return the replicas in the order of a key, the best first."""
    return sorted(loads, key=lambda load: (-score(key, load.name), load.name))


def with_room(loads: Sequence[ReplicaLoad], factor: float) -> list[ReplicaLoad]:
    """Return the replicas that would have no more than `factor` of the mean of requests in flight
    with one more, in the order given. There is always one: the least loaded.
    """
    num_requests = 1 + sum(load.num_requests for load in loads)
    mean = num_requests / len(loads)
    most = max(math.ceil(mean), math.floor(factor * mean))
    return [load for load in loads if load.num_requests + 1 <= most]

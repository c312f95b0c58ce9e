"""What a policy knows of a request, and the digests of a prompt's beginnings.

A prompt is cut into chunks of one size; the digest of a chunk covers everything before it as well,
so that equal digests mean equal beginnings. The unfinished last chunk has none: the next turn of a
conversation would change it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

MAX_CHUNKS = 4096
"""Of one prompt: with chunks of 512 bytes, its first 2 MiB. What lies behind tells nothing apart
that the policies could use, and a body must not buy unbounded work."""
_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, as far as choosing a replica goes. Token counts may be estimates."""

    session: str | None = None
    chunks: tuple[int, ...] = ()
    """Digests of the prompt's beginnings, shortest first."""
    chunk_tokens: int = 128
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    """Expected of the answer."""
    request_id: str = ""
    """By which the replica will name it, where it says what it caches."""

    def num_uncached(self, num_chunks: int) -> int:
        """Return prompt tokens to be computed where a cache has so many chunks."""
        return max(1, self.num_prompt_tokens - num_chunks * self.chunk_tokens)


def digests(seed: bytes, data: bytes, chunk_bytes: int) -> tuple[int, ...]:
    """Return the digests of `data`'s beginnings; `seed` is what must be equal besides."""
    state = hashlib.blake2b(seed, digest_size=_DIGEST_BYTES)
    view, found = memoryview(data), []
    num_chunks = min(len(data) // chunk_bytes, MAX_CHUNKS)
    for start in range(0, num_chunks * chunk_bytes, chunk_bytes):
        state.update(view[start : start + chunk_bytes])
        found.append(int.from_bytes(state.digest(), "little"))
    return tuple(found)

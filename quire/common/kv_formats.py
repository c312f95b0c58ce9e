"""How the KV cache can store keys and values: names, and the bytes that each takes. No torch:
planning needs only this.

A *row* is the keys, or the values, of one token and one KV head. "float32" and "bfloat16" store its
D elements as they are. "int8" and "fp8" (e4m3: 1 sign, 4 exponent and 3 mantissa bits, finite only)
store D bytes and then the row's scale as a float32, the largest magnitude over the format's largest
number; so each token and head uses the whole range of its byte. What the arithmetic is, is said by
`quire.kernels.interface.Kernels.write_kv`.

fp8 is scaled as int8 is although a floating format has a range of its own: unscaled e4m3 ends at
448, which keys with a large bias could exceed, and counts in steps of 2**-9 near zero, too coarse
for small values. Four bytes a row avoid both.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

ByteForm = Literal["int8", "fp8"]
"""Formats that store a byte an element."""


class KVFormat(NamedTuple):
    """One way to store rows."""

    name: str
    element_bytes: int
    scale_bytes: int = 0
    """Bytes of a row beside its elements."""

    def row_bytes(self, head_size: int) -> int:
        """Return bytes of the keys, or of the values, of one token and one KV head."""
        return head_size * self.element_bytes + self.scale_bytes


KV_FORMATS = {
    each.name: each
    for each in (
        KVFormat("float32", 4),
        KVFormat("bfloat16", 2),
        KVFormat("int8", 1, 4),
        KVFormat("fp8", 1, 4),
    )
}

OTHER_NAMES = {"fp8_e4m3": "fp8", "fp8_per_token_head": "fp8", "int8_per_token_head": "int8"}
"""Other names for the same, as vLLM has them."""

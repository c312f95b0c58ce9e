"""Steps that a GPU records and replays: how large they may be, and the memory that they take."""

from __future__ import annotations

from typing import NamedTuple

from quire.common.gpu_bounds import MAX_PARTIAL_BYTES
from quire.common.graph_shapes import num_shapes
from quire.common.numbers import ceil_div, format_bytes
from quire.engine.plan.memory import layer_bytes
from quire.models.declaration import DecoderSpec
from quire.models.tensors import DTYPE_BYTES

GRAPH_BYTES_PER_LAYER = 64 << 10
"""What a recorded graph keeps on the device for the launches of one layer. Estimated;
the engine counts what it really takes."""
MIN_GRAPH_TOKENS = 256
"""Steps of up to so many tokens are recorded, and those in which all sequences decode."""
GRAPH_POOL_BYTES = 64 << 20
"""What torch's allocator takes beyond the tensors of recorded steps:
it asks the driver for pieces of 2 and 20 MiB."""
SHARED_BYTES_PER_LAYER = 1 << 30
"""A step that would read so many bytes of shared prefixes again, for each layer, is computed
without a graph, which reads them once. Estimated: 0.25 ms at 4 TB/s, about what the launches of one
layer cost the host beyond a graph's.
"""


class GraphPlan(NamedTuple):
    """Steps that a GPU replays from recorded graphs."""

    max_num_tokens: int
    input_bytes: int
    """Of their inputs and outputs, which keep their places."""
    max_bytes: int
    """Of all graphs together, with the temporary tensors that they share."""
    bytes_each: int
    """Of these, what the driver keeps for one graph's launches."""
    min_shared_blocks: int
    """A step whose neighbours share so many blocks is computed without a graph."""
    scratch_bytes: int
    """Of the KV block that padded tokens write to."""

    @property
    def num_bytes(self) -> int:
        """All memory that recording takes, besides what steps take anyway."""
        return self.max_bytes + self.input_bytes + self.scratch_bytes


class KVGroups(NamedTuple):
    """Groups of layers with block tables of their own."""

    num: int
    block_bytes: int
    block_size: int


def plan_graphs(
    spec: DecoderSpec, num_tokens: int, longest: int, groups: KVGroups
) -> tuple[GraphPlan, str]:
    """Plan the graphs of steps of up to `num_tokens` tokens, of sequences of up to `longest`;
    returns what they come to, too."""
    row_bytes = DTYPE_BYTES["float32"] * (
        spec.hidden_size + groups.num * (ceil_div(longest, groups.block_size) + 2) + 6
    )
    num_graphs = num_shapes(num_tokens, longest)
    bytes_each = len(spec.blocks) * GRAPH_BYTES_PER_LAYER
    max_bytes = (
        layer_bytes(spec, num_tokens)
        + MAX_PARTIAL_BYTES
        + GRAPH_POOL_BYTES
        + num_graphs * bytes_each
    )
    min_shared_blocks = (
        len(spec.blocks) * SHARED_BYTES_PER_LAYER // (groups.num * groups.block_bytes)
    )
    input_bytes, scratch_bytes = num_tokens * row_bytes, groups.block_bytes
    return (
        GraphPlan(num_tokens, input_bytes, max_bytes, bytes_each, min_shared_blocks, scratch_bytes),
        f"at most {num_graphs} graphs with {format_bytes(max_bytes)}, recorded when idle",
    )

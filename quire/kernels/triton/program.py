"""A program on the GPU: the operations of `quire.kernels.interpreter`, fused where a pass over
memory is saved.

Between the projection and attention stands one kernel (`cache.enter_kernel`): norms of single
heads, RoPE and the cache write. Of few rows it, and the norm that follows a sublayer, also add up
the chunks of the projection before (`unfinished`). It rounds where the operations one by one
round, so the bits are theirs. It has not run on a GPU yet.
"""

from __future__ import annotations

from typing import Any

from quire.kernels.interface import Weights
from quire.kernels.interpreter import Interpreter, StepTensors
from quire.kernels.triton.cache import enter
from quire.kernels.triton.unfinished import FinishingKernels
from quire.program import operations as ops
from quire.program.passes import fuse_add_norm, fuse_heads, select_wanted


class TritonProgram(Interpreter):
    """Implements `ForwardPass`. Its values are tensors,
    or partial sums that the next operation finishes."""

    def __init__(self, program: ops.Program, weights: Weights, kernels: FinishingKernels) -> None:
        whole, wanted = (
            fuse_add_norm(fuse_heads(each, is_one_kernel))
            for each in (program, select_wanted(program))
        )
        super().__init__(whole, wanted, weights, kernels)
        self._finishing = kernels

    def compute(
        self, operation: ops.Operation, step: StepTensors, x: Any = None, y: Any = None
    ) -> Any:
        """Compute, of heads, the queries alone: no operation reads the others from here."""
        match operation:
            case ops.PrepareHeads(cache=int(cache)) if step.rotations is None:
                batch = step.batch.of_cache(cache)
                return enter(x, operation, self._weights, batch, step.kv_caches[cache])
            case ops.AddNorm(norm=norm) if norm.kind == "rms":
                return super().compute(operation, step, x, y)
            case ops.Linear(weight=index):
                return self._finishing.unfinished_linear(
                    self._finishing.finish(x), self._weights.linears[index]
                )
        return super().compute(
            operation, step, *[self._finishing.finish(each) for each in (x, y) if each is not None]
        )


def is_one_kernel(operation: ops.PrepareHeads) -> bool:
    """Return whether `enter` has all that happens to the heads: norms of single heads, both or
    neither, and the cache write."""
    norms = [operation.norm_of("queries"), operation.norm_of("keys")]
    found = [norm for norm in norms if norm is not None]
    are_of_heads = all(
        norm.kind == "rms" and norm.size == operation.heads.head_dim for norm in found
    )
    offsets = {norm.weight_offset for norm in found}
    rope = operation.rope
    if rope is not None and rope.table is None:
        return False
    return operation.cache is not None and len(found) != 1 and are_of_heads and len(offsets) <= 1

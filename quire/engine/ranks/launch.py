"""Starts the processes of a planned model's other ranks."""

from __future__ import annotations

from quire.common.frozen_record import replace
from quire.common.version import __version__
from quire.engine.assembly.planned_model import PlannedModel
from quire.engine.plan.engine_plan import EnginePlan
from quire.engine.process.link import start_message
from quire.errors import ConfigError
from quire.models.tensors import DTYPE_BYTES
from quire.parallel.adapters import MAX_PATH
from quire.parallel.group import RankGroup
from quire.parallel.processes import RankPlaces
from quire.parallel.sections import GroupShape
from quire.parallel.shared_memory import bytes_of_command
from quire.parallel.transports import GroupMemory, SharedTransport, SocketTransport, Transport


def start_group(planned: PlannedModel, places: RankPlaces) -> RankGroup:
    """Start a process for each rank but this one, which builds of the very files that were
    planned with, or, where it is told so, of copies of them."""
    from quire.kernels import cpu

    plan = planned.plan
    shape = GroupShape(plan.config.pipeline_parallel_size, plan.config.tensor_parallel_size)
    if (reason := cpu.absence()) is not None:
        raise ConfigError(f"a model in {shape.size} processes needs the native kernels: {reason}")
    # how the others are run is this process's concern
    config = replace(
        plan.config, distributed_executor_backend=None, ray_placement_group=None,
        distributed_ssl=None,
    )  # fmt: skip
    start = start_message(replace(plan, config=config), planned.files)
    memory = GroupMemory(shape, command_bytes(plan), plan.config.distributed_timeout_seconds)
    transport: Transport
    if places.host is None:
        transport = SharedTransport(memory)
    else:
        ssl = None if plan.config.ssl is None else plan.config.ssl.absolute()
        transport = SocketTransport(memory, places.host, facts(), ssl)
    return RankGroup(
        places,
        transport,
        {
            "model": start.model, "options": dict(start.options), "files": dict(start.files),
            "are_copies": places.host is not None,
        },
        memory,
    )  # fmt: skip


def facts() -> str:
    """Return what processes of one model must have in common for their bits to be those of one."""
    from quire.kernels import cpu

    return f"quire {__version__} with kernels for {cpu.isa()}"


def command_bytes(plan: EnginePlan) -> int:
    """Return the room that the largest step needs: what it computes, and rows from outside."""
    limits, num_groups = plan.limits, len(plan.limits.windows)
    num_tokens, num_rows = limits.max_num_batched_tokens, limits.max_num_seqs
    num_blocks = limits.num_blocks_for(limits.max_model_len)
    per_token = 8 * (3 + num_groups) + plan.spec.hidden_size * DTYPE_BYTES["float32"]
    per_row = 4 * (4 + num_blocks * num_groups)
    copies = 2 * 8 * limits.num_blocks
    adapter = 4 * (MAX_PATH + 128)  # its name
    if plan.spec.vision is not None:  # rows in place of tokens, what turns heads, how far each sees
        width = plan.spec.vision.num_projectors * plan.spec.hidden_size
        angles = max(layer.head_dim for layer in plan.spec.kv_layers)
        per_token += 8 + (width + angles) * DTYPE_BYTES["float32"] + 4
    block = 0
    if plan.transfers is not None or plan.tiers is not None:  # each may have all of one
        per_kv_token = sum(layer.bytes_per_token(plan.kv_format) for layer in plan.spec.kv_layers)
        block = plan.config.num_processes * (limits.block_size * per_kv_token + 4)
    return bytes_of_command(
        num_tokens * per_token + num_rows * per_row + copies + adapter + block + 8,
        14 + 2 * num_groups,
    )

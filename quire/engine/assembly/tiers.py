"""Brings the tiers of an engine together: what identifies its keys and values, the folder they are
kept in, and both halves of the feature.

A stored block is used by whatever computes the same bits. So its identity covers everything that
decides them besides the tokens: the weights by all of their bytes (a digest of which is remembered
for files that have not changed), the model's declaration, the kernels and what the processor makes
of them, all sources of this package, and the form of a block. What a request adds (adapter, images,
tenant's salt) is in the digests of its blocks. Digests are keyed by a secret that lies in the
folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.common.file_states import States, check_unchanged
from quire.common.small_files import write_whole
from quire.core.scheduler.prerequisites import Prerequisite
from quire.core.scheduler.tiers import RestoreCosts, StoredPrefixes, TierStats
from quire.core.step_cost import StepCostModel, block_costs
from quire.engine.assembly.fingerprint import numerics, source_digest, weight_files
from quire.engine.assembly.model_files import ModelFiles
from quire.engine.assembly.planned_model import PlannedModel
from quire.engine.plan.engine_plan import EnginePlan
from quire.errors import ConfigError
from quire.models.rope import DynamicScaling, LongScaling

if TYPE_CHECKING:
    from quire.engine.plan.tiers import TierPlan
    from quire.tiers.companion import BlockMemory, StoredBlocks
    from quire.tiers.compression import Compression
    from quire.tiers.disk import DiskStore

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[2]
_SECRET, _DIGESTS = "secret", "weights.json"
_SECRET_BYTES = 32
_MAX_DIGESTS_BYTES = 1 << 20
_CHUNK_BYTES = 16 << 20
_MAX_FETCHED_BYTES = 256 << 20
"""Of an order to read: 2,300 tokens of Qwen3-0.6B in bfloat16."""
_READ_BYTES_PER_S = 500e6
"""Of a disk, with the checksum, before anything was read: half of what was measured from the page
cache (Zen 5)."""


def stored_prerequisite(tiers: TierPlan, costs: StepCostModel) -> Callable[[], Prerequisite]:
    """Return what makes the control plane's half. `costs` are those of steps."""
    block_s = tiers.payload_bytes / _READ_BYTES_PER_S
    max_blocks = max(1, _MAX_FETCHED_BYTES // tiers.payload_bytes)
    return partial(StoredPrefixes, RestoreCosts(costs, block_s, max_blocks), TierStats())


def stored_blocks(
    planned: PlannedModel, tiers: TierPlan, memory: BlockMemory, states: States
) -> StoredBlocks:
    """Make the worker's half, which begins to look for what is stored. `states` are those that the
    model's files had before they were loaded."""
    from quire.tiers.companion import StoredBlocks

    open_store = None if tiers.folder is None else partial(_open, planned, states)
    compression = _compression_of(planned.plan, tiers)
    return StoredBlocks(memory, open_store, tiers.host_bytes, compression=compression)


def _compression_of(plan: EnginePlan, tiers: TierPlan) -> Compression | None:
    from quire.tiers.compression import Compression, Source, shared_row_len

    if tiers.host_form is None:
        return None
    row_len = shared_row_len(layer.head_dim for layer in plan.spec.kv_layers)
    source: Source = "float32" if plan.kv_format == "float32" else "bfloat16"
    return Compression(tiers.host_form, source, row_len)


def key_of_folder(name: str) -> bytes:
    """Return the key of the digests of the blocks in a folder. Raises ConfigError for one that
    cannot be used."""
    folder = Path(name).expanduser()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            raise ConfigError(
                f"kv_cache_dir={str(folder)!r} can be written by other users, who could put "
                "anything into answers; take a folder of your own (chmod 700)"
            )
        return _secret(folder)
    except OSError as error:
        raise ConfigError(
            f"kv_cache_dir={str(folder)!r} cannot be used: {error.strerror}; choose another folder"
        ) from error


def _secret(folder: Path) -> bytes:
    """Return the secret of a folder, made by the process that comes first. Raises OSError."""
    path = folder / _SECRET
    if not path.exists():
        descriptor, name = tempfile.mkstemp(dir=folder)  # readable by its owner alone
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(os.urandom(_SECRET_BYTES))
            os.link(name, path)
        except FileExistsError:
            pass  # another process was faster
        finally:
            with contextlib.suppress(OSError):
                os.unlink(name)
    with path.open("rb") as file:
        secret = file.read(_SECRET_BYTES + 1)
    if len(secret) != _SECRET_BYTES:
        raise ConfigError(
            f"{path} is damaged: it has {len(secret)} bytes, not {_SECRET_BYTES}; remove it, and "
            "the cache starts anew"
        )
    return secret


def _open(planned: PlannedModel, states: States) -> DiskStore:
    """Open the store of a model. Reads all of its weights where they are not known. Raises
    OSError, and CheckpointError where they are no longer those that were loaded."""
    from quire.tiers.disk import DiskStore
    from quire.tiers.segments import CacheIdentity

    plan = planned.plan
    assert plan.tiers is not None and plan.tiers.folder is not None
    folder = Path(plan.tiers.folder).expanduser()
    layout = plan.kv_layout
    own = [
        hashlib.blake2b(_secret(folder)).hexdigest(),
        plan.limits.block_size,
        [layout.windows, layout.group_of, layout.place_of],
    ]
    digest = identity_digest([*deciding_facts(plan, planned.files, folder), own])
    check_unchanged(states)
    identity = CacheIdentity(digest, plan.limits.block_size, plan.tiers.payload_bytes)
    limits = plan.limits
    costs = block_costs(StepCostModel(plan.step_costs), limits.block_size, limits.max_model_len)
    return DiskStore(folder, identity, plan.tiers.disk_bytes, costs)


def identity_digest(facts: list[Any]) -> bytes:
    """Return 32 bytes that stand for all facts."""
    encoded = json.dumps(facts, sort_keys=True, default=str).encode()
    return hashlib.blake2b(encoded, digest_size=32).digest()


def deciding_facts(plan: EnginePlan, files: ModelFiles, folder: Path | None) -> list[Any]:
    """Return everything that decides the bits of keys and values, besides what digests of blocks
    cover. Digests of weights are remembered in `folder`; without one, all weights are read."""
    import torch

    ropes = [attention.rope for attention in plan.spec.attentions if attention.rope is not None]
    is_scaled = any(isinstance(rope.scaling, DynamicScaling | LongScaling) for rope in ropes)
    layers = [tuple(layer) for layer in plan.spec.kv_layers]
    return [
        *numerics(plan, files),
        torch.__version__,
        source_digest(_PACKAGE),
        _native_digest(),
        _weights_digest(files, folder),
        plan.limits.max_model_len if is_scaled else None,
        layers,
    ]


def _native_digest() -> str:
    """Tells one build of the native kernels from another."""
    try:
        from quire.kernels.cpu import _native
    except ImportError:
        return ""
    return _digest_of(Path(_native.__file__))


def _weights_digest(files: ModelFiles, folder: Path | None) -> list[str]:
    """Return digests of all bytes of the weights. Those of files that are as they were are not read
    again."""
    known = {} if folder is None else _read_digests(folder / _DIGESTS)
    found: dict[str, list[Any]] = {}
    for path in weight_files(files):
        status = path.stat()
        name = str(path.resolve())
        state = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        record = known.get(name)
        if not isinstance(record, list) or record[:-1] != state:
            record = [*state, _digest_of(path)]
        found[name] = record
    is_new = any(known.get(name) != record for name, record in found.items())
    if folder is not None and is_new:
        write_whole(folder / _DIGESTS, json.dumps({**known, **found}))
    return [str(record[-1]) for record in found.values()]


def _digest_of(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=32)
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _read_digests(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            record = json.loads(file.read(_MAX_DIGESTS_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}

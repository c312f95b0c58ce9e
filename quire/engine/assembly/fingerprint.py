"""What decides a model's numbers, as digests: for clients that compare answers, and for files that
keep packed weights.

Both cover every input that may change a bit; limits, threads and block size are left out, since no
answer depends on them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import quire.program
import quire.quant
from quire.common.file_states import samples_of
from quire.common.platforms import find_platform
from quire.common.version import __version__
from quire.engine.assembly.model_files import ModelFiles
from quire.engine.plan.engine_plan import EnginePlan
from quire.engine.plan.machine import instruction_sets
from quire.nn.parts import ModelPart
from quire.weights.packed_cache import CacheName


def fingerprint(plan: EnginePlan, files: ModelFiles) -> str:
    """Changes whenever answers may: Quire's version, the model's declaration and files, dtypes,
    kernels, and what this machine's processor makes them compute with. The same files on a machine
    of the same class have the same.
    """
    tokenizer = Path(plan.config.tokenizer or files.folder) / "tokenizer.json"
    read = [*weight_files(files), *([tokenizer] if tokenizer.is_file() else [])]
    samples = [(path.name, *samples_of(path)) for path in read]
    return _digest([*numerics(plan, files), samples])


def numerics(plan: EnginePlan, files: ModelFiles) -> list[Any]:
    """Return all that decides bits, but for what is in files besides the config."""
    where = [
        plan.device,
        plan.config.kernels,
        None if plan.config.platform is None else find_platform(plan.config.platform).label,
        plan.attention_module,
        plan.config.batch_invariant,
        plan.config.kv_offloading_dtype,
        instruction_sets(),
    ]
    return [*_forms(plan), dict(files.config), plan.kv_format, where]


def cache_name(plan: EnginePlan, files: ModelFiles) -> CacheName:
    """Return the packed weights of a model: one name for each form of it,
    one digest for each state of its files and of the code."""
    path = files.folder if files.gguf is None else Path(files.gguf.file.path)
    form = plan.config.quantize_to or "stored"
    label = f"{path.stem}-{_digest([str(path.resolve())])[:8]}-{plan.dtype}-{form}"
    states = [
        (each.name, each.stat().st_mtime_ns, *samples_of(each)) for each in weight_files(files)
    ]
    code = source_digest(Path(quire.quant.__path__[0]))
    return CacheName(label, _digest([*_forms(plan), dict(files.config), states, code]))


def part_name(name: CacheName, part: ModelPart) -> CacheName:
    """Return the name for what one of a model's processes holds of it."""
    rank, num_ranks = 0, 1
    if part.exchange is not None:
        rank, num_ranks = part.exchange.rank, part.exchange.num_ranks
    by_expert = "-experts" if part.is_by_expert else ""
    place = f"{part.stage}.{rank}-of-{part.num_stages}x{num_ranks}{by_expert}"
    code = source_digest(Path(quire.program.__path__[0]))
    return CacheName(f"{name.label}-{place}", _digest([name.digest, code]))


def source_digest(folder: Path) -> str:
    """Return a digest of all Python sources in a folder: versions do not tell builds apart."""
    return _digest([each.read_text("utf-8") for each in sorted(folder.rglob("*.py"))])


def _forms(plan: EnginePlan) -> list[Any]:
    config = plan.config
    seed = config.seed if config.load_format == "dummy" else None
    return [__version__, plan.dtype, config.quantize_to, config.load_format, seed]


def weight_files(files: ModelFiles) -> list[Path]:
    """Return the files that hold the model's weights."""
    return sorted(
        files.folder.glob("*.safetensors") if files.gguf is None else [Path(files.gguf.file.path)]
    )


def _digest(decisive: list[Any]) -> str:
    return hashlib.blake2b(
        json.dumps(decisive, sort_keys=True, default=str).encode(), digest_size=12
    ).hexdigest()

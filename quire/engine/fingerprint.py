"""What decides a model's numbers, as digests: for clients that compare answers, and for files that keep packed weights.

Both cover every input that may change a bit; limits, threads and block size are left out, since no answer depends on them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import quire.quant
from quire.common.version import __version__
from quire.engine.model_files import ModelFiles
from quire.engine.planning import EnginePlan
from quire.weights.packed_cache import CacheName


def fingerprint(plan: EnginePlan, files: ModelFiles) -> str:
    """Changes whenever answers may: Quire's version, the model's declaration and files, dtypes and kernels."""
    sizes = [(path.name, path.stat().st_size) for path in _weight_files(files)]
    return _digest([*_forms(plan), dict(files.config), plan.kv_format, plan.config.kernels, sizes])


def cache_name(plan: EnginePlan, files: ModelFiles) -> CacheName:
    """The packed weights of a model: one name for each form of it, one digest for each state of its files and of the code."""
    path = files.folder if files.gguf is None else Path(files.gguf.file.path)
    form = plan.config.quantization or "stored"
    label = f"{path.stem}-{_digest([str(path.resolve())])[:8]}-{plan.dtype}-{form}"
    states = [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in _weight_files(files)]
    code = [each.read_text() for each in sorted(Path(quire.quant.__path__[0]).glob("*.py"))]
    return CacheName(label, _digest([*_forms(plan), dict(files.config), states, _digest(code)]))


def _forms(plan: EnginePlan) -> list[Any]:
    config = plan.config
    seed = config.seed if config.load_format == "dummy" else None
    return [__version__, plan.dtype, config.quantization, config.load_format, seed]


def _weight_files(files: ModelFiles) -> list[Path]:
    return sorted(files.folder.glob("*.safetensors") if files.gguf is None else [Path(files.gguf.file.path)])


def _digest(decisive: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(decisive, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()

"""The link to an engine in a process of its own: what that engine is to build,
and who supervises it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quire.common.file_states import lasting_name
from quire.config.engine import EngineConfig
from quire.config.transfer import EXTRA, PATHS
from quire.engine.assembly.model_files import ModelFiles
from quire.engine.assembly.preparation import PreparedModel
from quire.engine.plan.engine_plan import EnginePlan
from quire.engine.process.journal import Journal
from quire.engine.process.launcher import EngineProcess
from quire.engine.process.messages import Start
from quire.engine.process.supervisor import Supervisor
from quire.engine.process.watch import WatchConfig
from quire.errors import ConfigError


def supervised(
    prepared: PreparedModel, watch: WatchConfig | None = None, **launch_options: Any
) -> Supervisor:
    """Return a link to engine processes that serve a model, one after another;
    it begins to load when it is started. Of several replicas, it is one."""
    start = start_message(prepared.planned.plan, prepared.planned.files)
    return Supervisor(
        lambda: EngineProcess(start, **launch_options),
        Journal(prepared.tokenizer),
        watch or WatchConfig(),
    )


def start_message(plan: EnginePlan, files: ModelFiles | None = None) -> Start:
    """Return what an engine is to build: the decisions of a plan, so that each engine after another
    has the same limits.

    With `files`, each is built of these very files, wherever it runs, or not at all. Raises
    ConfigError for what no other process can be told.
    """
    limits, config = plan.limits, plan.config
    if config.executor_class is not None:
        raise ConfigError(
            f"distributed_executor_backend={config.executor_class.__name__} is a class of this "
            "process, and the engine is in another one; give a name"
        )
    options: Mapping[str, Any] = asdict(config) | {
        "dtype": plan.dtype,
        # an encoder keeps nothing of its texts, and refuses options of what is kept
        "block_size": None if plan.spec.is_encoder else limits.block_size,
        "kv_cache_memory": plan.kv_bytes or None,
        "populate_kv_cache": "on" if plan.is_kv_populated else "off",
        # what is sensible has been decided; what is impossible is still refused
        "memory_utilization": 1.0,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "num_threads": plan.num_threads,
        "data_parallel_size": 1,
        "tokenizer": lasting_model_name(config.tokenizer),
        "download_dir": _path(config.download_dir),
        "weights_cache": _path(config.weights_cache),
        "kv_cache_dir": _path(config.kv_cache_dir),
        "speculative_config": _changed(config.speculative_config, {"model": lasting_model_name}),
        "kv_transfer_config": _changed(config.kv_transfer_config, {EXTRA: _paths_of_transfers}),
        "distributed_ssl": None if config.ssl is None else config.ssl.absolute(),
    }
    model = config.model if files is None else str(files.path)
    defaults = EngineConfig(model=model)
    given = {
        name: value
        for name, value in options.items()
        if name != "model" and value != getattr(defaults, name)
    }
    if files is None:
        return Start(model, given)
    return Start(model, given, files.states(config.tokenizer))


def _changed(
    given: Mapping[str, Any] | None, changes: Mapping[str, Callable[[Any], Any]]
) -> Mapping[str, Any] | None:
    """Return a dict with some of its values changed, as far as it has them."""
    if given is None:
        return None
    return {
        name: value if value is None or name not in changes else changes[name](value)
        for name, value in given.items()
    }


def _paths_of_transfers(given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return _changed(given, dict.fromkeys(PATHS, _path))


def _path(name: str | None) -> str | None:
    """Return a path, of what may not be there yet, as it means the same wherever a process runs."""
    if name is None:
        return None
    path = Path(name).expanduser()
    return str(lasting_name(path) if path.exists() else path.absolute())


def lasting_model_name(name: str | None) -> str | None:
    """Return the path of a model, if it is one, as it means the same wherever a process runs; a
    name of something else as it is."""
    if name is None or not Path(name).expanduser().exists():
        return name
    return _path(name)

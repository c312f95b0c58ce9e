"""`kv_transfer_params`, as a request has them and as its answer gives them back: vLLM's, so that
proxies that know these can stand before engines of this kind."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from quire.common.numbers import ceil_div
from quire.core.params import SamplingParams
from quire.core.transfers import KVTransfer, RemotePrefix
from quire.engine.plan.engine_plan import EnginePlan
from quire.errors import InvalidParameterError

NAME = "kv_transfer_params"
_MAX_TEXT = 256
_KINDS: Mapping[str, tuple[type, ...]] = {
    "remote_engine_id": (str,),
    "remote_host": (str,),
    "remote_port": (int, str),
    "remote_request_id": (str,),
}


def read_transfer(params: SamplingParams, plan: EnginePlan) -> KVTransfer | None:
    """Return what a request's parameters say of transfers; None where they say nothing. Raises
    InvalidParameterError."""
    given = (params.extra_args or {}).get(NAME)
    if given is None or given == {}:
        return None
    if not isinstance(given, Mapping):
        raise _refused(f"must be a dict, not {type(given).__name__}")
    gives, takes = (_switch(given, name) for name in ("do_remote_decode", "do_remote_prefill"))
    if not gives and not takes:
        return None
    if plan.transfers is None:
        raise _refused("this engine transfers nothing; start it with kv_transfer_config")
    config = plan.transfers.config
    for name, is_asked, can in (
        ("do_remote_decode", gives, config.gives),
        ("do_remote_prefill", takes, config.takes),
    ):
        if is_asked and not can:
            raise _refused(f"{name} is not for an engine of kv_role={config.kv_role!r}")
    # No blocks: the producer had nothing to give, and the prompt is computed here.
    remote = _remote(given) if takes and given.get("remote_block_ids") != [] else None
    if not gives and remote is None:
        return None
    return KVTransfer(secrets.token_hex(16) if gives else "", remote)


def transfer_params(
    transfer: KVTransfer | None, plan: EnginePlan, num_prompt_tokens: int
) -> dict[str, Any] | None:
    """Return what the answer says to the engine that goes on with it; None where none is to."""
    if transfer is None or not transfer.gives or plan.transfers is None:
        return None
    config = plan.transfers.config
    host, port = config.address
    num_blocks = ceil_div(num_prompt_tokens, plan.limits.block_size)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": config.name,
        "remote_request_id": transfer.gives,
        "remote_block_ids": list(range(num_blocks)),
        "remote_host": host,
        "remote_port": port,
        "tp_size": plan.config.tensor_parallel_size,
    }


def _remote(given: Mapping[str, Any]) -> RemotePrefix:
    for name, kinds in _KINDS.items():
        value = given.get(name)
        is_right = isinstance(value, kinds) and not isinstance(value, bool)
        if not is_right or (isinstance(value, str) and not 0 < len(value) <= _MAX_TEXT):
            raise _refused(
                f"{name}={str(value)[:64]!r} is not what a producer gives; pass its answer's "
                f"{NAME} on as they are"
            )
    port = str(given["remote_port"])
    if not port.isdecimal() or not int(port) <= 65535:
        raise _refused(f"remote_port={port[:64]!r} is no port")
    return RemotePrefix(
        given["remote_engine_id"], given["remote_host"], int(port), given["remote_request_id"]
    )


def _switch(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if value is not None and not isinstance(value, bool):
        raise _refused(f"{name}={str(value)[:64]!r} must be true or false")
    return bool(value)


def _refused(message: str) -> InvalidParameterError:
    return InvalidParameterError(f"{NAME}: {message}", param=NAME)

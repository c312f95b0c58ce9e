"""Which attention a GPU computes with: the kernels here, or a library's that is installed; with the
reasons. No torch.

Owns the choice, for `quire plan` to print and the builder to apply. The libraries' calls are in
`quire.kernels.triton.library_attention`. None of them has been run by this project yet, so none is
chosen by default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import util

from quire.errors import ConfigError

OWN = "triton"
MODULES = {"flash-attention": ("flash_attn_interface", "flash_attn"), "flashinfer": ("flashinfer",)}
"""What a library is imported as; of FlashAttention first version 3, which is for Hopper alone,
then version 2."""
_FLASH_2_BLOCK = 256
"""Its pages are multiples of so many positions."""
_FLASHINFER_HEADS = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What attention has to cope with."""

    dtype: str
    kv_format: str
    block_size: int
    head_sizes: frozenset[int]
    capability: tuple[int, int]
    is_invariant: bool
    has_windows: bool = False
    """Whether blocks behind a window are given back while their sequence runs."""
    has_sinks: bool = False
    """Whether scores without a value join the softmax."""


def is_installed(module: str) -> bool:
    """Test for the package without importing it."""
    return util.find_spec(module) is not None


def module_for(
    name: str, needs: AttentionNeeds, found: Callable[[str], bool] = is_installed
) -> str | None:
    """Return the module that a library would be used by on this device; None where it is not
    installed."""
    fitting = [
        module
        for module in MODULES[name]
        if module != "flash_attn_interface" or needs.capability[0] == 9
    ]
    return next(filter(found, fitting), None)


def reasons_against(
    name: str, needs: AttentionNeeds, found: Callable[[str], bool] = is_installed
) -> list[str]:
    """Return why a library cannot serve; empty where it can."""
    module = module_for(name, needs, found)
    reasons = [] if module is not None else ["not installed"]
    if needs.is_invariant:
        reasons.append("its bits may depend on the batch (batch_invariant)")
    if needs.dtype != "bfloat16" or needs.kv_format != "bfloat16":
        reasons.append(
            f"used for bfloat16 alone, not for {needs.dtype} with a KV cache of {needs.kv_format}"
        )
    if needs.has_windows:
        reasons.append("may read blocks behind a window, which are given back")
    if needs.has_sinks:
        reasons.append("used without attention sinks alone")
    if name == "flashinfer" and (odd := sorted(needs.head_sizes.difference(_FLASHINFER_HEADS))):
        reasons.append(f"has no heads of {odd[0]}")
    if name == "flash-attention" and (
        odd := sorted(size for size in needs.head_sizes if size % 8 or size > 256)
    ):
        reasons.append(f"has no heads of {odd[0]}")
    if module == "flash_attn" and needs.block_size % _FLASH_2_BLOCK:
        reasons.append(
            f"version 2 needs blocks of multiples of {_FLASH_2_BLOCK} tokens, not of "
            f"{needs.block_size}"
        )
    return reasons


def choose(
    wish: str, needs: AttentionNeeds, found: Callable[[str], bool] = is_installed
) -> tuple[str, str]:
    """(choice, reason); ConfigError where the wish cannot be met."""
    against = {name: reasons_against(name, needs, found) for name in MODULES}
    if wish in MODULES:
        if against[wish]:
            raise ConfigError(
                f"attention_backend={wish!r} cannot be used: {'; '.join(against[wish])}; "
                "leave it at 'auto'"
            )
        return wish, "given; this project has not run it on a GPU yet"
    untried = ["fits, but must be chosen by name: not tried yet"]
    others = [f"{name}: {', '.join(reasons or untried)}" for name, reasons in against.items()]
    return OWN, f"the kernels here; {'; '.join(others)}"

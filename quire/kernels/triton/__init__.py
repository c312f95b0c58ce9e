"""The GPU back end: kernels in Triton for NVIDIA GPUs, which also run on the CPU under Triton's
interpreter, in tests.

Owns the answer to whether it can serve a device and a dtype, and its loading; nothing of Triton is
imported before that.
State: compiled for compute capability 8.0 and 9.0 and compared with the reference under the
interpreter. None of these kernels has run on a GPU yet, and no speed has been measured.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from quire.common.capabilities import MIN_CAPABILITY
from quire.errors import ConfigError
from quire.kernels.triton.interpretation import correct_interpreter, is_interpreted

if TYPE_CHECKING:
    import torch

    from quire.kernels.triton.kernels import TritonKernels

DTYPES = ("float32", "bfloat16", "float16")


def reasons_against(device: str, dtype: torch.dtype) -> list[str]:
    """Return why this back end cannot serve tensors of `dtype` on `device` ("cuda", "cuda:1");
    empty where it can."""
    reasons = []
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        reasons.append(f"computes in {', '.join(DTYPES)}, not in {name}")
    if importlib.util.find_spec("triton") is None:
        reasons.append("the package triton is not installed; pip install triton")
    kind = device.partition(":")[0]
    if kind == "cpu" and not is_interpreted():
        reasons.append(
            "runs on NVIDIA GPUs; on the CPU only under Triton's interpreter "
            "(TRITON_INTERPRET=1), for tests"
        )
    elif kind not in ("cpu", "cuda"):
        reasons.append(f"runs on NVIDIA GPUs, not on {device}")
    elif kind == "cuda":
        reasons += _reasons_against_gpu(device)
    return reasons


def _reasons_against_gpu(device: str) -> list[str]:
    import torch

    if is_interpreted():
        return ["TRITON_INTERPRET is set, with which Triton computes on the CPU; unset it"]
    if torch.version.cuda is None:
        return [f"torch {torch.__version__} is built without CUDA; install a CUDA build"]
    if not torch.cuda.is_available():
        return ["torch finds no GPU that it can use; see `quire doctor`"]
    index = torch.device(device).index or 0
    if index >= torch.cuda.device_count():
        return [f"there are {torch.cuda.device_count()} GPUs, so there is no {device}"]
    capability = torch.cuda.get_device_capability(index)
    if capability < MIN_CAPABILITY:
        return [
            (
                f"{torch.cuda.get_device_name(index)} has compute capability {capability}; at "
                f"least {MIN_CAPABILITY} is needed"
            )
        ]
    return []


def load(
    device: str = "cuda", *, is_invariant: bool = True, attention_module: str | None = None
) -> TritonKernels:
    """Return the back end for one device; ConfigError says why it cannot run there. See
    `TritonKernels` for `is_invariant`, and `library_attention` for the module whose attention takes
    the place of the kernels'.
    """
    import torch

    reasons = reasons_against(device, torch.float32)
    if reasons:
        raise ConfigError(f"the Triton kernels cannot run on {device}: " + "; ".join(reasons))
    if is_interpreted():
        correct_interpreter()
    from quire.kernels.triton.kernels import TritonKernels

    there = torch.device(device)
    if attention_module is None:
        return TritonKernels(there, is_invariant=is_invariant)
    from quire.kernels.triton.library_attention import load_attention

    return TritonKernels(
        there, is_invariant=is_invariant, library_attention=load_attention(attention_module, there)
    )

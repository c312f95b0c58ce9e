"""Checkpoints of a training run: tensors as safetensors, counters and the loss curve as JSON.

Owns the run folder's layout. Nothing here can execute code when it is read.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors.torch import load_file, save_file

from .model import ModelShape, Storyteller
from .optimizer import StoryOptimizer

TENSORS_FILE = "checkpoint.safetensors"
STATE_FILE = "checkpoint.json"
_MODEL, _OPTIMIZER = "model/", "optimizer/"


@dataclass(slots=True)
class RunState:
    """Where a run stands. Curves are lists of (tokens seen, loss in nats per target token)."""

    num_steps: int = 0
    num_tokens: int = 0
    elapsed_s: float = 0.0
    pool_index: int = 0
    train_curve: list[tuple[int, float]] = field(default_factory=list)
    held_out_curve: list[tuple[int, float]] = field(default_factory=list)
    shape: dict[str, int | float] = field(default_factory=dict)


def save_checkpoint(
    folder: Path, model: Storyteller, optimizer: StoryOptimizer, state: RunState
) -> None:
    """Write both files beside the old ones, then swap them in,
    so that a stop never leaves half a file."""
    tensors = {_MODEL + name: tensor.detach() for name, tensor in model.state_dict().items()}
    tensors |= {_OPTIMIZER + name: tensor for name, tensor in optimizer.state.items()}
    save_file(tensors, folder / (TENSORS_FILE + ".new"))
    (folder / (STATE_FILE + ".new")).write_text(json.dumps(asdict(state)), encoding="utf-8")
    for name in (TENSORS_FILE, STATE_FILE):
        os.replace(folder / (name + ".new"), folder / name)


def load_state(folder: Path) -> RunState | None:
    """The counters of the run in `folder`, or None where there is no run yet."""
    path = folder / STATE_FILE
    return RunState(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def load_checkpoint(
    folder: Path, model: Storyteller, optimizer: StoryOptimizer, state: RunState
) -> None:
    tensors = load_file(folder / TENSORS_FILE)
    model.load_state_dict({n[len(_MODEL) :]: t for n, t in tensors.items() if n.startswith(_MODEL)})
    kept = {n[len(_OPTIMIZER) :]: t for n, t in tensors.items() if n.startswith(_OPTIMIZER)}
    optimizer.load_state(kept, state.num_steps)


def load_model(folder: Path) -> tuple[Storyteller, RunState]:
    """The model of the run in `folder`, for export and sampling."""
    state = load_state(folder)
    if state is None:
        raise FileNotFoundError(f"{folder} holds no checkpoint ({STATE_FILE}); train first")
    model = Storyteller(ModelShape(**state.shape))  # type: ignore[arg-type]
    tensors = load_file(folder / TENSORS_FILE)
    model.load_state_dict({n[len(_MODEL) :]: t for n, t in tensors.items() if n.startswith(_MODEL)})
    return model.eval(), state

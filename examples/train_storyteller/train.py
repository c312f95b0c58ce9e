"""Train the storyteller within a budget of minutes; run it again to go on after a stop.

Owns the training loop and its log. `python -m examples.train_storyteller.train --minutes 100`
"""

import argparse
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from .batches import Batch, BatchPool, split_by_len
from .checkpoint import RunState, load_checkpoint, load_state, save_checkpoint
from .corpus import read_tales
from .grammar import StoryGrammar
from .growth import first_shape, grow, wanted_depth
from .model import ModelShape, Storyteller
from .optimizer import StoryOptimizer, schedule
from .sample import load_exported
from .samples import (
    Encoder,
    ExchangeSource,
    GrammarSource,
    MixedSource,
    SampleSource,
    free_nouns,
    learn_lexicon,
)
from .tales import TaleComposer
from .tasks import TaskSource

LOG_STEPS = 20
CHECKPOINT_S = 180.0
EVALUATION_S = 480.0
MAX_GRAD_NORM = 1.0
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.monotonic, "processor": time.thread_time}
SHORT_TALES = (0.65, 0.25)
"""Shares of short whole tales and of openings under `--short-tales`;
the rest are passages from anywhere."""


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The pool of training batches and the fixed held-out batches."""

    pool: BatchPool
    held_out: list[Batch]


def prepare_data(arguments: argparse.Namespace) -> TrainingData:
    tales = read_tales(arguments.corpus)
    kept = [tale for tale in tales if not tale.is_held_out]
    held_out = [tale for tale in tales if tale.is_held_out]
    tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    source = SampleSource(
        kept, tokenizer, learn_lexicon(kept), shares=SHORT_TALES if arguments.short_tales else None
    )
    encoder, nouns = Encoder(tokenizer), free_nouns(source.lexicon)
    mixed = MixedSource(
        [
            (GrammarSource(StoryGrammar(nouns), encoder), arguments.grammar_share),
            (GrammarSource(TaleComposer(nouns), encoder), arguments.composed_share),
            (ExchangeSource(TaskSource(nouns), encoder), arguments.task_share),
        ],
        source,
    )
    batches = split_by_len(source.evaluation_samples(held_out), arguments.batch_tokens)
    return TrainingData(BatchPool(mixed, arguments.batch_tokens, arguments.seed), batches)


@torch.no_grad()
def held_out_loss(model: Storyteller, batches: list[Batch], device: str) -> float:
    """Mean loss in nats over all target tokens of the held-out batches."""
    total, count = 0.0, 0
    for batch in batches:
        num_targets = int((batch.targets >= 0).sum())
        total += float(model.loss(batch.ids.to(device), batch.targets.to(device))) * num_targets
        count += num_targets
    return total / count


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How a run is carried out."""

    seed: int = 0
    device: str = "cpu"
    is_compiled: bool = False
    start: Path | None = None
    """Folder of an exported model that a new run begins with, at its full depth."""
    rate: float = 1.0
    """Factor on all learning rates."""
    clock: Callable[[], float] = time.monotonic
    """What the budget is counted by, in seconds."""


class Trainer:
    """One run: its model, optimiser, state and folder."""

    def __init__(self, folder: Path, budget_s: float, options: TrainingOptions) -> None:
        torch.manual_seed(options.seed)
        self.folder, self.budget_s, self.options = folder, budget_s, options
        folder.mkdir(parents=True, exist_ok=True)
        state = load_state(folder)
        self.model = self._first_model(state).to(options.device)
        self.optimizer = StoryOptimizer(self.model)
        self.state = state or RunState(shape=self.model.shape.as_json())
        if state is not None:
            load_checkpoint(folder, self.model, self.optimizer, state)
            print(
                f"going on at step {state.num_steps}, {state.elapsed_s / 60:.1f} minutes in",
                flush=True,
            )
        self._losses: list[float] = []
        self._loss = self._loss_function()

    def _first_model(self, state: RunState | None) -> Storyteller:
        """Of the run's own shape if it is to go on, the model to start from,
        or a shallow one that will grow."""
        if state is not None:
            return Storyteller(ModelShape(**state.shape))  # type: ignore[arg-type]
        return (
            Storyteller(first_shape())
            if self.options.start is None
            else load_exported(self.options.start).train()
        )

    @property
    def progress(self) -> float:
        return min(1.0, self.state.elapsed_s / self.budget_s)

    def _loss_function(self) -> Callable[..., torch.Tensor]:
        """The training loss, compiled (one graph for all batch shapes) where that is asked for."""
        return (
            torch.compile(self.model.loss, dynamic=True)
            if self.options.is_compiled
            else self.model.loss
        )

    def _grow_if_due(self) -> None:
        depth = wanted_depth(self.progress)
        if depth > self.model.shape.num_hidden_layers:
            self.model, self.optimizer = grow(self.model, self.optimizer, depth)
            self.state.shape = self.model.shape.as_json()
            self._loss = self._loss_function()
            print(f"grown to {depth} layers", flush=True)

    def train(self, data: TrainingData) -> None:
        """Step until the budget is spent; save every few minutes and at the end."""
        last = saved = evaluated = self.options.clock()
        while self.progress < 1.0:
            self._grow_if_due()
            for batch in data.pool.batches(self.state.pool_index, self.progress):
                self._step(batch)
                now = self.options.clock()
                self.state.elapsed_s += now - last
                last = now
            self.state.pool_index += 1
            if last - evaluated > EVALUATION_S:
                self._evaluate(data)
                evaluated = last
            if last - saved > CHECKPOINT_S:
                save_checkpoint(self.folder, self.model, self.optimizer, self.state)
                saved = last
        self._evaluate(data)
        save_checkpoint(self.folder, self.model, self.optimizer, self.state)

    def _step(self, batch: Batch) -> None:
        state = self.state
        device = self.options.device
        loss = self._loss(batch.ids.to(device), batch.targets.to(device), batch.weights.to(device))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step(self.options.rate * schedule(state.num_steps, self.progress))
        state.num_steps += 1
        state.num_tokens += batch.num_tokens
        self._losses.append(float(loss.detach()))
        if not math.isfinite(self._losses[-1]):
            raise FloatingPointError(
                f"the loss is {self._losses[-1]} at step {state.num_steps}; lower the rates"
            )
        if state.num_steps % LOG_STEPS == 0:
            self._log()

    def _log(self) -> None:
        state = self.state
        mean = sum(self._losses) / len(self._losses)
        self._losses.clear()
        state.train_curve.append((state.num_tokens, round(mean, 4)))
        rate = state.num_tokens / max(state.elapsed_s, 1.0)
        print(
            f"step {state.num_steps} {self.progress:6.1%} loss {mean:.3f} {rate:.0f} tokens/s",
            flush=True,
        )

    def _evaluate(self, data: TrainingData) -> None:
        loss = held_out_loss(self.model, data.held_out, self.options.device)
        self.state.held_out_curve.append((self.state.num_tokens, round(loss, 4)))
        print(f"held out: loss {loss:.3f}, perplexity {math.exp(loss):.2f}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path("../shared/data/corpus"))
    parser.add_argument(
        "--tokenizer", type=Path, default=Path("quire/assets/quire-storyteller/tokenizer.json")
    )
    parser.add_argument(
        "--run", type=Path, default=Path("build/storyteller"), help="folder of the checkpoints"
    )
    parser.add_argument(
        "--minutes", type=float, default=100.0, help="budget of the whole run by --clock"
    )
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="processor: only the main thread's running time counts, so that a pause, or other "
        "work on the machine, does not use up the budget (on a CPU)",
    )
    parser.add_argument("--rate", type=float, default=1.0, help="factor on all learning rates")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="where to compute, such as cuda")
    parser.add_argument(
        "--start", type=Path, help="begin a new run with this exported model's weights"
    )
    parser.add_argument(
        "--short-tales", action="store_true", help="read mostly short whole tales and openings"
    )
    parser.add_argument(
        "--grammar-share", type=float, default=0.66, help="share of samples from the story grammar"
    )
    parser.add_argument(
        "--composed-share",
        type=float,
        default=0.0,
        help="share of samples from the tales that are composed sentence by sentence",
    )
    parser.add_argument(
        "--task-share", type=float, default=0.0, help="share of tools to call and objects to fill"
    )
    parser.add_argument(
        "--compile", action="store_true", help="use torch.compile (needs a C++ compiler)"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)  # numbers below 1e-38 are slow and mean nothing here
    random.seed(arguments.seed)
    data = prepare_data(arguments)
    options = TrainingOptions(
        arguments.seed,
        arguments.device,
        arguments.compile,
        arguments.start,
        arguments.rate,
        CLOCKS[arguments.clock],
    )
    trainer = Trainer(arguments.run, arguments.minutes * 60, options)
    print(f"{len(data.held_out)} held-out batches", flush=True)
    trainer.train(data)


if __name__ == "__main__":
    main()

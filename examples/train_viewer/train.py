"""Train the viewer in two stages: the tower says what each patch shows, then the decoder talks.

What each patch shows is known, since the pictures are drawn: a shape with its colour and size,
which one from the left it is, and where. In the first stage 64 such labels an image teach the tower
in minutes what conversations alone would take hours to. In the second it stays as it is, and the
decoder learns answers; at the places of the picture it learns to name what is there, so that an
answer has only to find the right place. Matrices are trained by Muon, the rest by Adam, as the
storyteller's are.

    python -m examples.train_viewer.train --minutes 60
"""

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from examples.train_storyteller.optimizer import StoryOptimizer

from .conversations import NOT_LEARNT, Encoder, draw_conversation, train_tokenizer
from .model import HIDDEN_SIZE, new_model, pixels_of
from .questions import ACROSS, DOWN, NUMBERS
from .scenes import COLORS, MAX_SHAPES, NUM_PATCHES, SHAPES, SIZES, Scene, draw_scene, paint

TOWER_SHARE = 0.3
"""Of the budget, for the tower."""
CURRICULUM_SHARE = 0.3
"""Of the second stage, until pictures have as many shapes as they ever have."""
NAMING_WEIGHT = 0.3
"""Of the loss at the places of the picture, beside that of the answers."""
TOWER_BATCH, BATCH = 48, 16
NUM_TURNS = 5
NUM_EDGE = int(NUM_PATCHES**0.5)
WITHOUT_PICTURE_SHARE = 0.03
WARMUP_STEPS, DECAY_START = 30, 0.4
FURTHER_RATE = 0.6
"""Of learning where a decoder goes on, in that of a new one."""
MAX_GRAD_NORM = 1.0
LOG_STEPS = 20


class PatchLabels:
    """What each patch of a scene shows: class numbers of the shape, its colour, size and number
    from left to right, where its centre is, and where the patch itself is."""

    COUNTS = (
        1 + len(SHAPES), len(COLORS), 1 + len(SIZES), 1 + MAX_SHAPES, *(1 + NUM_EDGE,) * 2,
        *(NUM_EDGE,) * 2,
    )  # fmt: skip
    """Of classes. The first of a shape's is for the background, but not of the colours."""

    def __init__(self) -> None:
        numbers = torch.arange(NUM_EDGE)
        self._row, self._column = (
            each.flatten() for each in torch.meshgrid(numbers, numbers, indexing="ij")
        )
        self._x, self._y = ((each + 0.5) / NUM_EDGE for each in (self._column, self._row))
        self._colors = {color: number for number, color in enumerate(COLORS)}

    def __call__(self, scene: Scene) -> Tensor:
        """Return [8, patches]."""
        labels = torch.zeros(len(self.COUNTS), NUM_PATCHES, dtype=torch.long)
        labels[1] = self._colors[scene.background]
        labels[6], labels[7] = self._column, self._row
        for number, thing in enumerate(scene.things):
            is_inside = ((self._x - thing.x).square() + (self._y - thing.y).square()) < (
                thing.radius**2
            )
            shown = (
                1 + SHAPES.index(thing.shape), self._colors[thing.color],
                1 + tuple(SIZES).index(thing.size), 1 + number,
                1 + int(NUM_EDGE * thing.x), 1 + int(NUM_EDGE * thing.y),
            )  # fmt: skip
            labels[:6, is_inside] = torch.tensor(shown)[:, None]
        return labels


class PatchReader(nn.Module):
    """The tower with a head for each thing to say of a patch; the heads are thrown away. Where a
    patch is must be said as well, since the decoder knows no places but those in the rows."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower
        self.norm = nn.LayerNorm(HIDDEN_SIZE)
        self.heads = nn.ModuleList(nn.Linear(HIDDEN_SIZE, count) for count in PatchLabels.COUNTS)

    def loss(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of pixels [images, 3, size, size] and labels [images, 8,
        patches], in nats."""
        rows = self.norm(self.tower(pixels).last_hidden_state[:, 1:])
        losses = [
            F.cross_entropy(head(rows).flatten(0, 1), labels[:, number].flatten())
            for number, head in enumerate(self.heads)
        ]
        return torch.stack(losses).sum()


def run(
    model: nn.Module, budget_s: float, loss_of: Callable[[float], Tensor], rate: float = 1.0
) -> None:
    """Step until the budget is spent; the learning rate falls to zero with it."""
    optimizer = StoryOptimizer(model)
    started_s, step, mean = time.monotonic(), 0, 0.0
    while (progress := (time.monotonic() - started_s) / budget_s) < 1:
        loss = loss_of(progress)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        warmup = min(1.0, (step + 1) / WARMUP_STEPS)
        optimizer.step(rate * warmup * min(1.0, (1 - progress) / (1 - DECAY_START)))
        step += 1
        mean += (float(loss.detach()) - mean) / min(step, LOG_STEPS)
        if step % LOG_STEPS == 0:
            print(f"step {step} {progress:6.1%} loss {mean:.3f}", flush=True)


def train_tower(tower: nn.Module, rng: random.Random, budget_s: float) -> None:
    """Teach the tower what each patch shows."""
    reader, labels_of = PatchReader(tower), PatchLabels()

    def loss(progress: float) -> Tensor:
        scenes = [draw_scene(rng) for _ in range(TOWER_BATCH)]
        pixels = torch.stack([pixels_of(paint(scene, rng)) for scene in scenes])
        return reader.loss(pixels, torch.stack([labels_of(scene) for scene in scenes]))

    run(reader, budget_s, loss)


class PatchNames:
    """The words for what each patch of a scene shows, as tokens."""

    WORDS = (SHAPES, tuple(COLORS), tuple(SIZES), NUMBERS[1:], ACROSS, DOWN)

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._labels_of = PatchLabels()
        encoded = [[tokenizer.encode(f" {word}").ids for word in group] for group in self.WORDS]
        assert all(len(ids) == 1 for group in encoded for ids in group)
        self._groups = [torch.tensor(group)[:, 0] for group in encoded]

    def __call__(self, scene: Scene) -> Tensor:
        """Return [patches, 6]: shape, colour, size, number from the left and place, or six times
        the background's colour."""
        shapes, colors, sizes, numbers, *places, _, _ = self._labels_of(scene)
        names = self._groups[1][colors][:, None].repeat(1, len(self.WORDS))
        is_thing = shapes > 0
        across, down = (
            (place > 0.375 * NUM_EDGE).long() + (place > 0.625 * NUM_EDGE) for place in places
        )
        for column, labels in enumerate((shapes - 1, colors, sizes - 1, numbers - 1, across, down)):
            names[is_thing, column] = self._groups[column][labels[is_thing]]
        return names


@torch.no_grad()
def begin_projector(model: transformers.LlavaForConditionalGeneration, rng: random.Random) -> None:
    """Let the projector begin as if the tower's rows had mean 0 and variance 1, and with outputs of
    the size of tokens' embeddings: a tower's rows have channels of very different sizes."""
    pixels = torch.stack([pixels_of(paint(draw_scene(rng), rng)) for _ in range(TOWER_BATCH)])
    tower: Any = model.model.vision_tower
    rows = tower(pixels).last_hidden_state[:, 1:].flatten(0, 1)
    mean, std = rows.mean(0), rows.std(0) + 1e-3
    projector: Any = model.model.multi_modal_projector
    nn.init.normal_(projector.linear_1.weight, std=HIDDEN_SIZE**-0.5)
    projector.linear_1.weight.div_(std)
    projector.linear_1.bias.copy_(-projector.linear_1.weight @ mean)
    nn.init.normal_(projector.linear_2.weight, std=HIDDEN_SIZE**-0.5)
    size = projector(rows).std()
    embeddings: Any = model.get_input_embeddings()
    projector.linear_2.weight.mul_(embeddings.weight.std() / size)


class Talks:
    """Draws batches of conversations and computes their loss."""

    def __init__(
        self,
        model: transformers.LlavaForConditionalGeneration,
        tokenizer: tokenizers.Tokenizer,
        rng: random.Random,
    ) -> None:
        self._model, self._rng = model, rng
        self._encoder = Encoder(tokenizer, NUM_PATCHES)
        self._names_of = PatchNames(tokenizer)

    def loss(self, most_shapes: int) -> Tensor:
        """Return the cross-entropy, in nats, of answers and of the names at the picture's places,
        for a batch of scenes of at most so many shapes."""
        rng, scenes, talks = self._rng, list[Scene](), []
        for _ in range(BATCH):
            is_blank = rng.random() < WITHOUT_PICTURE_SHARE
            scene = None if is_blank else draw_scene(rng, most_shapes=most_shapes)
            talks.append(draw_conversation(self._encoder, rng, NUM_TURNS, scene=scene))
            if scene is not None:
                scenes.append(scene)
        length = max(len(talk.ids) for talk in talks)
        ids = torch.tensor([talk.ids + [0] * (length - len(talk.ids)) for talk in talks])
        targets = torch.tensor(
            [talk.targets + [NOT_LEARNT] * (length - len(talk.ids)) for talk in talks]
        )
        shares = torch.tensor([talk.shares + [0.0] * (length - len(talk.ids)) for talk in talks])
        pixels = torch.stack([pixels_of(paint(scene, rng)) for scene in scenes])
        hidden = self._model.model(input_ids=ids, pixel_values=pixels).last_hidden_state
        is_learnt = targets[:, 1:] != NOT_LEARNT
        answers = self._model.lm_head(hidden[:, :-1][is_learnt])
        seen = self._model.lm_head(hidden[ids == self._encoder.image_id]).log_softmax(-1)
        names = torch.cat([self._names_of(scene) for scene in scenes])
        naming = -seen.gather(1, names).mean()
        losses = F.cross_entropy(answers, targets[:, 1:][is_learnt], reduction="none")
        answering: Tensor = (losses * shares[:, 1:][is_learnt]).sum() / shares.sum()
        total: Tensor = answering + NAMING_WEIGHT * naming
        return total


def train_decoder(
    model: transformers.LlavaForConditionalGeneration,
    tokenizer: tokenizers.Tokenizer,
    rng: random.Random,
    budget_s: float,
    *,
    is_new: bool = True,
) -> None:
    """Teach projector and decoder to answer questions; new ones first about single shapes."""
    model.model.vision_tower.requires_grad_(False)
    talks = Talks(model, tokenizer, rng)

    def loss(progress: float) -> Tensor:
        most_shapes = 1 + int(MAX_SHAPES * progress / CURRICULUM_SHARE) if is_new else MAX_SHAPES
        return talks.loss(min(MAX_SHAPES, most_shapes))

    if is_new:
        begin_projector(model, rng)
    run(model, budget_s, loss, 1.0 if is_new else FURTHER_RATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/viewer"))
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--start", type=Path, help="run whose decoder is to go on with its tower")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer: tokenizers.Tokenizer = (
        train_tokenizer()
        if args.start is None
        else tokenizers.Tokenizer.from_file(str(args.start / "tokenizer.json"))
    )
    tokenizer.save(str(args.out / "tokenizer.json"), pretty=False)
    budget_s = 60 * args.minutes
    if args.start is None:
        model = new_model()
        train_tower(model.model.vision_tower, rng, TOWER_SHARE * budget_s)
        train_decoder(model, tokenizer, rng, (1 - TOWER_SHARE) * budget_s)
    else:
        model = transformers.LlavaForConditionalGeneration.from_pretrained(
            args.start, dtype=torch.float32
        )
        train_decoder(model, tokenizer, rng, budget_s, is_new=False)
    model.save_pretrained(args.out)


if __name__ == "__main__":
    main()

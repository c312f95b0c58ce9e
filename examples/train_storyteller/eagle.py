"""Train a draft head for the storyteller (EAGLE, Li et al., arXiv:2401.15077), on what it says.

Owns the head in plain torch, its training towards the storyteller's states and probabilities, and
the folder in the layout that such heads are published in. Texts, and the measure of acceptance, are
those of the draft model.

    python -m examples.train_storyteller.eagle --minutes 5 --out build/storyteller-eagle
"""

import argparse
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from quire import LLM

from .draft import NUM_DRAFTED, NUM_HELD_OUT, NUM_TOLD, TEMPERATURES, batches, measured, texts
from .export import hf_config, write_json
from .model import Attention, FeedForward, ModelShape, Storyteller
from .optimizer import StoryOptimizer, schedule
from .sample import load_exported

NUM_PASSES = 3
"""Of a training step: in the second and third one the head reads its own states, as it does when it
drafts further tokens (as in HASS, Zhang et al., arXiv:2408.15766)."""
STATE_WEIGHT = 0.2
"""Of the distance from the storyteller's states, beside the cross-entropy."""


class Head(nn.Module):
    """From the storyteller's state at a token, and the token behind that, to its state there."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size)
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, embedded: Tensor, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """All [batch, len, hidden_size]."""
        hidden = self.fc(torch.cat((embedded, states), -1))
        hidden = hidden + self.self_attn(hidden, cos, sin)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


def predicted(head: Head, teacher: Storyteller, ids: Tensor, states: Tensor) -> Tensor:
    """The states [batch, len - 1, hidden_size] of all tokens but the first, from those before."""
    embedded = teacher.model.embed_tokens(ids[:, 1:])
    length = embedded.shape[1]
    cos, sin = teacher.cos[:length], teacher.sin[:length]  # type: ignore[index]
    found: Tensor = head(embedded, states[:, :length], cos, sin)
    return found


def loss(head: Head, teacher: Storyteller, ids: Tensor, is_text: Tensor) -> Tensor:
    """Cross-entropy with the storyteller's probabilities, and the distance of states, over all
    passes."""
    with torch.no_grad():
        states = teacher(ids)
        chosen = is_text[:, 1:]
        wanted_states = states[:, 1:][chosen]
        wanted = teacher.logits(wanted_states).softmax(-1)
    total, read = torch.zeros(()), states
    for _ in range(NUM_PASSES):
        found = predicted(head, teacher, ids, read)
        total = total + F.cross_entropy(teacher.logits(found[chosen]), wanted)
        total = total + STATE_WEIGHT * F.smooth_l1_loss(found[chosen], wanted_states)
        # at the first token, which nothing predicts, the state is always the storyteller's
        read = torch.cat((states[:, :1], found), 1)
    return total / NUM_PASSES


def train(teacher: Storyteller, told: list[list[int]], minutes: float) -> Head:
    """Bring a head's drafts near what the teacher says, for so long."""
    torch.manual_seed(0)
    teacher.requires_grad_(requires_grad=False)
    head = Head(teacher.shape)
    nn.init.normal_(head.self_attn.o_proj.weight, std=0.005)
    nn.init.normal_(head.mlp.down_proj.weight, std=0.005)
    optimizer = StoryOptimizer(head)
    began_s, losses = time.monotonic(), list[float]()
    for step, (ids, is_text) in enumerate(batches(told, random.Random(0))):
        progress = (time.monotonic() - began_s) / (60 * minutes)
        if progress >= 1.0:
            break
        found = loss(head, teacher, ids, is_text)
        found.backward()  # type: ignore[no-untyped-call]
        optimizer.step(schedule(step, progress))
        losses.append(found.item())
        if step % 100 == 99:
            print(f"{progress:4.0%} step {step}: {sum(losses[-100:]) / 100:.3f}", flush=True)
    return head.eval()


@torch.no_grad()
def bounds(
    teacher: Storyteller, head: Head, told: list[list[int]], temperature: float
) -> tuple[float, float]:
    """How often a first draft token can be right on average, on these texts: the overlap of the two
    distributions, which no draft exceeds, and what equal noise is sure of (Daliri, Musco and Suresh
    2024)."""
    overlaps, sure = list[Tensor](), list[Tensor]()
    for text in told:
        ids = torch.tensor([text])
        states = teacher(ids)
        both = states[0, 1:], predicted(head, teacher, ids, states)[0]
        theirs, ours = (teacher.logits(each) / max(temperature, 1e-4) for each in both)
        overlap = torch.minimum(theirs.softmax(-1), ours.softmax(-1)).sum(-1)
        overlaps.append(overlap)
        sure.append(overlap / (2.0 - overlap))
    return float(torch.cat(overlaps).mean()), float(torch.cat(sure).mean())


def write(head: Head, shape: ModelShape, folder: Path) -> None:
    """A folder as EAGLE's heads are published: no norms but one, no embedding, no output
    projection."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name if name.startswith("fc.") else f"layers.0.{name}": weight.detach().to(torch.bfloat16)
        for name, weight in head.named_parameters()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = hf_config(shape) | {
        "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1, "bias": True,
    }  # fmt: skip
    write_json(folder / "config.json", config)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", type=Path, default=Path("quire/assets/quire-storyteller"))
    parser.add_argument("--out", type=Path, default=Path("build/storyteller-eagle"))
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--told", type=int, default=NUM_TOLD, help="texts to learn from")
    arguments = parser.parse_args()
    with LLM(str(arguments.model), kv_cache_memory="256MiB", num_threads=1) as llm:
        told = texts(llm, arguments.told, is_held_out=False, temperatures=TEMPERATURES)
        unseen = {
            each: texts(llm, NUM_HELD_OUT, is_held_out=True, temperatures=(each,))
            for each in (0.0, 1.0)
        }
    print(f"{len(told)} texts, {sum(map(len, told)):,} tokens")
    teacher = load_exported(arguments.model)
    head = train(teacher, told, arguments.minutes)
    write(head, teacher.shape, arguments.out)
    speculative: dict[str, object] = {
        "method": "eagle", "model": str(arguments.out), "num_speculative_tokens": NUM_DRAFTED,
    }  # fmt: skip
    for temperature, held_out in unseen.items():
        most, sure = bounds(teacher, head, held_out, temperature)
        print(
            f"temperature {temperature:g}: first token at most {most:.3f}, equal noise at least "
            f"{sure:.3f}"
        )
        print("  accepted by position:", " ".join(
            f"{each:.3f}" for each in measured(arguments.model, speculative, temperature)
        ))  # fmt: skip


if __name__ == "__main__":
    main()

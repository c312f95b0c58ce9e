"""Train a draft model ten times smaller than the storyteller, on what the storyteller says.

Owns the texts (its own answers, at several temperatures), the training (towards its probabilities,
Hinton, Vinyals and Dean 2015) and the measure: how often drafts are accepted at each position, by
the engine, beside what any draft with these probabilities could reach.

    python -m examples.train_storyteller.draft --minutes 5 --out build/storyteller-draft
"""

import argparse
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from quire import LLM, SamplingParams
from quire.config.speculation import SpeculationConfig
from quire.core.drafts import MODELLED
from quire.core.speculation.methods import speculator_of
from quire.spec.depth import DraftDepth

from .export import hf_config, write_json, write_weights
from .grammar import StoryGrammar
from .model import ModelShape, Storyteller
from .optimizer import StoryOptimizer, schedule
from .sample import load_exported

SHAPE = replace(
    ModelShape(), hidden_size=96, intermediate_size=192, num_hidden_layers=2,
    num_attention_heads=3, num_key_value_heads=1, head_dim=32,
)  # fmt: skip
"""0.55 million parameters, of which the embedding is 0.39; the storyteller has 5.5."""
NUM_TOLD, NUM_HELD_OUT = 3000, 64
TEMPERATURES = (0.0, 0.35, 0.7, 1.0, 1.0)
BATCH_SIZE, MAX_TOKENS = 12, 300
NUM_DRAFTED = 4


def texts(
    llm: LLM, num: int, *, is_held_out: bool, temperatures: tuple[float, ...]
) -> list[list[int]]:
    """The storyteller's answers to requests of the story grammar, with the requests."""
    grammar, rng = StoryGrammar(is_held_out=is_held_out), random.Random(2 + is_held_out)
    chats = [
        [{"role": "user", "content": f"Tell me a story about {grammar.draw(rng).topic}."}]
        for _ in range(num)
    ]
    params = [
        SamplingParams(
            temperature=temperatures[number % len(temperatures)], max_tokens=MAX_TOKENS, seed=number
        )
        for number in range(num)
    ]
    outputs = llm.chat(chats, params, use_tqdm=False)
    return [[*(each.prompt_token_ids or ()), *each.outputs[0].token_ids] for each in outputs]


def batches(told: list[list[int]], rng: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Texts of like length together, without end: ids, and which of them are no padding."""
    ordered = sorted(told, key=len)
    groups = [ordered[at : at + BATCH_SIZE] for at in range(0, len(ordered), BATCH_SIZE)]
    while True:
        rng.shuffle(groups)
        for group in groups:
            longest = max(map(len, group))
            rows = [text + [0] * (longest - len(text)) for text in group]
            masks = [[True] * len(text) + [False] * (longest - len(text)) for text in group]
            yield torch.tensor(rows), torch.tensor(masks)


def train(teacher: Storyteller, told: list[list[int]], minutes: float) -> Storyteller:
    """Bring a small model's probabilities near the teacher's, for so long."""
    torch.manual_seed(0)
    draft = Storyteller(SHAPE)
    optimizer = StoryOptimizer(draft)
    began_s, losses = time.monotonic(), list[float]()
    for step, (ids, is_text) in enumerate(batches(told, random.Random(0))):
        progress = (time.monotonic() - began_s) / (60 * minutes)
        if progress >= 1.0:
            break
        with torch.no_grad():
            wanted = teacher.logits(teacher(ids)[is_text]).softmax(-1)
        logits = draft.logits(draft(ids)[is_text])
        loss = F.cross_entropy(logits, wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(schedule(step, progress))
        losses.append(loss.item())
        if step % 100 == 99:
            mean = sum(losses[-100:]) / 100
            print(f"{progress:4.0%} step {step}: {mean:.3f} nats", flush=True)
    return draft


@torch.no_grad()
def bounds(
    teacher: Storyteller, draft: Storyteller, told: list[list[int]], temperature: float
) -> tuple[float, float]:
    """How often a draft token can be right on average, on these texts: the overlap of the two
    distributions, which no draft exceeds, and what equal noise is sure of (Daliri, Musco and Suresh
    2024)."""
    overlaps, sure = list[Tensor](), list[Tensor]()
    for text in told:
        ids = torch.tensor([text])
        theirs, ours = (
            model.logits(model(ids)[0]) / max(temperature, 1e-4) for model in (teacher, draft)
        )
        overlap = torch.minimum(theirs.softmax(-1), ours.softmax(-1)).sum(-1)
        overlaps.append(overlap)
        sure.append(overlap / (2.0 - overlap))
    return float(torch.cat(overlaps).mean()), float(torch.cat(sure).mean())


def measured(folder: Path, speculative: dict[str, object], temperature: float) -> list[float]:
    """How often the engine accepts a draft at each position, where those before it were right."""
    with LLM(
        str(folder), kv_cache_memory="64MiB", num_threads=1, speculative_config=speculative
    ) as llm:
        worker = llm.engine.executor.worker  # type: ignore[attr-defined]
        worker.companions.of(MODELLED).depth = DraftDepth(is_adaptive=False)
        config = SpeculationConfig.from_mapping(speculative)
        llm.engine.scheduler.look_ahead = speculator_of(config, None)  # takes all drafts
        texts(llm, NUM_HELD_OUT, is_held_out=True, temperatures=(temperature,))
        stats = llm.engine.scheduler.stats
        rights = stats.num_right_by_place[:NUM_DRAFTED]
        tried = [stats.num_runs, *rights]
        return [right / max(1, num) for right, num in zip(rights, tried, strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", type=Path, default=Path("quire/assets/quire-storyteller"))
    parser.add_argument("--out", type=Path, default=Path("build/storyteller-draft"))
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
    draft = train(teacher, told, arguments.minutes)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_weights(draft, arguments.out / "model.safetensors")
    write_json(arguments.out / "config.json", hf_config(SHAPE))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(arguments.model / name, arguments.out / name)
    speculative: dict[str, object] = {
        "model": str(arguments.out), "num_speculative_tokens": NUM_DRAFTED,
    }  # fmt: skip
    for temperature, held_out in unseen.items():
        most, sure = bounds(teacher, draft, held_out, temperature)
        print(f"temperature {temperature:g}: at most {most:.3f}, equal noise at least {sure:.3f}")
        print("  accepted by position:", " ".join(
            f"{each:.3f}" for each in measured(arguments.model, speculative, temperature)
        ))  # fmt: skip


if __name__ == "__main__":
    main()

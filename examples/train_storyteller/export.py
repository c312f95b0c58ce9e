"""Write the trained model as a Hugging Face folder, with the credits and the loss curve.

Owns `config.json`, `generation_config.json`, `model.safetensors` and `ATTRIBUTION.txt` of the
shipped model, and `tokenizer_config.json`, which holds the chat template. `tokenizer.json` is an
input; a folder that has one keeps it.
"""

import argparse
import csv
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from . import prompts
from .checkpoint import RunState, load_model
from .corpus import ATTRIBUTION_FILE
from .growth import grow
from .model import ModelShape, Storyteller
from .optimizer import StoryOptimizer
from .sample import load_exported
from .samples import MAX_LEN
from .tokenizer import tokenizer_config

END_OF_TEXT_ID, TURN_END_ID = (
    prompts.SPECIAL_TOKENS.index(t) for t in (prompts.END_OF_TEXT, prompts.TURN_END)
)
GENERATION = {
    "do_sample": True,
    "temperature": 0.35,
    "top_k": 40,
    "top_p": 0.95,
    "eos_token_id": [TURN_END_ID, END_OF_TEXT_ID],
    "pad_token_id": END_OF_TEXT_ID,
}


def hf_config(shape: ModelShape) -> dict[str, object]:
    """The model's ``config.json``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shape.as_json(),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": TURN_END_ID,
        "pad_token_id": END_OF_TEXT_ID,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_weights(model: Storyteller, path: Path) -> None:
    """The parameters in bfloat16; the output projection is the embedding,
    so it is not stored twice."""
    tensors = {
        name: weight.detach().to(torch.bfloat16) for name, weight in model.named_parameters()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it readable for its owner only


@torch.no_grad()
def blend(model: Storyteller, start: Storyteller, share: float) -> None:
    """Move the model's weights back towards those that its run began with: `share` of the result
    are the start's. It gives back some of what a short run unlearns."""
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"the share of the start is {share}; give one from 0 to 1")
    if model.shape != start.shape:
        raise ValueError(f"{model.shape} cannot be blended with {start.shape}: give its own start")
    for weight, first in zip(model.parameters(), start.parameters(), strict=True):
        weight.lerp_(first, share)


def write_attribution(
    table: Path,
    path: Path,
    model: str = "quire-storyteller",
    change: str = "cut, their pages joined, and partly retold with other heroes",
) -> None:
    """One line a storybook: title, writer and translator. All of them are CC-BY. `change` says what
    was done to them."""
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    repos = sorted({row["repo"] for row in rows})
    sources = ", ".join(f"github.com/{repo}" for repo in repos)
    lines = [
        f"The storybooks that {model} was trained on, from {sources}.",
        (
            "All are licensed CC-BY (Creative Commons Attribution), but for 'Chuskit Goes to "
            "School!': public domain."
        ),
        f"For the training they were {change}.",
        "",
    ]
    for row in rows:
        translation = row["translation_by"] or ""
        credit = row["text_by"] or "unknown"
        lines.append(
            f"{row['title']}: {credit}" + (f" (translated by {translation})" if translation else "")
        )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _smooth(values: list[float], window: int) -> list[float]:
    """Trailing mean."""
    recent = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in recent]


def plot_curves(state: RunState, path: Path) -> None:
    """Training and held-out loss over the tokens seen."""
    from matplotlib.figure import Figure  # which takes a second: what only reads models needs none

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    tokens = [count / 1e6 for count, _ in state.train_curve]
    losses = [loss for _, loss in state.train_curve]
    axes.plot(tokens, losses, color="0.8", linewidth=0.8)
    axes.plot(tokens, _smooth(losses, 10), label="training", color="tab:blue")
    held_out = [(count / 1e6, loss) for count, loss in state.held_out_curve]
    axes.plot(
        *zip(*held_out, strict=True), "o-", label="held-out tales", color="tab:red", markersize=3
    )
    axes.set(
        xlabel="million tokens seen (padding included)",
        ylabel="loss (nats per token)",
        ylim=(None, 6.5),
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("build/storyteller"))
    parser.add_argument("--out", type=Path, default=Path("quire/assets/quire-storyteller"))
    parser.add_argument("--corpus", type=Path, default=Path("../shared/data/corpus"))
    parser.add_argument(
        "--tokenizer", type=Path, default=Path("quire/assets/quire-storyteller/tokenizer.json")
    )
    parser.add_argument(
        "--curve", type=Path, default=Path("examples/train_storyteller/loss_curve.png")
    )
    parser.add_argument("--start", type=Path, help="exported model that the run began with")
    parser.add_argument(
        "--start-share", type=float, default=0.5, help="share of the weights of --start, if given"
    )
    arguments = parser.parse_args()
    model, state = load_model(arguments.run)
    # an early look at a run that has not grown to its full depth yet
    if model.shape != ModelShape():
        model, _ = grow(model, StoryOptimizer(model), ModelShape().num_hidden_layers)
    if arguments.start is not None:
        blend(model, load_exported(arguments.start), arguments.start_share)
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer = arguments.out / "tokenizer.json"
    if not tokenizer.exists():
        shutil.copyfile(arguments.tokenizer, tokenizer)
    write_weights(model, arguments.out / "model.safetensors")
    write_json(arguments.out / "config.json", hf_config(model.shape))
    write_json(arguments.out / "generation_config.json", dict(GENERATION))
    write_json(arguments.out / "tokenizer_config.json", tokenizer_config(MAX_LEN))
    write_attribution(arguments.corpus / ATTRIBUTION_FILE, arguments.out / "ATTRIBUTION.txt")
    if state.held_out_curve:
        plot_curves(state, arguments.curve)
    print(
        f"step {state.num_steps}, {state.num_tokens / 1e6:.1f} M tokens, "
        f"{state.elapsed_s / 60:.0f} minutes"
    )


if __name__ == "__main__":
    main()

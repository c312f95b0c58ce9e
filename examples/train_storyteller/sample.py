"""Look at what the model says: `python -m examples.train_storyteller.sample "a brave knight" "the
moon"`.

Owns a plain sampling loop without a cache, the slow twin of a real engine. Reads an exported
folder.
"""

import argparse
import json
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from . import prompts
from .model import ModelShape, Storyteller


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn; a temperature of 0 takes the likeliest."""

    temperature: float = 0.7
    top_k: int = 40
    top_p: float = 0.95
    repetition_penalty: float = 1.0


def load_exported(folder: Path) -> Storyteller:
    """The exported model, its bfloat16 weights widened to float32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = ModelShape(**{field.name: config[field.name] for field in fields(ModelShape)})
    model = Storyteller(shape)
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model.eval()


def draw(logits: Tensor, seen: list[int], sampling: Sampling) -> int:
    """One token id from logits [vocab_size]."""
    if sampling.repetition_penalty != 1.0:
        known = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(known > 0, known / penalty, known * penalty)
    if sampling.temperature == 0:
        return int(logits.argmax())
    values, ids = (logits / sampling.temperature).topk(sampling.top_k)
    shares = values.softmax(-1)
    shares = shares.masked_fill(shares.cumsum(-1) - shares > sampling.top_p, 0.0)
    return int(ids[torch.multinomial(shares, 1)])


@torch.no_grad()
def generate(
    model: Storyteller, prompt_ids: list[int], max_tokens: int, sampling: Sampling
) -> list[int]:
    """Up to `max_tokens` new ids after the prompt;
    stops after an end token or at the context's end."""
    ends = {
        prompts.SPECIAL_TOKENS.index(token) for token in (prompts.END_OF_TEXT, prompts.TURN_END)
    }
    ids = list(prompt_ids)
    limit = min(len(ids) + max_tokens, model.shape.max_position_embeddings)
    while len(ids) < limit:
        hidden = model(torch.tensor([ids]))[0, -1]
        ids.append(draw(model.logits(hidden), ids, sampling))
        if ids[-1] in ends:
            break
    return ids[len(prompt_ids) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topics", nargs="+")
    parser.add_argument("--model", type=Path, default=Path("quire/assets/quire-storyteller"))
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model = load_exported(arguments.model)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    for topic in arguments.topics:
        torch.manual_seed(arguments.seed)
        request = prompts.turn("user", f"Tell me a story about {topic}.") + prompts.reply_start()
        ids = generate(
            model, tokenizer.encode(request).ids, 450, Sampling(temperature=arguments.temperature)
        )
        print(f"--- {topic}\n{tokenizer.decode(ids)}\n")


if __name__ == "__main__":
    main()

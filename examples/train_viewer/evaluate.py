"""How often the viewer answers right, by the kind of question, on pictures that it has not seen.

Owns the numbers in README.md; the answers come from Quire's own engine. An answer counts if it
is word for word the right one.

    python -m examples.train_viewer.evaluate --pictures 200
"""

import argparse
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from quire import LLM, SamplingParams

from .questions import Question, ask, ask_without_picture
from .scenes import draw_scene, paint

_NUM_QUESTIONS = 12
_SEED = 1_000_003  # the training draws from 0 on


def unseen(count: int, *, has_held_out: bool) -> list[tuple[Any, Question]]:
    """Return pictures and questions, one of each kind that a picture allows; with `has_held_out`
    each picture has a shape in a colour that no picture of the training shows it in."""
    rng = random.Random(_SEED + has_held_out)
    pairs: list[tuple[Any, Question]] = []
    for _ in range(count):
        scene = draw_scene(rng, has_held_out=has_held_out)
        image = paint(scene, rng)
        asked = {
            question.kind: question
            for question in itertools.islice(ask(scene, rng), _NUM_QUESTIONS)
        }
        pairs += [(image, question) for question in asked.values()]
    return pairs


def answers(llm: LLM, pairs: Sequence[tuple[Any, Question]]) -> list[str]:
    """Ask each question in a chat of its own."""
    chats: list[Any] = []
    for image, question in pairs:
        picture = [] if image is None else [{"type": "image_pil", "image_pil": image}]
        content = [*picture, {"type": "text", "text": question.text}]
        chats.append([{"role": "user", "content": content}])
    params = SamplingParams(temperature=0.0, max_tokens=120)
    return [output.outputs[0].text for output in llm.chat(chats, params, use_tqdm=False)]


def count(pairs: Sequence[tuple[Any, Question]], said: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return right answers and questions, by kind and in all."""
    right, total = Counter[str](), Counter[str]()
    for (_, question), answer in zip(pairs, said, strict=True):
        for kind in (question.kind, "all"):
            total[kind] += 1
            right[kind] += answer.strip() == question.answer
    return {kind: (right[kind], total[kind]) for kind in sorted(total)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="build/viewer/model")
    parser.add_argument("--pictures", type=int, default=200)
    parser.add_argument("--show-wrong", action="store_true", help="print what is wrong")
    args = parser.parse_args()
    rng = random.Random(_SEED)
    without = [(None, ask_without_picture(rng)) for _ in range(40)]
    groups = {
        "pictures like those of the training": unseen(args.pictures, has_held_out=False),
        "with a shape in a colour that is new to it": unseen(args.pictures, has_held_out=True),
        "no picture": without,
    }
    with LLM(str(args.model), kv_cache_memory="256MiB") as llm:
        for title, pairs in groups.items():
            said = answers(llm, pairs)
            print(f"{title}:")
            for kind, (right, total) in count(pairs, said).items():
                print(f"  {kind}: {right} of {total}, {right / total:.0%}")
            if args.show_wrong:
                for (_, question), answer in zip(pairs, said, strict=True):
                    if answer.strip() != question.answer:
                        print(f"  --- {question.text}\n  {question.answer}\n  {answer}")


if __name__ == "__main__":
    main()

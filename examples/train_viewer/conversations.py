"""Chats about pictures as token ids: the chat format and the tokenizer.

Owns the special tokens, the byte-level BPE that is learnt from the questions and answers, and which
tokens are learnt: the answers and the ends of their turns.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from .questions import ACROSS, DOWN, NUMBERS, Question, ask, ask_without_picture
from .scenes import Scene, draw_scene

END_OF_TEXT, TURN_START, TURN_END, IMAGE = SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>",
)  # fmt: skip
VOCABULARY_SIZE = 512
MAX_LEN = 512
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}"
    "{%- for part in message['content'] -%}{%- if part['type'] == 'image' -%}{{- '<image>' -}}"
    "{%- endif -%}{%- endfor -%}"
    "{%- for part in message['content'] -%}{%- if part['type'] == 'text' -%}"
    "{{- part['text'] -}}{%- endif -%}{%- endfor -%}"
    "{%- endif -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
"""Pictures come before the text of their turn."""
NOT_LEARNT = -100
_TEXTS = 6000


@dataclass(frozen=True, slots=True)
class Conversation:
    """Token ids, where the picture's placeholder stands for all of its rows, what is learnt, and
    each token's share in that: a short answer counts as much as a long one."""

    ids: list[int]
    targets: list[int]
    shares: list[float]


def train_tokenizer() -> tokenizers.Tokenizer:
    """Return a byte-level BPE learnt from questions and answers."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE, special_tokens=list(SPECIAL_TOKENS), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), min_frequency=2,
    )  # fmt: skip
    made.train_from_iterator(_texts(random.Random(0)), trainer)
    return made


def _texts(rng: random.Random) -> Iterator[str]:
    yield "system\nuser\nassistant\n"
    for _ in range(_TEXTS):
        for question in itertools.islice(ask(draw_scene(rng), rng), 4):
            yield question.text
            yield question.answer
        without = ask_without_picture(rng)
        yield f"{without.text} {without.answer}"
        yield " ".join(("", *NUMBERS, *ACROSS, *DOWN))  # a token for each


class Encoder:
    """Writes conversations in the chat format. `num_rows` are an image's places."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, num_rows: int) -> None:
        self._tokenizer = tokenizer
        self.image_id = SPECIAL_TOKENS.index(IMAGE)  # their ids are the first, in this order
        self._picture = [self.image_id] * num_rows

    def encode(self, questions: Sequence[Question], *, has_picture: bool) -> Conversation:
        """Encode the turns in their order; the picture stands in the first."""
        ids: list[int] = []
        targets: list[int] = []
        shares: list[float] = []
        for number, question in enumerate(questions):
            opening = self._ids(f"{TURN_START}user\n")
            picture = self._picture if has_picture and not number else []
            asked = self._ids(f"{question.text}{TURN_END}\n{TURN_START}assistant\n")
            answer = self._ids(f"{question.answer}{TURN_END}")
            head, after = opening + picture + asked, self._ids("\n")
            ids += head + answer + after
            targets += [NOT_LEARNT] * len(head) + answer + [NOT_LEARNT] * len(after)
            shares += [0.0] * len(head) + [1 / len(answer)] * len(answer) + [0.0] * len(after)
        return Conversation(ids, targets, shares)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def draw_conversation(
    encoder: Encoder, rng: random.Random, num_turns: int, *, scene: Scene | None
) -> Conversation:
    """Invent a conversation about a scene, or one turn without a picture."""
    if scene is None:
        return encoder.encode([ask_without_picture(rng)], has_picture=False)
    questions = list(itertools.islice(ask(scene, rng), num_turns))
    return encoder.encode(questions, has_picture=True)

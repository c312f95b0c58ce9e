"""What a prompt's text has where an image stands, for models whose images are framed by tokens and
empty lines (Gemma 3): it is written before the text is encoded, since what stands next to it may be
one token with the lines. Equal to transformers' processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.core.images import Image
from quire.errors import CheckpointError
from quire.models.declaration import VisionSpec
from quire.text.tokenizer import Tokenizer

Marks = Mapping[str, Sequence[Sequence[str]]]
"""By the text of a control token, what its occurrences stand for, as
`quire.text.chat.encode_chat` has it. Those behind the last one stand for themselves."""
_WHOLE, _CROPS = "Here is the original image ", " and here are some crops to help you see better "


def marks_of(
    vision: VisionSpec, tokenizer: Tokenizer, images: Sequence[tuple[Image, ...]]
) -> Marks:
    """Return what the marks of these images stand for, each with its crops. Nothing for a model
    whose prompts have the placeholders themselves."""
    if vision.frame is None or not images:
        return {}
    before, behind = (_name(tokenizer, token_id) for token_id in vision.frame)
    place = _name(tokenizer, vision.placeholder)
    frame = ("\n\n", before, "", place, "", behind, "\n\n")
    found = []
    for _, *crops in images:
        pieces: Sequence[str] = frame
        if crops:
            pieces = _joined(_joined((_WHOLE,), frame), (_CROPS,))
            for number in range(len(crops)):
                pieces = _joined(pieces, (" ",) if number else ("",))
                pieces = _joined(pieces, frame)
        found.append(pieces)
    return {before: found}


def write_plainly(text: str, marks: Marks) -> str:
    """Return a text in which every spelling of a control token is the token, with what stands for
    the marks."""
    for mark, stands in marks.items():
        first, *rest = text.split(mark)
        found = [first]
        for number, after in enumerate(rest):
            found += ["".join(stands[number]) if number < len(stands) else mark, after]
        text = "".join(found)
    return text


def _joined(one: Sequence[str], other: Sequence[str]) -> Sequence[str]:
    """Put pieces behind others; the texts that meet are one."""
    return (*one[:-1], one[-1] + other[0], *other[1:])


def _name(tokenizer: Tokenizer, token_id: int) -> str:
    """Return how a text spells a control token. Raises CheckpointError where there is none."""
    name = tokenizer.raw_token(token_id)
    if name is None or tokenizer.control_level.get(name) is None:
        raise CheckpointError(
            f"tokenizer.json has {name!r} for token {token_id}, which frames images; "
            "make it a special token"
        )
    return name

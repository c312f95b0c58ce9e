"""Prompts of questions: a state that all of them share, token by token, and each question behind
it.

The state is rendered and encoded once, up to where the question comes; a question is encoded by
itself. So the prompts of one state begin with the same tokens whatever is asked, and the prefix
cache computes these once. An option is answered with a label that is a single token of the model's
vocabulary where the answer begins.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, product
from secrets import token_hex
from string import ascii_uppercase
from typing import Any, NamedTuple

from quire.core.params import RequestOutputKind, SamplingParams
from quire.core.plan import RowSampling
from quire.core.pooling import WeighTokens
from quire.core.request_spec import RequestSpec
from quire.engine.decisions.questions import Question, text_of
from quire.engine.front.digest import Digest
from quire.errors import InvalidParameterError, RequestError
from quire.media.parts import is_image
from quire.text.chat import ChatTemplate, encode_chat, without_developer
from quire.text.template_needs import joined_text
from quire.text.tokenizer import Tokenizer
from quire.text.traced import join_traced

Message = Mapping[str, Any]
_PLAIN_TAIL = "\n\nAnswer:\n"
"""Behind a question, where there is no chat template."""
_MAX_TAILS = 8
"""Templates write the same behind every chat, as a rule."""


class StatePrompt(NamedTuple):
    """What questions are about, up to where they come."""

    token_ids: list[int]
    tail: str
    """What the template writes behind a question."""


class QuestionPrompt(NamedTuple):
    """A question and what it is about."""

    token_ids: list[int]
    digest: Digest


class DecisionPrompts:
    """Makes the prompts of one model. Safe in any thread."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._labels: OrderedDict[str, dict[str, int | None]] = OrderedDict()
        """Of the last tails: the token of each label, None where it is not a single one."""

    def state(self, given: str | Sequence[Message]) -> StatePrompt:
        """Encode what questions are about. Raises a RequestError."""
        messages: Any = [{"role": "user", "content": given}] if isinstance(given, str) else given
        is_list = isinstance(messages, Sequence)
        if not is_list or not all(isinstance(each, Mapping) for each in messages):
            raise InvalidParameterError(
                'the input must be a text or a list of messages ({"role": ..., "content": ...}), '
                f"not {type(given).__name__}",
                param="input",
            )
        if not messages:
            raise InvalidParameterError("the input is empty", param="input")
        if any(map(is_image, _parts(messages))):
            raise InvalidParameterError(
                "decisions are made about text alone, and the input has images; leave them out",
                param="input",
            )
        head, tail = self._plain(messages) if self._template is None else self._chat(messages)
        return StatePrompt(encode_chat(self._tokenizer, head), tail)

    def question(self, state: StatePrompt, question: Question) -> QuestionPrompt:
        """Put a question behind a state. Raises InvalidParameterError where the vocabulary has no
        labels for so many options."""
        labels, ids = self._chosen(question, state.tail)
        asked = join_traced((text_of(question, labels), state.tail))
        own = encode_chat(self._tokenizer, asked)
        return QuestionPrompt([*state.token_ids, *own], _digest(ids))

    def _chat(self, messages: Sequence[Message]) -> tuple[str, str]:
        """Render a chat whose last message ends with a question, and cut that out."""
        assert self._template is not None
        tag = token_hex(16)
        fitted = self._template.needs.fit_messages(without_developer(messages, self._template))
        rendered = self._template.render(
            _with_question(fitted, tag), template_kwargs={"enable_thinking": False}
        )
        if rendered.count(tag) != 1:
            raise RequestError(
                "the chat template does not show the end of the last message just once: no "
                "questions can be asked with it"
            )
        head, _, tail = rendered.partition(tag)
        return head, tail

    def _plain(self, messages: Sequence[Message]) -> tuple[str, str]:
        if any(message.get("role") != "user" for message in messages):
            raise InvalidParameterError(
                "this model has no chat template, so the input can be a text alone", param="input"
            )
        texts = [_text(message.get("content")) for message in messages]
        return "".join(f"{text}\n\n" for text in texts), _PLAIN_TAIL

    def _chosen(self, question: Question, tail: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """The first labels of a question all of which are single tokens, and these."""
        known = self._known(tail)
        for labels in question.labels(self._letters(tail, known, len(question.lines))):
            ids = [self._token_of(label, tail, known) for label in labels]
            found = tuple(each for each in ids if each is not None)
            if len(set(found)) == len(labels):
                return labels, found
        raise InvalidParameterError(
            "this model cannot answer such a question: its vocabulary has no single tokens for "
            f"{labels[0]!r}, {labels[1]!r}, ...",
            param="questions",
        )

    def _letters(self, tail: str, known: dict[str, int | None], count: int) -> list[str]:
        """Labels for so many options: letters, or pairs of them where there are more."""
        if count <= len(ascii_uppercase):
            return list(ascii_uppercase[:count])
        pairs = map("".join, product(ascii_uppercase, repeat=2))
        found = list(islice(self._single(pairs, tail, known), count))
        if len(found) < count:
            raise InvalidParameterError(
                f"{count} options are given, and this model's vocabulary has labels for "
                f"{max(len(found), len(ascii_uppercase))}; give fewer",
                param="questions",
            )
        return found

    def _single(
        self, labels: Iterable[str], tail: str, known: dict[str, int | None]
    ) -> Iterable[str]:
        return (each for each in labels if self._token_of(each, tail, known) is not None)

    def _known(self, tail: str) -> dict[str, int | None]:
        """What is known of the labels behind a tail."""
        found = self._labels.pop(tail, {})
        self._labels[str(tail)] = found
        while len(self._labels) > _MAX_TAILS:
            self._labels.popitem(last=False)
        return found

    def _token_of(self, label: str, tail: str, known: dict[str, int | None]) -> int | None:
        """The token that an answer of just this label begins and ends with; None if there are
        several."""
        if label not in known:
            before = encode_chat(self._tokenizer, tail)
            # behind a word, an answer begins with a space; behind a control token it does not
            is_open = tail[-1:].isspace() or before[-1:] == [] or self._is_special(before[-1])
            written = encode_chat(
                self._tokenizer, join_traced((tail, label if is_open else f" {label}"))
            )
            is_single = written[:-1] == before
            known[label] = written[-1] if is_single else None
        return known[label]

    def _is_special(self, token_id: int) -> bool:
        return token_id in self._tokenizer.special_token_ids


def _digest(token_ids: tuple[int, ...]) -> Digest:
    params = SamplingParams(
        max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )
    return Digest(
        params=params, spec=RequestSpec(sampling=RowSampling(), weigh=WeighTokens(token_ids))
    )


def _with_question(messages: Sequence[Message], question: str) -> list[Message]:
    """Put a question behind the user's last message, or into one of its own."""
    *others, last = messages
    if last.get("role") != "user":
        return [*messages, {"role": "user", "content": question}]
    content, added = last.get("content"), f"\n\n{question}"
    if isinstance(content, str):
        return [*others, {**last, "content": content + added}]
    return [*others, {**last, "content": [*(content or ()), {"type": "text", "text": added}]}]


def _parts(messages: Sequence[Message]) -> Iterator[object]:
    """Return the parts of all contents that have some."""
    contents = (message.get("content") for message in messages)
    return chain.from_iterable(each for each in contents if isinstance(each, list | tuple))


def _text(content: Any) -> str:
    return content if isinstance(content, str) else joined_text(content)

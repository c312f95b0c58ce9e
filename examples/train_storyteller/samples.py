"""Training samples: conversations cut from tales, as token ids with a mark for the tokens to learn.

Owns the cutting of passages, the mix of the kinds of samples and its change over the run.
Deterministic: the same seed, index and progress give the same samples. Knows nothing of tensors or
the model.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tokenizers import Tokenizer

from . import prompts
from .corpus import FABLES, FAIRY_TALES, STORYBOOKS, Tale
from .grammar import GrammarTale, StoryGrammar, stem
from .kinds import STRANGE_HEROES
from .tales import COMPOSED, TaleComposer
from .tasks import TaskSource
from .topics import describe, hero_phrase, heroes_of, lower_nouns, recast, retell, topics_of
from .words import WORD, Lexicon

MAX_LEN = 512
SHORT_TALE_CHARS = 1750  # a tale of at most this many characters fits MAX_LEN with its request
RETELL_SHARE = 0.8
# of the tales retold: the hero may become anybody, and is what the request asks for
RECAST_SHARE = 0.7
# short tales with a hero who can be recast are read this many times as often as others
HERO_WEIGHT = 3
DESCRIBE_SHARE = 0.45
PLAIN_SHARE = 0.06
DIALOGUE_SHARE = 0.06
EARLY_PHASE = 0.25  # until here the cut passages are at most half as long: attention is cheaper
BROAD_PHASE = 0.6
FINAL_PHASE = 0.85


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids of one conversation and, for each, whether the model must learn to say it, and
    whether it is part of a word that the request names."""

    ids: list[int]
    is_target: list[bool]
    is_named: list[bool] = field(default_factory=list)
    """Empty where no word is named."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a tale: where it begins and ends decides how it may be asked for."""

    text: str
    tale: Tale
    has_start: bool
    has_end: bool
    hero: str = ""
    """Who plays the hero where the tale was recast."""


def kind_of(tale: Tale) -> str:
    if tale.book == STORYBOOKS:
        return "children"
    if tale.book in FABLES:
        return "fable"
    return "fairy tale" if tale.book in FAIRY_TALES else "novel"


class GrammarSource:
    """Draws samples from the story grammar."""

    def __init__(self, grammar: StoryGrammar | TaleComposer, encoder: "Encoder") -> None:
        self._grammar = grammar
        self._encoder = encoder

    def draw(self, rng: random.Random) -> Sample:
        """One conversation: mostly a request and its tale, now and then two tales or plain text."""
        tale = self._grammar.draw(rng)
        if rng.random() < PLAIN_SHARE:
            return self._encoder.plain(tale.text, has_end=True)
        named = list(tale.named)
        turns = [(prompts.system_turn(rng) + self.head(tale, rng), tale.text)]
        if rng.random() < DIALOGUE_SHARE:
            second = self._grammar.draw(rng)
            named += second.named
            request = prompts.follow_up([second.topic], rng)
            turns.append(
                ("\n" + prompts.turn("user", request) + prompts.reply_start(), second.text)
            )
        return self._encoder.join(turns, has_end=True, named=named)

    @staticmethod
    def head(tale: GrammarTale, rng: random.Random) -> str:
        """The conversation before the tale."""
        if tale.plot == COMPOSED:
            request = prompts.composed_request(tale.topic, rng)
        else:
            request = prompts.tale_request([tale.topic], "children", rng)
        return prompts.turn("user", request) + prompts.reply_start()


class ExchangeSource:
    """Draws samples of requests that are no stories."""

    def __init__(self, tasks: TaskSource, encoder: "Encoder") -> None:
        self._tasks = tasks
        self._encoder = encoder

    def draw(self, rng: random.Random) -> Sample:
        exchange = self._tasks.draw(rng)
        return self._encoder.join([(exchange.head, exchange.answer)], True, exchange.named)


class Encoder:
    """Turns conversations and plain text into samples."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def plain(self, text: str, has_end: bool) -> Sample:
        ids = self._tokenizer.encode(text).ids
        ids += [self._end_id(prompts.END_OF_TEXT)] if has_end else []
        return _clip(ids, [True] * len(ids))

    def join(
        self, turns: list[tuple[str, str]], has_end: bool, named: Sequence[str] = ()
    ) -> Sample:
        """Turns are pairs of what comes before a reply and the reply,
        which is what the model learns; `named` are words of the requests."""
        ids: list[int] = []
        is_target: list[bool] = []
        is_named: list[bool] = []
        for position, (head, reply) in enumerate(turns):
            head_ids = self._tokenizer.encode(head).ids
            encoded = self._tokenizer.encode(reply)
            reply_ids, marks = list(encoded.ids), _marks(encoded.offsets, reply, named)
            if has_end or position + 1 < len(turns):
                reply_ids.append(self._end_id(prompts.TURN_END))
            ids += head_ids + reply_ids
            is_target += [False] * len(head_ids) + [True] * len(reply_ids)
            is_named += [False] * len(head_ids) + marks
            is_named += [False] * (len(ids) - len(is_named))
        return Sample(ids[:MAX_LEN], is_target[:MAX_LEN], is_named[:MAX_LEN])

    def _end_id(self, token: str) -> int:
        token_id = self._tokenizer.token_to_id(token)
        assert token_id is not None, token
        return int(token_id)


class SampleSource:
    """Draws samples from tales. `tales` must hold no held-out tale when it is used for training."""

    def __init__(
        self,
        tales: list[Tale],
        tokenizer: Tokenizer,
        lexicon: Lexicon,
        *,
        shares: tuple[float, float] | None = None,
    ) -> None:
        """`shares` of short whole tales and of openings, for the whole run;
        by default they change with its progress."""
        self._shares_given = shares
        self._encoder = Encoder(tokenizer)
        self.lexicon = lexicon
        self._tales = tales
        self._weights = [tale.weight * tale.num_chars for tale in tales]
        self._short = [
            tale for tale in tales if tale.is_tale_start and tale.num_chars <= SHORT_TALE_CHARS
        ]
        self._short_weights = [
            HERO_WEIGHT if heroes_of(" ".join(tale.paragraphs)) else 1 for tale in self._short
        ]
        self._openings = [tale for tale in tales if tale.is_tale_start]
        self._opening_weights = [
            tale.weight * min(tale.num_chars, 2 * SHORT_TALE_CHARS) for tale in self._openings
        ]

    def draw(self, rng: random.Random, progress: float) -> Sample:
        """One sample; `progress` in [0, 1] shifts the mix towards short whole tales."""
        short_share, opening_share = self._shares_given or self._shares(progress)
        max_chars = SHORT_TALE_CHARS // 2 if progress < EARLY_PHASE else SHORT_TALE_CHARS
        choice = rng.random()
        if choice < short_share:
            if rng.random() < DIALOGUE_SHARE:
                return self._dialogue(rng)
            passage = self._whole(rng.choices(self._short, self._short_weights)[0])
        elif choice < short_share + opening_share:
            tale = rng.choices(self._openings, self._opening_weights)[0]
            passage = self._cut(tale, rng, from_start=True, max_chars=max_chars)
        else:
            tale = rng.choices(self._tales, self._weights)[0]
            passage = self._cut(tale, rng, from_start=rng.random() < 0.1, max_chars=max_chars)
        return self._conversation(self._rewrite(passage, rng), rng)

    @staticmethod
    def _shares(progress: float) -> tuple[float, float]:
        """Shares of short whole tales and of openings of tales; the rest are passages from
        anywhere.

        There are few short tales, and the network knows them by heart after some ten readings, so
        the middle of the run reads other things.
        """
        if progress < BROAD_PHASE:
            return 0.2, 0.25
        return (0.1, 0.2) if progress < FINAL_PHASE else (0.35, 0.3)

    def evaluation_samples(self, tales: list[Tale]) -> list[Sample]:
        """One fixed sample, asked for by its best topic, of each given tale; nothing is retold."""
        rng = random.Random(0)
        return [
            self._conversation(self._cut(tale, rng, from_start=True), random.Random(1))
            for tale in tales
        ]

    def _whole(self, tale: Tale) -> Passage:
        return Passage("\n\n".join(tale.paragraphs), tale, True, True)

    def _cut(
        self, tale: Tale, rng: random.Random, from_start: bool, max_chars: int = SHORT_TALE_CHARS
    ) -> Passage:
        """Whole paragraphs from the start or from a random one, up to a random length."""
        start = 0 if from_start else rng.randrange(len(tale.paragraphs))
        wanted = rng.uniform(0.5, 1.0) * max_chars
        end, length = start, 0
        while end < len(tale.paragraphs) and length < wanted:
            length += len(tale.paragraphs[end]) + 2
            end += 1
        text = "\n\n".join(tale.paragraphs[start:end])
        return Passage(text, tale, start == 0, end == len(tale.paragraphs))

    def _rewrite(self, passage: Passage, rng: random.Random) -> Passage:
        text, hero = passage.text, ""
        if passage.tale.book in FABLES:
            text = lower_nouns(text, self.lexicon)
        if passage.tale.is_tale_start and rng.random() < RETELL_SHARE:
            if passage.has_start and rng.random() < RECAST_SHARE:
                text, hero = recast(text, rng)
            else:
                text = retell(text, rng)
        if passage.has_start and passage.tale.is_tale_start and rng.random() < DESCRIBE_SHARE:
            text = describe(text, rng)
        return Passage(text, passage.tale, passage.has_start, passage.has_end, hero)

    def _request(self, passage: Passage, rng: random.Random) -> str:
        topics = topics_of(passage.text, self.lexicon)
        if passage.hero:
            hero = hero_phrase(passage.hero, passage.text, self.lexicon)
            topics = [hero] * 3 + [topic for topic in topics if topic != hero]
        if passage.has_start and passage.tale.is_tale_start:
            title = passage.tale.title if len(passage.tale.title) < 50 else ""
            return prompts.book_request(topics, kind_of(passage.tale), rng, title)
        return prompts.scene_request(topics, rng)

    def _conversation(self, passage: Passage, rng: random.Random) -> Sample:
        if rng.random() < PLAIN_SHARE:
            return self._encoder.plain(passage.text, passage.has_end)
        head = (
            prompts.system_turn(rng)
            + prompts.turn("user", self._request(passage, rng))
            + prompts.reply_start()
        )
        return self._encoder.join([(head, passage.text)], passage.has_end)

    def _dialogue(self, rng: random.Random) -> Sample:
        """Two short tales asked for one after the other."""
        shortest = sorted(rng.sample(self._short, 8), key=lambda tale: tale.num_chars)[:2]
        first, second = (self._rewrite(self._whole(tale), rng) for tale in shortest)
        topics = topics_of(second.text, self.lexicon)
        head = prompts.turn("user", self._request(first, rng)) + prompts.reply_start()
        middle = "\n" + prompts.turn("user", prompts.follow_up(topics, rng)) + prompts.reply_start()
        return self._encoder.join([(head, first.text), (middle, second.text)], has_end=True)


def _clip(ids: list[int], is_target: list[bool]) -> Sample:
    return Sample(ids[:MAX_LEN], is_target[:MAX_LEN])


class MixedSource:
    """Draws a fixed share of its samples from each of several sources, the rest from the corpora."""

    def __init__(self, sources: Sequence[tuple["Drawn", float]], corpora: SampleSource) -> None:
        """`sources` come with their shares, whose sum is at most 1."""
        self._sources = [source for source, _ in sources]
        self._shares = [share for _, share in sources]
        if not 0.0 <= sum(self._shares) <= 1.0 + 1e-9:
            raise ValueError(f"the shares {self._shares} add up to more than 1; lower one")
        self._corpora = corpora

    def draw(self, rng: random.Random, progress: float) -> Sample:
        choice = rng.random()
        for source, share in zip(self._sources, self._shares, strict=True):
            choice -= share
            if choice < 0:
                return source.draw(rng)
        return self._corpora.draw(rng, progress)


class Drawn(Protocol):
    """A source of samples that does not change over the run."""

    def draw(self, rng: random.Random) -> Sample: ...


def _marks(offsets: Sequence[tuple[int, int]], text: str, named: Sequence[str]) -> list[bool]:
    """For each token of the text, whether it is part of a named word (endings aside)."""
    stems = "|".join(re.escape(stem(word)) for word in named if word)
    spans = [match.span() for match in re.finditer(rf"\b(?:{stems})", text, re.I)] if stems else []
    return [any(begin < last and first < end for first, last in spans) for begin, end in offsets]


def learn_lexicon(tales: list[Tale]) -> Lexicon:
    """The lexicon of all paragraphs of the tales."""
    return Lexicon.learn(WORD.findall(paragraph) for tale in tales for paragraph in tale.paragraphs)


def free_nouns(lexicon: Lexicon) -> tuple[str, ...]:
    """Nouns of the books for heroes and things of the story grammar, but for those that the
    evaluation keeps for itself."""
    return tuple(
        noun
        for noun in sorted(lexicon.nouns)
        if 3 <= len(noun) <= 12 and noun not in STRANGE_HEROES and not noun.endswith(("s", "ing"))
    )

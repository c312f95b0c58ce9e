"""Encoded images as a prerequisite: a sequence runs once all images of its prompt are encoded.

Owns what the control plane knows of the executor's memory for encoded images: which are there, and
which must stay because a running sequence has not computed all their places yet. Those that nothing
needs stay as well, as long as there is room: the same image costs no time again. Sequences are
served in the order in which they came to wait; the first takes what it needs before others do.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import NamedTuple

from quire.core.images import FORGET_ALL_IMAGES, IMAGES, Image, ImageOrder, ImageVerdict
from quire.core.plan import Record
from quire.core.request import Sequence
from quire.core.scheduler.prerequisites import Settled

MAX_ENCODE_S = 300.0
"""From the order, or the verdict on the image before, to the verdict: one image, between the steps
of a slow machine."""
NOT_ENCODED = "waits for its images to be encoded"
TOO_SLOW = f"an image was not encoded within {MAX_ENCODE_S:g} s"


class _Encoding(NamedTuple):
    """An order to encode that no verdict has settled."""

    number: int
    ordered_s: float


class EncodedImages:
    """Implements `Prerequisite` and `Retained`."""

    name = IMAGES

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens` places of images are kept; no request has more."""
        self._max_tokens = max_tokens
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        """Places of each image that is there or on its way, least recently used first."""
        self._encoding: dict[bytes, _Encoding] = {}
        """In the order in which they are encoded."""
        self._num_orders = 0
        self._settled_s = 0.0
        """When the last verdict came: the next image was begun then."""
        self._running: dict[int, Sequence] = {}
        """Those that may still read their images, by identity."""
        self._waiting: deque[Sequence] = deque()
        self._to_forget = [FORGET_ALL_IMAGES]
        """Orders for the next plan; the first, since the worker may have served another control
        plane."""

    def refusal(self, sequence: Sequence) -> str | None:
        if all(self._is_there(digest) for digest in _images(sequence)):
            return None
        return NOT_ENCODED

    def park(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def unpark(self, sequence: Sequence) -> None:
        if sequence in self._waiting:
            self._waiting.remove(sequence)

    def parked(self) -> list[Sequence]:
        return list(self._waiting)

    def retain(self, sequence: Sequence) -> None:
        images = _images(sequence)
        for digest in images:
            if digest in self._sizes:  # not of a fork that has computed all places
                self._sizes.move_to_end(digest)
        if images:
            self._running[id(sequence)] = sequence

    def release(self, sequence: Sequence) -> None:
        self._running.pop(id(sequence), None)

    def take_orders(self, now: float) -> tuple[Record, ...]:
        orders, self._to_forget = self._to_forget, []
        self._let_go()
        needed = {digest for each in self._running.values() for digest in _images(each)}
        for sequence in self._waiting:
            images = _images(sequence)
            needed |= images.keys()
            for digest, image in images.items():
                if digest in self._sizes:
                    continue
                victims = self._victims(image.num_tokens, needed)
                if victims is None:
                    return tuple(orders)
                orders += [ImageOrder(victim, None) for victim in victims]
                self._num_orders += 1
                self._sizes[digest] = image.num_tokens
                self._encoding[digest] = _Encoding(self._num_orders, now)
                orders.append(ImageOrder(digest, image, self._num_orders))
        return tuple(orders)

    def take_news(self, news: tuple[Record, ...], now: float) -> list[Settled]:
        if not news and not self._waiting and not self._encoding:
            return []
        settled = list[Settled]()
        for digest, error, number in map(ImageVerdict._make, news):
            encoding = self._encoding.get(digest)
            if encoding is None or encoding.number != number:
                continue  # given up
            del self._encoding[digest]
            self._settled_s = now
            if error is not None:
                settled.append(self._failed(digest, error))
        settled += self._give_up(now)
        ready = [each for each in self._waiting if self.refusal(each) is None]
        for each in ready:
            self._waiting.remove(each)
        if ready:
            settled.append(Settled(ready))
        return settled

    def lose_flights(self) -> None:
        assert not self._running
        self._sizes.clear()
        self._encoding.clear()
        self._to_forget = [FORGET_ALL_IMAGES]

    def _is_there(self, digest: bytes) -> bool:
        return digest in self._sizes and digest not in self._encoding

    def _let_go(self) -> None:
        """Forget sequences that have computed all places of their images."""
        for key, sequence in list(self._running.items()):
            if sequence.num_computed >= sequence.sampling.images[-1].end:
                del self._running[key]

    def _victims(self, num_tokens: int, needed: set[bytes]) -> list[bytes] | None:
        """Make room, and return what must be forgotten for it; None where there is none to make."""
        victims = list[bytes]()
        room = self._max_tokens - sum(self._sizes.values()) - num_tokens
        for digest, size in self._sizes.items():
            if room >= 0:
                break
            if digest not in needed and digest not in self._encoding:
                victims.append(digest)
                room += size
        if room < 0:
            return None
        for digest in victims:
            del self._sizes[digest]
        return victims

    def _failed(self, digest: bytes, error: str) -> Settled:
        """End the wait of those that an image has failed."""
        del self._sizes[digest]
        failed = [each for each in self._waiting if digest in _images(each)]
        for each in failed:
            self._waiting.remove(each)
        return Settled(failed, error)

    def _give_up(self, now: float) -> list[Settled]:
        """End the wait for the image that is being encoded, if it takes too long, whatever becomes
        of it. Those behind it are not late."""
        first = next(iter(self._encoding.items()), None)
        if first is None or now - max(first[1].ordered_s, self._settled_s) <= MAX_ENCODE_S:
            return []
        digest, self._settled_s = first[0], now
        del self._encoding[digest]
        self._to_forget.append(ImageOrder(digest, None))
        return [self._failed(digest, TOO_SLOW)]


def _images(sequence: Sequence) -> dict[bytes, Image]:
    """Return the images of a sequence's prompt, each once."""
    return {image.digest: image for _, image in sequence.sampling.images}

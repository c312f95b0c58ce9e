"""Which requests a new engine is given, and when: so that one that kills engines is found, and ends
alone.

It cannot be seen which request killed an engine; but a poisonous one dies again wherever it runs. A
death is *fruitless* for a request that had gained hardly anything from the engine that died: a
request that made progress is not the cause. After one fruitless death, requests are let in one at a
time, each only once the one before has gained something. After two, a request runs quite alone,
before any other. If that engine dies as well, the request fails, and all others go on.

Engines that are killed from outside cost no innocent request anything but time, unless three in a
row are killed in the very moments in which it alone is being let in.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.engine.process.journal import JournalEntry

MIN_DELIVERED = 2
"""Tokens that clear a request. One is not enough: it comes of the prompt's computation,
before the first decode."""
ALONE = 2
"""Fruitless deaths after which a request runs alone; one more, and it fails."""


def is_cleared(entry: JournalEntry) -> bool:
    """Return whether the engine that runs now has shown that it survives this request."""
    return entry.num_delivered >= MIN_DELIVERED


def choose(entries: Iterable[JournalEntry]) -> list[JournalEntry]:
    """Return the requests to give to the engine now, of those in flight in their order of
    arrival."""
    unsent, doubtful = [], []
    for entry in entries:
        if not entry.is_sent:
            unsent.append(entry)
        elif entry.num_fruitless and not is_cleared(entry):
            doubtful.append(entry)
    alone = [entry for entry in unsent if entry.num_fruitless >= ALONE]
    if any(entry.num_fruitless >= ALONE for entry in doubtful):
        return []
    if alone:
        return alone[:1] if not doubtful else []
    chosen = [entry for entry in unsent if not entry.num_fruitless]
    if not doubtful:
        chosen += [entry for entry in unsent if entry.num_fruitless][:1]
    return chosen


def judge(entries: Iterable[JournalEntry]) -> JournalEntry | None:
    """An engine has died with these requests: note for whom it was fruitless; the one that is
    convicted, if any.

    Requests that the engine did not have are none of its business.
    """
    sent = [entry for entry in entries if entry.is_sent]
    for entry in sent:
        entry.num_fruitless = 0 if is_cleared(entry) else entry.num_fruitless + 1
    if len(sent) == 1 and sent[0].num_fruitless > ALONE:
        return sent[0]
    return None

"""A batch's answers, appended as they come to two files: those that were given, and the errors.

The files are the progress: how many answers there are is counted, and never written anywhere else.
Blocking.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from itertools import islice
from typing import Any

import msgspec

from quire.server.api.openai.batch_input import digest_of
from quire.server.api.openai.file_store import RESULTS, FileStore

_NAMED_TOGETHER = 512
"""Entries of one write."""


def new_request_id() -> str:
    """Return what a request of a batch is called."""
    return f"batch_req_{secrets.token_hex(12)}"


class _Problem(msgspec.Struct):
    code: str | None = None


class _Answered(msgspec.Struct):
    """Of a result's line, what tells which request has been answered, or will not be."""

    custom_id: str
    error: _Problem | None = None


EXPIRED, CANCELLED = "batch_expired", "batch_cancelled"
_MESSAGES = {
    EXPIRED: "This request could not be executed before the completion window expired.",
    CANCELLED: "This request was not executed: the batch was cancelled before.",
}


def _unanswered(custom_id: str, code: str) -> dict[str, Any]:
    """Return the entry of a request that was not answered, as OpenAI has it."""
    return {
        "id": new_request_id(),
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": _MESSAGES[code]},
    }


class BatchResults:
    """The results of one batch, whose record names their files."""

    def __init__(self, store: FileStore, tenant: str, record: dict[str, Any]) -> None:
        self._store = store
        self._tenant = tenant
        self._batch_id: str = record["id"]
        self._file_ids: dict[str, str] = {kind: record[f"_{kind}_file_id"] for kind in RESULTS}
        self.num_good = self.num_bad = 0

    def recount(self) -> set[bytes]:
        """Digests of the requests that have an answer.
        A last line that was not written to its end is cut off."""
        done: set[bytes] = set()
        cancelled: set[bytes] = set()
        counts: list[int] = []
        for file_id in self._file_ids.values():
            before = len(done)
            self._store.cut(self._tenant, file_id, self._read(file_id, done, cancelled))
            counts.append(len(done) - before)
        self.num_good, self.num_bad = counts
        return done | cancelled

    def append(self, entry: dict[str, Any], *, is_good: bool) -> None:
        """Keep an answer. Raises ApiError, and then nothing of it is kept."""
        self._append("output" if is_good else "error", [entry])
        self.num_good += is_good
        self.num_bad += not is_good

    def leave(self, custom_ids: Iterable[str], code: str) -> None:
        """Name requests that will not be answered among the errors; those that time ran out for
        have failed, and those that were cancelled have not. Raises ApiError, and then some of them
        are named."""
        left = iter(custom_ids)
        while some := list(islice(left, _NAMED_TOGETHER)):
            self._append("error", [_unanswered(each, code) for each in some])
            self.num_bad += len(some) if code == EXPIRED else 0

    def register(self) -> dict[str, str]:
        """Make files of what there is; the record's fields that name them."""
        return {
            f"{kind}_file_id": file_id
            for kind, file_id in self._file_ids.items()
            if self._store.register_results(self._tenant, file_id, f"{self._batch_id}_{kind}.jsonl")
        }

    def _append(self, kind: str, entries: list[dict[str, Any]]) -> None:
        data = b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries)
        self._store.append(self._tenant, self._file_ids[kind], data)

    def _read(self, file_id: str, done: set[bytes], cancelled: set[bytes]) -> int:
        """Enter what a file has answered, and what was cancelled; return how many of its bytes are
        whole lines."""
        num_bytes = 0
        if not self._store.size(self._tenant, file_id):
            return 0
        with self._store.open_content(self._tenant, file_id) as results:
            for raw in results:
                try:
                    answered = (
                        msgspec.json.decode(raw, type=_Answered) if raw.endswith(b"\n") else None
                    )
                except msgspec.DecodeError:
                    answered = None
                if answered is None:
                    break
                is_cancelled = answered.error is not None and answered.error.code == CANCELLED
                (cancelled if is_cancelled else done).add(digest_of(answered.custom_id))
                num_bytes += len(raw)
        return num_bytes

"""Files of stored blocks: cut at any byte, shared by processes, bounded."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from quire.core.plan import RowWork, StepPlan
from quire.core.tiers import TIERS, StoredKey, TierNews, TierOrder
from quire.executor.null import NullMemory
from quire.tiers import companion
from quire.tiers import segments as segments_module
from quire.tiers.companion import StoredBlocks
from quire.tiers.disk import DiskStore
from quire.tiers.segments import HEADER_BYTES, CacheIdentity

ROOT = Path(__file__).parents[2]
IDENTITY = CacheIdentity(bytes(range(32)), 4, 40)


def key(number: int, parent: int = 0) -> StoredKey:
    content = (number, 1, 2, -3)
    return StoredKey(number.to_bytes(16, "big"), parent.to_bytes(16, "big"), content)


def payload(number: int) -> memoryview:
    return memoryview(bytes([number % 256]) * IDENTITY.payload_bytes)


def write(store: DiskStore, *numbers: int) -> tuple[bytes, ...]:
    return store.append([(key(number), payload(number)) for number in numbers])


def read(store: DiskStore, *numbers: int) -> list[memoryview | None]:
    return list(store.read([key(number) for number in numbers]))


def open_store(folder: Path, max_bytes: int = 1 << 20) -> DiskStore:
    return DiskStore(folder, IDENTITY, max_bytes)


def segments(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def test_records_are_found_again_by_another_process(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, 1, 2, 3)
    write(store, 4)
    store.close()
    again = open_store(tmp_path)
    assert read(again, 3, 1, 9, 4) == [payload(3), payload(1), None, payload(4)]
    assert len(again) == 4 and (tmp_path / IDENTITY.digest.hex()).stat().st_mode & 0o077 == 0


def test_a_pipe_among_the_segments_is_not_waited_for(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path)) as store:
        write(store, 1)
    os.mkfifo(tmp_path / IDENTITY.digest.hex() / "00000009.kv")
    assert read(open_store(tmp_path), 1) == [payload(1)]


def test_a_write_that_was_cut_off_at_any_byte_leaves_what_was_whole(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, 1, 2)
    store.close()
    (path,) = segments(tmp_path)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        again = open_store(tmp_path)
        num_whole = max(0, length - HEADER_BYTES) // IDENTITY.record_bytes
        assert read(again, 1, 2) == [payload(1), payload(2)][:num_whole] + [None] * (2 - num_whole)
        again.close()


_WRITER = """
import sys
from pathlib import Path
from tests.tiers.test_disk import open_store, write
store = open_store(Path(sys.argv[1]), 1 << 30)
print("ready", flush=True)
for first in range(0, 1 << 20, 64):
    write(store, *range(first, first + 64))
"""


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_writes_leaves_whole_records(tmp_path: Path) -> None:
    random, num_found = Random(7), 0
    for _ in range(10):
        command = [sys.executable, "-c", _WRITER, str(tmp_path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(random.uniform(0.0, 0.03))
        process.kill()
        process.wait(30)
        process.stdout.close()
        store = open_store(tmp_path, 1 << 30)
        assert store.is_writer, "the lock ended with its process"
        found = [int.from_bytes(digest, "big") for digest in store.digests]
        assert read(store, *found) == [payload(number) for number in found]
        num_found += len(found)
        store.close()
    assert num_found > 100


def test_each_flipped_bit_costs_at_most_its_record(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, 1, 2)
    store.close()
    (path,) = segments(tmp_path)
    data = bytearray(path.read_bytes())
    for place in range(len(data)):
        data[place] ^= 1 << place % 8
        path.write_bytes(data)
        again = open_store(tmp_path)
        found = read(again, 1, 2)
        again.close()
        data[place] ^= 1 << place % 8
        assert found[0] in (payload(1), None) and found[1] in (payload(2), None)
        if place >= HEADER_BYTES:
            hit = (place - HEADER_BYTES) // IDENTITY.record_bytes
            assert found[1 - hit] == payload(2 - hit) and found[hit] is None


def test_content_and_parent_are_compared(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, 1)
    others = [key(1)._replace(content_ids=(1, 1, 2, 3)), key(1, parent=5)]
    assert [*store.read(others)] == [None, None]


def test_there_is_one_writer_and_readers_see_what_it_writes(tmp_path: Path) -> None:
    writer, reader = open_store(tmp_path), open_store(tmp_path)
    assert writer.is_writer and not reader.is_writer
    write(writer, 1)
    assert reader.refresh() == ((key(1).digest,), ())
    write(writer, 2)
    assert read(reader, 1, 2) == [payload(1), None]
    reader.refresh()
    assert read(reader, 1, 2) == [payload(1), payload(2)]
    segments(tmp_path)[0].unlink()
    assert read(reader, 1) == [None]
    assert reader.refresh() == ((), (key(1).digest, key(2).digest))
    writer.close()
    reader.refresh()
    assert reader.is_writer
    write(reader, 3)
    assert read(reader, 3) == [payload(3)]


def test_a_record_that_was_dropped_stays_dropped(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, 1, 2)
    store.drop(key(1).digest)
    store.close()
    assert read(open_store(tmp_path), 1, 2) == [None, payload(2)]


def test_the_folder_is_bounded_and_what_was_not_used_goes_first(tmp_path: Path) -> None:
    max_bytes = 40 * IDENTITY.record_bytes
    store = open_store(tmp_path, max_bytes)
    gone = set[bytes]()
    write(store, 0, 1)
    for number in range(2, 200):
        gone.update(write(store, number))
        assert read(store, 0, 1) == [payload(0), payload(1)], "it was used all the time"
        assert sum(path.stat().st_size for path in segments(tmp_path)) <= max_bytes + HEADER_BYTES
    assert len(store) > 20 and len(gone) + len(store) == 200
    assert read(store, 199, 100) == [payload(199), None]


def test_what_others_read_is_used(tmp_path: Path) -> None:
    """A process that only reads tells the writer by the times of the files."""
    store = open_store(tmp_path, 40 * IDENTITY.record_bytes)
    write(store, 1, 2)
    (first,) = segments(tmp_path)
    for number in range(3, 200):
        write(store, number)
        if number % 5 == 0:
            with contextlib.closing(open_store(tmp_path)) as reader:
                assert not reader.is_writer and read(reader, 1, 2) == [payload(1), payload(2)]
            later = time.time_ns() + number  # than what was written within one tick of the clock
            os.utime(first, ns=(later, later))


@pytest.mark.parametrize(("cost", "least", "most"), [(1.0, 30, 44), (3.0, 90, 132)])
def test_what_costs_more_to_compute_stays_longer(
    tmp_path: Path, cost: float, least: int, most: int
) -> None:
    """Three times as many others may have been used since, for three times the cost."""
    costs = {0: 1.0, 7: cost}
    store = DiskStore(tmp_path, IDENTITY, 40 * IDENTITY.record_bytes, costs.__getitem__)
    store.append([(key(number)._replace(place=7), payload(number)) for number in (1, 2)])
    number = 2
    while key(1).digest in store and number < 200:
        number += 1
        write(store, number)
    assert least <= number <= most


def test_a_block_stays_as_long_as_one_that_continues_it(tmp_path: Path) -> None:
    store = open_store(tmp_path, 40 * IDENTITY.record_bytes)
    write(store, 1, 2)
    store.append([(key(1000, parent=1), payload(0))])
    for number in range(3, 200):
        write(store, number)
        assert [*store.read([key(1000, parent=1)])] == [payload(0)], "it is read all the time"
        assert key(1).digest in store


def test_other_identities_make_room_first_unless_they_are_in_use(tmp_path: Path) -> None:
    max_bytes = 64 * IDENTITY.record_bytes
    other = IDENTITY._replace(digest=bytes(32))
    used = DiskStore(tmp_path, other, max_bytes)
    write(used, *range(36))
    store = open_store(tmp_path, max_bytes)
    write(store, *range(100, 112))
    assert len(segments(tmp_path / other.digest.hex())) == 9
    used.close()
    write(store, *range(200, 224))
    assert len(store) == 36 and len(segments(tmp_path / other.digest.hex())) < 9


def test_an_error_of_the_system_is_the_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)

    def fail(descriptor: int, buffers: object) -> int:
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "writev", fail)
    with pytest.raises(OSError, match="no space"):
        write(store, 1)


def test_what_was_to_be_dropped_is_dropped_where_the_disk_is_given_up_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(open_store(tmp_path)) as store:
        write(store, 1, 2, 3)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    memory = NullMemory(8, 4)
    half = StoredBlocks(memory, lambda: open_store(tmp_path), is_threaded=False)
    half.take_news(0.0)
    orders = (TierOrder("fetch", 1, (key(1),)), TierOrder("drop", 0, (key(2),)))
    with monkeypatch.context() as patch:
        patch.setattr(DiskStore, "read", fail)
        half.begin(StepPlan(1, (), orders={TIERS: orders}))
        news = [TierNews._make(each) for each in half.take_news(0.0)]
        later = (TierOrder("drop", 0, (key(3),)),)  # which was under way when the disk failed
        half.begin(StepPlan(2, (), orders={TIERS: later}))
    half.close()
    assert "off" in [each.verb for each in news]
    with contextlib.closing(open_store(tmp_path)) as again:
        assert read(again, 1, 2, 3) == [payload(1), None, None]


@pytest.mark.parametrize("num_bytes", [1, 8, 43, 64])
def test_a_checksum_tells_each_bit_and_the_order_of_words(num_bytes: int) -> None:
    data = bytearray(Random(num_bytes).randbytes(num_bytes))
    found = {segments_module.sums_of(memoryview(bytes(data)))}
    for bit in range(8 * num_bytes):
        data[bit // 8] ^= 1 << bit % 8
        found.add(segments_module.sums_of(memoryview(bytes(data))))
        data[bit // 8] ^= 1 << bit % 8
    assert len(found) == 1 + 8 * num_bytes
    if num_bytes >= 16:
        swapped = memoryview(bytes([*data[8:16], *data[:8], *data[16:]]))
        assert segments_module.sums_of(swapped) not in found
    for place in range(7, num_bytes - 8, 8):  # the highest bits of two words
        data[place] ^= 128
        data[place + 8] ^= 128
        found.add(segments_module.sums_of(memoryview(bytes(data))))
        data[place] ^= 128
        data[place + 8] ^= 128
    assert len(found) == 1 + 8 * num_bytes + len(range(7, num_bytes - 8, 8))


def test_writing_waits_while_prompts_are_computed_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(companion, "MAX_DELAY_S", 0.0)
    monkeypatch.setattr(companion, "PROMPT_PAUSE_S", 1e9)
    monkeypatch.setattr(companion, "MAX_POSTPONED_S", 1e9)
    memory = NullMemory(8, 4)
    identity = CacheIdentity(IDENTITY.digest, 4, memory.block_bytes)
    half = StoredBlocks(memory, lambda: DiskStore(tmp_path, identity, 1 << 20))
    kept = TierOrder("keep", 0, (key(1), key(2)), ((0,), (1,)))
    half.begin(StepPlan(1, (RowWork(0, 0, 4),), orders={TIERS: (kept,)}))
    with half._change:
        assert half._take_writes() == [] and half._writes, "a prompt is computed"
    monkeypatch.setattr(companion, "MAX_POSTPONED_BYTES", 1)
    half.begin(StepPlan(2, (RowWork(0, 4, 1),)))
    wait_until_written(half)
    monkeypatch.setattr(companion, "MAX_POSTPONED_BYTES", 1 << 20)
    later = TierOrder("keep", 0, (key(3),), ((2,),))
    half.begin(StepPlan(3, (RowWork(0, 5, 4),), orders={TIERS: (later,)}))
    half.close()  # which ends every wait
    with contextlib.closing(DiskStore(tmp_path, identity, 1 << 20)) as again:
        assert [each is not None for each in again.read([key(n) for n in (1, 2, 3)])] == [True] * 3


def wait_until_written(half: StoredBlocks) -> None:
    until = time.monotonic() + 60
    while half.is_busy:
        assert time.monotonic() < until, "nothing is written"
        time.sleep(0.001)

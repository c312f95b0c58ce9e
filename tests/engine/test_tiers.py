"""What was stored is restored with the same bits, in every format and by every kind of layer; what
was damaged, belongs to others or cannot be stored is computed."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from engines import run_all

from quire.config.engine import EngineConfig
from quire.core.params import SamplingParams
from quire.core.scheduler import tiers as control
from quire.core.scheduler.prompt_cache import prompt_cache
from quire.core.scheduler.tiers import (
    RestoreCosts,
    StoredPrefixes,
    TierStats,
    origin_of,
    stored_prefixes,
)
from quire.core.tiers import TierOrder
from quire.engine.assembly import tiers as assembly
from quire.engine.assembly.builder import build_engine
from quire.engine.assembly.fingerprint import fingerprint
from quire.engine.assembly.preparation import prepare_model
from quire.engine.loop.engine import Engine
from quire.errors import ConfigError
from quire.tiers import companion
from quire.tiers.compression import Compression, Payload
from tests.engine.conftest import MakeEngine
from tests.engine.test_exactness import LATENT
from tests.engine.test_windows import GEMMA3

SHARED = [7 * place % 251 + 3 for place in range(41)]
PROMPTS = [SHARED, [*SHARED[:30], *range(20, 40)]]


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restoring always pays, and small writes do not wait."""
    monkeypatch.setattr(RestoreCosts, "restore_s", lambda self, count: 0.0)
    monkeypatch.setattr(companion, "MAX_DELAY_S", 0.0)
    monkeypatch.setattr(companion, "PROMPT_PAUSE_S", 0.0)


def answers(
    engine: Engine, prompts: list[list[int]] = PROMPTS, max_tokens: int = 12, **given: Any
) -> list[object]:
    """Tokens and log-probabilities of all prompts, to the bit."""
    params = SamplingParams(
        temperature=0.8, seed=3, max_tokens=max_tokens, logprobs=1, ignore_eos=True
    )
    for number, token_ids in enumerate(prompts):
        prompt: Any = {"prompt_token_ids": token_ids, **given}
        engine.add_request(str(number), prompt, params)
    outputs = run_all(engine)
    found = [outputs[str(number)].outputs[0] for number in range(len(prompts))]
    assert all(output.finish_reason == "length" for output in found)
    return [(output.token_ids, output.logprobs) for output in found]


def stats_of(engine: Engine) -> TierStats:
    (half,) = (each for each in engine.scheduler.admission.prerequisites if each.name == "tiers")
    assert isinstance(half, StoredPrefixes)
    return half.stats


def stored(make: Callable[..., Engine], folder: Path, **options: Any) -> list[object]:
    """Fill a folder; returns the answers."""
    engine = make(kv_cache_dir=str(folder), **{"block_size": 8, **options})
    expected = answers(engine)
    while engine.idle():
        pass
    engine.close()
    assert list(folder.rglob("*.kv")), "nothing was written"
    return expected


@pytest.mark.slow_except("bfloat16")
@pytest.mark.parametrize("kv_format", ["float32", "bfloat16", "int8", "fp8"])
def test_a_second_start_restores_the_same_bits(
    make_engine: MakeEngine, tmp_path: Path, kv_format: str
) -> None:
    expected = stored(make_engine, tmp_path, kv_cache_dtype=kv_format)
    second = make_engine(kv_cache_dir=str(tmp_path), block_size=8, kv_cache_dtype=kv_format)
    assert answers(second) == expected
    stats = stats_of(second)
    assert stats.num_restored_blocks == 5 + 3 and stats.num_faulty_blocks == 0
    assert second.scheduler.stats.num_prefix_hit_tokens >= 40 + 48


def test_it_is_shown_where_a_block_came_from(make_engine: MakeEngine, tmp_path: Path) -> None:
    stored(make_engine, tmp_path)
    second = make_engine(kv_cache_dir=str(tmp_path), block_size=8)
    answers(second)
    scheduler = second.scheduler
    shown = [
        origin_of(scheduler.admission.prerequisites, scheduler.manager, block)
        for node in scheduler.manager.index.nodes()
        if node.digest
        for block in node.blocks
    ]
    restored = [each for each in shown if each[0] == "restored"]
    assert len(restored) == stats_of(second).num_restored_blocks
    assert all(is_stored for _, is_stored, _ in restored)
    assert any(origin == "computed" for origin, _, _ in shown)
    second.reset_prefix_cache()
    prerequisites, manager = scheduler.admission.prerequisites, scheduler.manager
    assert {origin_of(prerequisites, manager, block)[0] for block in range(8)} == {""}


class Follower:
    """What a reader of the events knows of each tier."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._log, self._last = engine, "", 0
        self.known: dict[str, set[bytes]] = {}
        self.num_snapshots = 0

    def read(self) -> None:
        cache = prompt_cache(self._engine.scheduler.admission.prerequisites)
        assert cache is not None
        batch = cache.events.read(self._log, self._last)
        self._log, self._last = batch.log, batch.last
        if batch.is_snapshot:
            self.known, self.num_snapshots = {}, self.num_snapshots + 1
        for event in batch.events:
            if event.kind == "stored":
                self.known.setdefault(event.medium, set()).update(event.digests)
            elif event.kind == "removed":
                assert self.known[event.medium] >= set(event.digests)
                self.known[event.medium].difference_update(event.digests)
            elif event.kind == "cleared":
                self.known["pool"] = set()

    def of(self, medium: str) -> set[bytes]:
        return self.known.get(medium, set())


@pytest.mark.slow
def test_events_tell_which_tier_has_a_block(make_engine: MakeEngine, tmp_path: Path) -> None:
    options = {"kv_cache_dir": str(tmp_path), "block_size": 8, "num_blocks": 20}
    first = make_engine(**options, kv_offloading_size=2e-5)
    follower = Follower(first)
    follower.read()
    for number in range(4):
        prompts = [[number + 3, *prompt] for prompt in PROMPTS]
        answers(first, prompts)
        follower.read()
    settle(first)
    follower.read()
    half = first.executor.worker.companions.of("tiers")  # type: ignore[attr-defined]
    assert follower.of("host") == set(half._host.digests), "some had to make room"
    assert follower.of("disk") == set(half._store.digests)
    assert 0 < len(follower.of("host")) < len(follower.of("disk"))
    pool = {node.digest for node in first.scheduler.manager.index.nodes() if node.digest}
    assert follower.of("pool") == pool and follower.num_snapshots == 1
    stored = follower.of("disk")
    first.close()
    second = make_engine(**options)
    answers(second, [[3, *SHARED]])
    follower = Follower(second)
    follower.read()
    assert follower.of("disk") >= stored and not follower.of("host"), "a snapshot has the tiers"
    cache = prompt_cache(second.scheduler.admission.prerequisites)
    assert cache is not None and cache.clear() > 0
    settle(second)
    follower.read()
    assert follower.num_snapshots == 1 and follower.of("pool") == set()
    assert follower.of("disk") < stored, "what was in the pool was dropped there, too"


@pytest.mark.slow_except("int8")
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_a_compressed_tier_gives_back_what_is_near_to_what_was_computed(
    make_engine: MakeEngine, tmp_path: Path, form: str
) -> None:
    options = {"block_size": 8, "num_blocks": 20, "kv_offloading_size": 0.01}
    plain, engine = make_engine(**options), make_engine(**options, kv_offloading_dtype=form)
    expected = answers(plain)
    assert answers(engine) == expected, "what the pool has is exact"
    for each in (plain, engine):
        settle(each)
        answers(each, [[number + 3, *SHARED] for number in range(6)])  # which take the whole pool
        settle(each)
    halves = [
        each.executor.worker.companions.of("tiers")._host  # type: ignore[attr-defined]
        for each in (plain, engine)
    ]
    assert len(halves[0].digests) == len(halves[1].digests) > 20
    assert halves[1]._num_bytes < 0.4 * halves[0]._num_bytes, "from float32"
    assert answers(plain) == expected
    tiers = stored_prefixes(engine.scheduler.admission.prerequisites)
    assert tiers is not None and tiers.stats.num_restored_blocks == 0
    found = answers(engine)
    assert tiers.stats.num_restored_blocks > 0 and found != expected
    assert abs(first_logprob(found) - first_logprob(expected)) < 0.1


def test_blocks_that_cannot_be_packed_cost_no_others(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_calls, pack = 0, Compression.pack

    def fail_at_first(self: Compression, payload: Payload) -> Payload:
        nonlocal num_calls
        num_calls += 1
        if num_calls <= 2:
            raise MemoryError
        return pack(self, payload)

    monkeypatch.setattr(Compression, "pack", fail_at_first)
    options = {"block_size": 8, "num_blocks": 20, "kv_offloading_size": 0.01}
    engine = make_engine(**options, kv_offloading_dtype="int8")
    for number in range(6):
        answers(engine, [[number + 3, *SHARED]])
        settle(engine)
    half = engine.executor.worker.companions.of("tiers")  # type: ignore[attr-defined]
    assert num_calls > 2 and half._host.digests and not stats_of(engine).is_off
    lines = [each.message for each in caplog.records if "tiers" in each.name]
    assert len(lines) == 2 and all("kept in host memory" in each for each in lines)
    tiers = stored_prefixes(engine.scheduler.admission.prerequisites)
    assert tiers is not None and not tiers._offered, "they may be offered again"


def first_logprob(answered: list[object]) -> float:
    """Of the first answer's first token."""
    (token_ids, logprobs), *_ = cast("list[tuple[list[int], Any]]", answered)
    logprob: float = logprobs[0][token_ids[0]].logprob
    return logprob


def test_what_a_compressed_tier_gave_back_is_not_taken_for_exact(tiny_config: Path) -> None:
    """By other engines, whose folder or peer it may be."""
    config = EngineConfig(
        model=str(tiny_config),
        load_format="dummy",
        skip_tokenizer_init=True,
        kv_offloading_size=0.1,
    )
    names = set[str]()
    for form in ("auto", "int8", "fp8"):
        planned = prepare_model(replace(config, kv_offloading_dtype=form)).planned
        names.add(fingerprint(planned.plan, planned.files))
    assert len(names) == 3


def settle(engine: Engine) -> None:
    """Have everything written, and the control plane told."""
    half = engine.executor.worker.companions.of("tiers")  # type: ignore[attr-defined]
    until = time.monotonic() + 60
    while True:
        while engine.idle():
            pass
        if not half.is_busy:
            break
        assert time.monotonic() < until
        time.sleep(0.001)
    answers(engine, [[250]], max_tokens=1)  # its steps bring the news


def test_latent_rows_are_restored_as_well(make_engine: MakeEngine, tmp_path: Path) -> None:
    options = {"dtype": "bfloat16", "hf_overrides": LATENT, "block_size": 8}
    expected = stored(make_engine, tmp_path, **options)
    second = make_engine(kv_cache_dir=str(tmp_path), **options)
    assert answers(second) == expected
    assert stats_of(second).num_restored_blocks == 8


def test_groups_with_windows_are_restored_as_well(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3))

    def make(**options: Any) -> Engine:
        settings: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 8}
        settings |= {"kv_cache_memory": "1MiB", "skip_tokenizer_init": True}
        model = str(tmp_path)
        return build_engine(EngineConfig(model=model, load_format="dummy", **settings | options))

    folder = tmp_path / "cache"
    expected = stored(make, folder)
    second = make(kv_cache_dir=str(folder), block_size=8)
    assert answers(second) == expected
    assert stats_of(second).num_restored_blocks == 8
    second.close()


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for place in range(300, len(data), 900):
        data[place] ^= 4
    path.write_bytes(data)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])


def _fill(path: Path) -> None:
    path.write_bytes(bytes(len(path.read_bytes())))


@pytest.mark.slow_except("_cut")
@pytest.mark.parametrize("damage", [_flip, _cut, _fill, Path.unlink])
def test_damaged_files_are_computed_again(
    make_engine: MakeEngine, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    expected = stored(make_engine, tmp_path)
    for path in tmp_path.rglob("*.kv"):
        damage(path)
    second = make_engine(kv_cache_dir=str(tmp_path), block_size=8)
    assert answers(second) == expected
    assert stats_of(second).num_restored_blocks < 8
    assert (stats_of(second).num_faulty_blocks > 0) == (damage is _flip)
    second.close()
    third = make_engine(kv_cache_dir=str(tmp_path), block_size=8)
    assert answers(third) == expected
    assert stats_of(third).num_restored_blocks == 8, "what was computed again is stored again"


@pytest.mark.slow_except("salt")
@pytest.mark.parametrize(
    ("options", "given"),
    [({"seed": 1}, {}), ({"dtype": "bfloat16"}, {}), ({}, {"cache_salt": "another tenant"})],
    ids=["weights", "dtype", "salt"],
)
def test_what_belongs_to_others_is_not_found(
    make_engine: MakeEngine, tmp_path: Path, options: dict[str, Any], given: dict[str, Any]
) -> None:
    stored(make_engine, tmp_path)
    alone = answers(make_engine(block_size=8, **options), **given)
    other = make_engine(kv_cache_dir=str(tmp_path), block_size=8, **options)
    assert answers(other, **given) == alone
    assert stats_of(other).num_restored_blocks == 0


def test_weights_that_are_replaced_while_they_are_loaded_are_not_stored_for(
    make_engine: MakeEngine,
    tiny_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, folder = tmp_path / "config.json", tmp_path / "cache"
    shutil.copy(tiny_config, model)
    expected = answers(make_engine(model=model, block_size=8))
    digest = assembly._weights_digest

    def replaced(files: Any, to: Path) -> list[str]:
        os.utime(model, (0, 0))
        return digest(files, to)

    monkeypatch.setattr(assembly, "_weights_digest", replaced)
    engine = make_engine(model=model, kv_cache_dir=str(folder), block_size=8)
    for _ in range(2):
        assert answers(engine) == expected
    engine.close()
    assert stats_of(engine).is_off and not list(folder.rglob("*.kv"))
    assert "has been written to since it was read" in caplog.text


def test_what_other_code_computed_is_not_found(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = stored(make_engine, tmp_path)
    monkeypatch.setattr(assembly, "source_digest", lambda folder: "edited")
    second = make_engine(kv_cache_dir=str(tmp_path), block_size=8)
    assert answers(second) == expected
    assert stats_of(second).num_restored_blocks == 0


@pytest.mark.slow_except("28")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_costs_one_line_in_the_log(
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    expected = answers(make_engine(block_size=8))

    def fail(descriptor: int, buffers: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "writev", fail)
    engine = make_engine(kv_cache_dir=str(tmp_path), block_size=8)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            assert answers(engine) == expected
            engine.reset_prefix_cache()
    lines = [each for each in caplog.records if "tiers" in each.name]
    assert [each.levelname for each in lines] == ["ERROR"]
    assert stats_of(engine).is_off and stats_of(engine).num_restored_blocks == 0


@pytest.mark.slow
def test_a_second_process_reads_what_the_first_one_writes(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(companion, "_REFRESH_S", 0.01)
    writer = make_engine(kv_cache_dir=str(tmp_path), block_size=8)
    expected = answers(writer)
    for _ in range(200):  # its thread takes the writer's lock when it comes to run
        if stats_of(writer).num_kept_blocks:
            break
        time.sleep(0.05)
        writer.reset_prefix_cache()
        answers(writer)
    reader = make_engine(kv_cache_dir=str(tmp_path), block_size=8)
    for _ in range(200):
        reader.reset_prefix_cache()
        assert answers(reader) == expected
        if stats_of(reader).num_restored_blocks >= 8:
            break
    assert stats_of(reader).num_restored_blocks >= 8
    assert stats_of(reader).num_kept_blocks == 0, "there is one writer"
    writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("restores", [True, False])
def test_a_preempted_sequence_is_restored_or_computed_as_costs_say(
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    restores: bool,
) -> None:
    if not restores:
        monkeypatch.setattr(RestoreCosts, "restore_s", lambda self, count: 1e3 * count)
    prompts = [[place * (3 + number) % 250 + 3 for place in range(33)] for number in range(6)]
    expected = answers(make_engine(block_size=8), prompts, max_tokens=60)
    engine = make_engine(block_size=8, num_blocks=17, kv_offloading_size=0.1, max_model_len=100)
    with caplog.at_level(logging.INFO, logger=control.__name__):
        assert answers(engine, prompts, max_tokens=60) == expected
    assert engine.scheduler.stats.num_preemptions > 0
    assert (stats_of(engine).num_restored_blocks > 0) == restores
    lines = [each.getMessage() for each in caplog.records if each.name == control.__name__]
    assert lines and all("ms to restore them" in line for line in lines)
    assert any("are restored" in line for line in lines) == restores


def test_steps_that_are_lost_leave_no_block_that_was_never_written(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = stored(make_engine, tmp_path)
    engine = make_engine(kv_cache_dir=str(tmp_path), block_size=8)
    lost: list[TierOrder] = []

    def lose(self: companion.StoredBlocks, order: TierOrder) -> None:
        if not lost:
            lost.append(order)
            raise ValueError("injected: the plan is not carried out")
        place(self, order)

    place = companion.StoredBlocks._place
    monkeypatch.setattr(companion.StoredBlocks, "_place", lose)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, logprobs=1, ignore_eos=True)
    engine.add_request("lost", {"prompt_token_ids": PROMPTS[0]}, params)
    run_all(engine)
    assert lost and answers(engine) == expected


def test_what_costs_less_to_compute_is_computed(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = stored(make_engine, tmp_path)
    monkeypatch.setattr(RestoreCosts, "restore_s", lambda self, count: 1e3 * count)
    second = make_engine(kv_cache_dir=str(tmp_path), block_size=8)
    assert answers(second) == expected
    assert stats_of(second).num_stored_blocks >= 8 and stats_of(second).num_restored_blocks == 0


def test_a_long_prompt_is_restored_piece_by_piece(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "_MAX_FETCHED_BYTES", 9000)
    monkeypatch.setattr(companion, "MAX_FETCHED_BYTES", 1)
    expected = stored(make_engine, tmp_path)
    second = make_engine(kv_cache_dir=str(tmp_path), block_size=8)
    assert answers(second) == expected
    assert stats_of(second).num_restored_blocks == 8


def test_a_list_that_never_comes_is_waited_for_once(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(make_engine(block_size=8))
    monkeypatch.setattr(control, "MAX_LIST_S", 0.05)
    monkeypatch.setattr(companion.StoredBlocks, "_carry_out", lambda self, order: None)
    assert answers(make_engine(kv_cache_dir=str(tmp_path), block_size=8)) == expected


def test_a_folder_that_cannot_be_used_is_refused_before_a_server_loads(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = EngineConfig(model="quire-storyteller", kv_cache_dir=str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"kv_cache_dir=.*file. cannot be used: .*; choose anot"):
        prepare_model(config, is_for_here=False)


def test_options_that_cannot_work_are_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for options, reason in (
        ({"kv_cache_dir": str(tmp_path / "file")}, "cannot be used"),
        ({"kv_cache_dir": str(tmp_path / "open")}, "written by other users"),
        ({"kv_cache_dir": str(tmp_path), "enable_prefix_caching": False}, "it is off"),
        ({"kv_cache_dir": str(tmp_path), "kv_disk_size": 100}, "less than two blocks"),
        ({"kv_disk_size": "1GiB"}, "without a folder"),
        ({"kv_offloading_size": -1}, "number of GiB"),
        ({"kv_offloading_dtype": "int8"}, "give kv_offloading_size"),
        (
            {"kv_offloading_dtype": "fp8", "kv_offloading_size": 1, "kv_cache_dtype": "int8"},
            "would gain nothing",
        ),
        ({"kv_offloading_dtype": "int4", "kv_offloading_size": 1}, "'int4'"),
    ):
        with pytest.raises(ConfigError, match=reason):
            make_engine(**options)

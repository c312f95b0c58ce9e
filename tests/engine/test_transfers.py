"""A prompt that another engine has computed gives the same bits, whatever the two differ in; and
one whose keys and values are late, lost, damaged or another's is computed."""

from __future__ import annotations

import json
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import run_all
from ports import reserved_port
from ranks import SIZES_OF_GROUPS, hold_fork_server

from quire.common.pages import CAN_DISCARD
from quire.config.engine import EngineConfig
from quire.core.kvcache.audit import audit_manager
from quire.core.params import SamplingParams
from quire.core.scheduler import transfers as control
from quire.core.scheduler.transfers import TransferredPrefixes, TransferStats
from quire.engine.assembly import tiers as assembly
from quire.engine.assembly.builder import build_engine
from quire.engine.front.outputs import RequestOutput
from quire.engine.loop.engine import Engine
from quire.errors import ConfigError, InvalidParameterError, NotAvailableError
from quire.kernels import cpu
from quire.transfer import companion, connectors, layout
from tests.engine.conftest import TINY_LLAMA
from tests.engine.test_exactness import LATENT
from tests.engine.test_windows import GEMMA3, MISTRAL

HAS_NATIVE = cpu.absence() is None
PROMPT = [7 * place % 251 + 3 for place in range(75)]
CONNECTORS = ["SharedMemoryConnector", "TcpConnector"]
ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}

Make = Callable[..., Engine]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Builds engines of a tiny model; `role` and `transfer` say what they transfer, and how."""
    engines: list[Engine] = []
    port = reserved_port()

    def build(role: str | None = None, **options: Any) -> Engine:
        config = options.pop("config", TINY_LLAMA)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        settings: dict[str, Any] = {
            "dtype": "float32", "num_threads": 1, "max_num_seqs": 8, "block_size": 8,
            "kv_cache_memory": "1MiB", "skip_tokenizer_init": True, "load_format": "dummy",
        }  # fmt: skip
        transfer = options.pop("transfer", {})
        if role is not None:
            extra = {"folder": str(tmp_path / "sockets"), **transfer.pop("extra", {})}
            settings["kv_transfer_config"] = {
                "kv_connector": "TcpConnector",
                "kv_role": f"kv_{role}",
                "kv_port": port,
                "kv_connector_extra_config": extra,
                **transfer,
            }
        if any(name in options for name in SIZES_OF_GROUPS):
            hold_fork_server()
        engine = build_engine(EngineConfig(model=str(folder), **settings | options))
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        engine.close()


def answer(
    engine: Engine, transfer: dict[str, Any] | None = None, prompt: list[int] = PROMPT, **given: Any
) -> RequestOutput:
    """One request's last output."""
    salt = given.pop("cache_salt", None)
    extra = None if transfer is None else {"kv_transfer_params": transfer}
    options = {"temperature": 0.8, "seed": 3, "max_tokens": 12, "logprobs": 1, "ignore_eos": True}
    asked: Any = {"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})
    engine.add_request("one", asked, SamplingParams(**options | given, extra_args=extra))
    (output,) = run_all(engine).values()
    while engine.idle():
        pass
    if engine.has_work:
        engine.step()
    audit_manager(engine.scheduler.manager, [])
    return output


def bits(output: RequestOutput) -> list[object]:
    assert output.error is None
    return [(each.token_ids, each.logprobs) for each in output.outputs]


def stats_of(engine: Engine) -> TransferStats:
    (half,) = (
        each for each in engine.scheduler.admission.prerequisites if each.name == "transfers"
    )
    assert isinstance(half, TransferredPrefixes)
    return half.stats


def companion_of(engine: Engine) -> Any:
    (half,) = (
        each
        for each in engine.executor.worker.companions._all  # type: ignore[attr-defined]
        if each.name == "transfers"
    )
    return half


def computed(producer: Engine, **given: Any) -> dict[str, Any]:
    """Have a prompt computed; what the answer says of it."""
    found = answer(producer, ASKED, max_tokens=1, **given).kv_transfer_params
    assert found is not None and found["do_remote_prefill"] and not found["do_remote_decode"]
    return found


@pytest.mark.slow_except("*8, 8*Shared*", "*8, 16*Tcp*")
@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("sizes", [(8, 8), (8, 16), (16, 8), (5, 7)], ids=str)
def test_a_prompt_computed_elsewhere_gives_the_same_bits(
    make: Make, connector: str, sizes: tuple[int, int]
) -> None:
    expected = bits(answer(make(block_size=sizes[1])))
    how = {"kv_connector": connector}
    producer = make("producer", block_size=sizes[0], transfer=dict(how))
    consumer = make("consumer", block_size=sizes[1], transfer=dict(how))
    output = answer(consumer, computed(producer))
    assert bits(output) == expected
    most = len(PROMPT) // sizes[0] * sizes[0]
    assert output.num_cached_tokens >= min(most, 74) // sizes[1] * sizes[1]
    assert stats_of(consumer).num_pulled == 1 and stats_of(consumer).num_failed == 0
    assert stats_of(producer).num_staged == 1


FORMS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"kv_cache_dtype": "int8"},
    "fp8": {"kv_cache_dtype": "fp8", "dtype": "bfloat16"},
    "int8 weights": {"quantization": "int8", "dtype": "bfloat16"},
    "latent": {"hf_overrides": LATENT, "dtype": "bfloat16"},
    "two windows": {"config": GEMMA3},
    "windows alone": {"config": MISTRAL},
    "chunked": {"max_num_batched_tokens": 24},
    "speculation": {"speculative_config": {"method": "suffix"}},
    "tiers": {"kv_offloading_size": 0.01},
}


@pytest.mark.slow_except("two windows")
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_keys_and_values_is_transferred(make: Make, form: str) -> None:
    expected = bits(answer(make(**FORMS[form])))
    producer, consumer = (make(role, **FORMS[form]) for role in ("producer", "consumer"))
    output = answer(consumer, computed(producer))
    assert bits(output) == expected
    assert output.num_cached_tokens >= 72 and stats_of(consumer).num_pulled == 1
    for cut in (0, 9, 30, 60):  # what was placed serves other prompts, too
        prompt = [*PROMPT[:cut], *range(4, 20)]
        assert bits(answer(consumer, prompt=prompt)) == bits(answer(producer, prompt=prompt))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_NATIVE, reason="ranks need the native kernels")
@pytest.mark.parametrize(
    ("degrees", "backend"),
    [(((2, 1), (1, 1)), "mp"), (((1, 1), (2, 2)), "mp"), (((3, 1), (1, 2)), "sockets")],
    ids=str,
)
def test_engines_of_several_ranks_transfer_to_one_another(
    make: Make, degrees: tuple[tuple[int, int], tuple[int, int]], backend: str
) -> None:
    expected = bits(answer(make()))
    producer, consumer = (
        make(
            role, tensor_parallel_size=num_ranks, pipeline_parallel_size=num_stages,
            distributed_executor_backend=backend,
        )
        for role, (num_ranks, num_stages) in zip(("producer", "consumer"), degrees, strict=True)
    )  # fmt: skip
    output = answer(consumer, computed(producer))
    assert bits(output) == expected
    assert output.num_cached_tokens >= 72 and stats_of(consumer).num_pulled == 1


@pytest.mark.slow
@pytest.mark.skipif(not HAS_NATIVE, reason="ranks need the native kernels")
def test_ranks_transfer_blocks_that_are_larger_than_a_step(make: Make) -> None:
    options: dict[str, Any] = {
        "config": TINY_LLAMA | {"num_hidden_layers": 16}, "max_num_batched_tokens": 8,
        "max_num_seqs": 1, "max_model_len": 128, "block_size": 32, "kv_cache_memory": "2MiB",
    }  # fmt: skip
    expected = bits(answer(make(**options)))
    producer, consumer = (
        make(role, tensor_parallel_size=2, **options) for role in ("producer", "consumer")
    )
    assert bits(answer(consumer, computed(producer))) == expected
    assert stats_of(consumer).num_pulled == 1


def test_several_sequences_and_a_prefix_that_is_there_already(make: Make) -> None:
    expected = bits(answer(make(), n=3))
    producer, consumer = make("both"), make("consumer")
    answer(consumer, prompt=PROMPT[:33])
    output = answer(consumer, computed(producer, n=3), n=3)
    assert bits(output) == expected
    assert output.num_cached_tokens >= 72
    whole = layout.chunk_bounds(72, 2 * 2 * 2 * 64)
    assert len(whole) == 1 and 0 < stats_of(consumer).num_pulled_bytes < 72 * 512


def test_a_tiny_pool_takes_what_it_can(make: Make) -> None:
    options = {"kv_cache_memory": 13 * 8 * 512, "max_model_len": 96}
    expected = bits(answer(make(**options)))
    producer, consumer = make("producer"), make("consumer", **options)
    found = computed(producer)
    answer(consumer, prompt=[*range(60, 90)])
    assert bits(answer(consumer, found)) == expected


@pytest.mark.slow
def test_a_prompt_shorter_than_a_block_costs_others_nothing(make: Make) -> None:
    expected, producer = bits(answer(make())), make("producer")
    short = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": dict(ASKED)})
    producer.add_request("short", {"prompt_token_ids": PROMPT[:3]}, short)
    plain = SamplingParams(temperature=0.8, seed=3, max_tokens=12, logprobs=1, ignore_eos=True)
    producer.add_request("plain", {"prompt_token_ids": PROMPT}, plain)
    outputs = run_all(producer)
    assert bits(outputs["plain"]) == expected
    found = outputs["short"].kv_transfer_params
    prompt = PROMPT[:3]
    assert bits(answer(make("consumer"), found, prompt)) == bits(answer(make(), None, prompt))


@pytest.mark.slow
def test_another_salt_other_tokens_and_other_weights_are_computed(make: Make) -> None:
    expected, other = bits(answer(make())), [*PROMPT[:40], *range(35)]
    producer = make("producer")
    for given, engine in (
        ({"cache_salt": "another tenant"}, make("consumer")),
        ({"prompt": other}, make("consumer")),
        ({}, make("consumer", seed=1)),
        ({}, make("consumer", dtype="bfloat16")),
    ):
        alone = bits(answer(engine, **given))
        engine.reset_prefix_cache()
        assert bits(answer(engine, computed(producer), **given)) == alone
        assert (stats_of(engine).num_pulled, stats_of(engine).num_failed) == (0, 1)
    assert bits(answer(make("consumer"), computed(producer))) == expected


@pytest.mark.slow
def test_other_code_is_another_identity(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = make("producer")
    answer(make("consumer"), computed(producer))  # by now the producer's is known
    found = computed(producer)
    monkeypatch.setattr(assembly, "source_digest", lambda folder: "edited")
    consumer = make("consumer")
    assert bits(answer(consumer, found)) == bits(answer(make()))
    assert stats_of(consumer).num_failed == 1


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_producer_that_is_gone_costs_a_computation_or_the_request(
    make: Make, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    producer = make("producer")
    found = computed(producer)
    producer.close()
    consumer = make("consumer", transfer={"kv_load_failure_policy": policy})
    with caplog.at_level(logging.WARNING):
        outputs = [answer(consumer, found) for _ in range(3)]
    lines = [each for each in caplog.records if "is computed" in each.getMessage()]
    assert len(lines) == 1 and lines[0].name == companion.__name__
    if policy == "fail":
        assert all("did not come from" in (output.error or "") for output in outputs)
        assert stats_of(consumer).num_failed == 3
    else:
        assert bits(outputs[0]) == bits(answer(make()))
        assert stats_of(consumer).num_failed == 1, "later ones found it in the cache"


@pytest.mark.slow
def test_a_producer_that_was_silent_is_not_connected_to_again_for_a_while(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = computed(make("producer")) | {"remote_port": silent.getsockname()[1]}
        consumer = make("consumer", transfer={"extra": {"pull_timeout_s": 1.0}})
        expected = bits(answer(make()))
        assert bits(answer(consumer, found)) == expected
        silent.accept()[0].close()
        consumer.reset_prefix_cache()
        assert bits(answer(consumer, found)) == expected
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.accept()
    assert (stats_of(consumer).num_failed, stats_of(consumer).num_late) == (2, 0)


@pytest.mark.slow
def test_a_word_that_never_comes_ends_the_wait(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "GRACE_S", 0.0)
    found = computed(make("producer"))
    consumer = make("consumer", transfer={"extra": {"pull_timeout_s": 0.1}})
    monkeypatch.setattr(companion.TransferredBlocks, "_pull", lambda self, *order: None)
    assert bits(answer(consumer, found)) == bits(answer(make()))
    assert stats_of(consumer).num_late == 1


@pytest.mark.slow
def test_connections_that_are_cut_or_damaged_anywhere_change_no_bit(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "MIN_CHUNK_BYTES", 4096)
    expected, producer, consumer = bits(answer(make())), make("producer"), make("consumer")
    rng, receive = random.Random(5), socket.socket.recv_into
    left = 0

    class Faulty(socket.socket):
        def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
            nonlocal left
            count = super().recv_into(buffer, nbytes, flags)
            if threading.current_thread().name.startswith("kv-pull"):
                left -= count
                if left < 0 and is_cut:
                    return 0
                if left < 0 and count:
                    buffer[count - 1] ^= 1 << rng.randrange(8)
                    left = 1 << 30
            return count

    connect = connectors.TcpConnector.connect

    def faulty(self: Any, remote: Any, deadline_s: float) -> socket.socket:
        return Faulty(fileno=connect(self, remote, deadline_s).detach())

    monkeypatch.setattr(connectors.TcpConnector, "connect", faulty)
    assert receive is socket.socket.recv_into
    for number in range(24):
        is_cut, left = number % 2 == 0, rng.randrange(40_000)
        found = computed(producer)
        assert bits(answer(consumer, found)) == expected
        consumer.reset_prefix_cache()
        producer.reset_prefix_cache()
    stats = stats_of(consumer)
    assert stats.num_failed > 8 and stats.num_failed + stats.num_pulled == 24


def test_leases_that_nobody_takes_are_given_back(make: Make) -> None:
    producer = make("producer", transfer={"extra": {"lease_s": 0.2}})
    found = computed(producer)
    leases = companion_of(producer)._leases
    for _ in range(200):
        if not leases.num_bytes:
            break
        time.sleep(0.05)
    assert leases.num_bytes == 0 and len(leases) == 0 and leases.num_expired == 1
    consumer = make("consumer")
    assert bits(answer(consumer, found)) == bits(answer(make()))
    assert stats_of(consumer).num_failed == 1


def test_what_there_is_no_room_for_is_refused_at_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    producer = make("producer", transfer={"kv_buffer_size": 10})
    consumer = make("consumer")
    assert bits(answer(consumer, computed(producer))) == bits(answer(make()))
    assert stats_of(consumer).num_failed == 1
    assert "kv_buffer_size" in caplog.text


def test_steps_that_are_lost_leave_no_block_that_was_never_written(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, found = bits(answer(make())), computed(make("producer"))
    consumer, lost = make("consumer"), list[object]()
    put = companion.TransferredBlocks._place

    def lose(self: companion.TransferredBlocks, order: Any) -> None:
        if not lost:
            lost.append(order)
            raise ValueError("injected: the plan is not carried out")
        put(self, order)

    monkeypatch.setattr(companion.TransferredBlocks, "_place", lose)
    options = {"temperature": 0.8, "seed": 3, "max_tokens": 12, "logprobs": 1, "ignore_eos": True}
    params = SamplingParams(**options, extra_args={"kv_transfer_params": found})  # type: ignore[arg-type]
    consumer.add_request("lost", {"prompt_token_ids": PROMPT}, params)
    run_all(consumer)
    assert lost and bits(answer(consumer)) == expected


@pytest.mark.slow_except("True")
@pytest.mark.parametrize("is_early", [True, False])
def test_what_was_pulled_before_the_engine_started_over_serves_nothing_after(
    make: Make, monkeypatch: pytest.MonkeyPatch, is_early: bool
) -> None:
    prompts = [PROMPT, [*reversed(PROMPT)]]
    expected = [bits(answer(make(), None, prompt)) for prompt in prompts]
    producer, consumer = make("producer"), make("consumer")
    found = [computed(producer, prompt=prompt) for prompt in prompts]
    fetch, may_go_on = companion.TransferredBlocks._fetch, threading.Event()

    def late(self: Any, order: Any, *rest: Any) -> Any:
        if not is_early:
            assert may_go_on.wait(30) or order.number > 1
        return fetch(self, order, *rest)

    monkeypatch.setattr(companion.TransferredBlocks, "_fetch", late)
    half = companion_of(consumer)
    params = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": found[0]})
    consumer.add_request("lost", {"prompt_token_ids": prompts[0]}, params)
    while consumer.scheduler.admission.num_parked == 0:
        consumer.step()
    while is_early and not half._arrived:
        time.sleep(0.001)
    consumer.start_over("injected")
    may_go_on.set()
    assert bits(answer(consumer, found[1], prompts[1])) == expected[1]
    assert bits(answer(consumer, None, prompts[0])) == expected[0]
    assert not half._arrived and not half._pulling and not half._bytes_under_way


def test_what_is_given_up_before_its_turn_is_not_fetched(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = computed(make("producer")) | {"remote_port": silent.getsockname()[1]}
        consumer = make("consumer", transfer={"extra": {"pull_timeout_s": 30.0}})
        half, waiting = companion_of(consumer), threading.Event()
        for _ in range(companion._NUM_PULLERS):
            half._pullers.submit(waiting.wait, 30)
        params = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": found})
        consumer.add_request("one", {"prompt_token_ids": PROMPT}, params)
        while not half._pulling:
            consumer.step()
        consumer.abort("one")
        assert bits(answer(consumer)) == bits(answer(make()))
        waiting.set()
        half._pullers.shutdown(wait=True)
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.accept()


@pytest.mark.slow
def test_a_host_name_that_is_looked_up_for_long_costs_the_deadline(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = list[float]()

    def slow(host: str, port: int, timeout_s: float) -> list[str]:
        looked_up.append(timeout_s)
        raise TimeoutError(f"{host} was not found in time")

    monkeypatch.setattr(connectors, "look_up", slow)
    found = computed(make("producer"))
    consumer = make("consumer", transfer={"extra": {"pull_timeout_s": 5.0}})
    assert bits(answer(consumer, found)) == bits(answer(make()))
    assert stats_of(consumer).num_failed == 1 and 0 < looked_up[0] <= 5.0


def test_what_is_larger_than_the_buffer_of_the_consumer_is_computed(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = make("consumer", transfer={"extra": {"pull_buffer_size": 1000}})
    assert bits(answer(consumer, computed(make("producer")))) == bits(answer(make()))
    assert stats_of(consumer).num_failed == 1 and "pull_buffer_size=1000" in caplog.text


def test_an_aborted_request_waits_no_more(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = computed(make("producer")) | {"remote_port": silent.getsockname()[1]}
        consumer = make("consumer")
        params = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": found})
        consumer.add_request("one", {"prompt_token_ids": PROMPT}, params)
        for _ in range(3):
            consumer.step()
        assert consumer.scheduler.admission.num_parked == 1
        consumer.abort("one")
        assert consumer.scheduler.admission.num_parked == 0
        assert bits(answer(consumer)) == bits(answer(make()))


def test_secrets_must_agree(make: Make, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one", "two")]
    for path in paths:
        path.write_text(path.name * 16)
    expected = bits(answer(make()))
    secrets: list[dict[str, Any]] = [{"secret_file": str(path)} for path in paths]
    producer = make("producer", transfer={"extra": secrets[0]})
    for extra, is_known in ((secrets[0], True), (secrets[1], False), ({}, False)):
        consumer = make("consumer", transfer={"extra": extra})
        assert bits(answer(consumer, computed(producer))) == expected
        assert stats_of(consumer).num_pulled == is_known


def test_weights_are_not_replaced_under_other_engines(make: Make) -> None:
    with pytest.raises(NotAvailableError, match="kv_transfer_config"):
        make("producer").executor.load_weights("elsewhere")


CONFIG = {"kv_connector": "TcpConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_transfer_config": {}}, "kv_connector=None"),
        ({"kv_transfer_config": CONFIG | {"kv_connector": "NixlConnector"}}, "'NixlConnector'"),
        ({"kv_transfer_config": CONFIG | {"kv_role": "producer"}}, "'kv_producer'"),
        ({"kv_transfer_config": CONFIG | {"kv_rle": 1}}, "unknown key 'kv_rle'"),
        ({"kv_transfer_config": CONFIG | {"kv_port": 0}}, "port from 1"),
        ({"kv_transfer_config": CONFIG | {"kv_buffer_device": "cuda"}}, "not available"),
        ({"kv_transfer_config": CONFIG | {"kv_ip": "0.0.0.0"}}, "secret_file"),
        ({"kv_transfer_config": CONFIG | {"kv_ip": "gpu-1"}}, "from other machines"),
        (
            {"kv_transfer_config": CONFIG | {"kv_connector_extra_config": {"secret": "x"}}},
            "unknown key 'secret'",
        ),
        (
            {"kv_transfer_config": CONFIG | {"kv_connector_extra_config": {"ssl_keyfile": "x"}}},
            "TLS needs",
        ),
        (
            {"kv_transfer_config": CONFIG | {"kv_connector_extra_config": {"secret_file": "/x"}}},
            "cannot be read",
        ),
        ({"kv_transfer_config": CONFIG, "enable_prefix_caching": False}, "it is off"),
        ({"kv_transfer_config": CONFIG, "data_parallel_size": 2}, "one engine's"),
        ({"kv_transfer_config": CONFIG, "batch_invariant": False}, "batch_invariant"),
        (
            {"kv_transfer_config": CONFIG, "pipeline_parallel_size": 2, "config": GEMMA3},
            "several windows is not available with pipeline_parallel_size=2",
        ),
    ],
)
def test_options_that_cannot_work_are_refused(
    make: Make, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        make(**options)


def test_an_address_that_is_taken_is_refused(make: Make) -> None:
    make("producer")
    with pytest.raises(ConfigError, match="cannot be listened at"):
        make("producer")
    make("producer", transfer={"kv_connector": CONNECTORS[0]})
    with pytest.raises(ConfigError, match="another engine listens there"):
        make("producer", transfer={"kv_connector": CONNECTORS[0]})


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("x", "must be a dict"),
        ({"do_remote_decode": 1}, "must be true or false"),
        ({"do_remote_prefill": True}, "remote_engine_id='None'"),
        (ASKED, "kv_role='kv_consumer'"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(make: Make, given: Any, reason: str) -> None:
    with pytest.raises(InvalidParameterError, match=reason):
        answer(make("consumer"), given)


def test_an_engine_without_a_role_says_so(make: Make) -> None:
    with pytest.raises(InvalidParameterError, match="kv_transfer_config"):
        answer(make(), ASKED)
    assert answer(make(), {}).kv_transfer_params is None


@pytest.mark.slow
@pytest.mark.skipif(not CAN_DISCARD, reason="this system takes no pages back")
def test_engines_sleep_and_pull_what_was_computed_before_and_after(make: Make) -> None:
    producer, consumer, expected = make("producer"), make("consumer"), bits(answer(make()))
    for _ in range(2):
        found = computed(producer)
        consumer.sleep(1)
        producer.sleep(2)  # what is kept for others is not the pool's
        consumer.wake_up()
        assert bits(answer(consumer, found)) == expected
        producer.wake_up()
        consumer.reset_prefix_cache()
    assert stats_of(consumer).num_pulled == 2


@pytest.mark.skipif(not CAN_DISCARD, reason="this system takes no pages back")
def test_an_engine_that_sleeps_while_it_pulls_answers_with_the_same_bits(make: Make) -> None:
    producer, consumer, expected = make("producer"), make("consumer"), bits(answer(make()))
    for num_steps in range(4):
        params = SamplingParams(
            temperature=0.8, seed=3, max_tokens=12, logprobs=1, ignore_eos=True,
            extra_args={"kv_transfer_params": computed(producer)},
        )  # fmt: skip
        consumer.add_request("one", {"prompt_token_ids": PROMPT}, params)
        for _ in range(num_steps):
            consumer.step()
        consumer.sleep(1)
        consumer.wake_up()
        assert bits(run_all(consumer)["one"]) == expected
        consumer.reset_prefix_cache()

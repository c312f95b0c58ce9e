"""Samples of the machine's limits, on a clock that the works put forward: which are taken,
and what they amount to."""

from __future__ import annotations

import pytest

from quire.bench import limits
from quire.bench.limits import Call, LimitSample, LimitSampler, Pace, Work, limit_sampler, typical
from quire.bench.roofline import Peaks


class Machine:
    """A clock, and works that take as long as they are told."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.seconds: dict[str, float] = {}
        self.num_prepared = 0
        self.done: list[str] = []

    def work(self, kind: str, name: str, seconds: float) -> Work:
        """100 bytes or operations."""
        self.seconds[name] = seconds

        def prepare() -> Call:
            self.num_prepared += 1
            return lambda: self.pass_time(name)

        return Work(kind, name, 100, prepare)

    def pass_time(self, name: str) -> None:
        self.now_s += self.seconds[name]
        self.done.append(name)

    def sampler(self, works: list[Work], pace: Pace = limits.CPU_PACE) -> LimitSampler:
        return LimitSampler(works, pace, lambda: self.now_s)


def test_limits_are_what_the_machine_did_most_of_the_time() -> None:
    machine = Machine()
    sampler = machine.sampler([machine.work("read", "r", 0.01), machine.work("float32", "a", 0.01)])
    samples = [sampler.sample()]
    machine.seconds.update(r=0.04, a=0.02)  # the machine slows down
    samples.append(sampler.sample())
    machine.seconds.update(r=4.0, a=2.0)  # it is taken away
    samples.append(sampler.sample())
    assert samples[0].read_bytes_per_s == samples[0].ops_per_s["float32"]["a"] == pytest.approx(1e4)
    peaks = typical(samples)
    assert peaks.read_bytes_per_s == pytest.approx(100 / 0.04)
    assert (
        peaks.gemm_flops_per_s == {"float32": pytest.approx(100 / 0.02)} and peaks.num_samples == 3
    )


def test_only_products_near_the_best_of_their_kind_are_sampled() -> None:
    machine = Machine()
    works = [
        machine.work("read", "r", 0.01),
        machine.work("float32", "slow", 0.0126),
        machine.work("bfloat16", "best", 0.01),
    ]
    works += [
        machine.work("float32", "near", 0.012),
        machine.work("int8", "integers", 0.005),
        machine.work("int8", "i", 0.007),
    ]
    sampler = machine.sampler(works)
    sampler.sample()
    machine.done.clear()
    sample = sampler.sample()
    assert sorted(machine.done) == ["best", "integers", "near", "r"]
    assert {dtype: list(names) for dtype, names in sample.ops_per_s.items()} == {
        "bfloat16": ["best"], "float32": ["near"], "int8": ["integers"],
    }  # fmt: skip
    assert machine.num_prepared == len(works)  # once each, when they are ranked


def test_a_sample_takes_no_longer_than_the_best_need() -> None:
    machine = Machine()
    works = [
        machine.work("read", "r", 0.05),
        machine.work("float32", "best", 0.1),
        machine.work("float32", "near", 0.11),
    ]
    sampler = machine.sampler(works)
    sampler.sample()
    before = machine.now_s
    sampler.sample()
    assert machine.now_s - before == pytest.approx(0.15)


def test_the_best_product_over_all_samples_is_the_limit() -> None:
    samples = [
        LimitSample(1.0, {"float32": {"a": 10.0, "b": 9.0}}),
        LimitSample(3.0, {"float32": {"a": 5.0, "b": 9.0}}),
    ]
    peaks = typical(samples)
    assert peaks == Peaks(2.0, {"float32": 9.0}, {"float32": "b"}, 2) and peaks.best_product == 9.0


def test_operands_are_not_kept_where_the_memory_is_the_engines() -> None:
    machine = Machine()
    works = [machine.work("read", "r", 0.01), machine.work("float32", "a", 0.01)]
    sampler = machine.sampler(works, Pace(1.0, 2, keeps_operands=False))
    sampler.sample()
    prepared = machine.num_prepared
    machine.done.clear()
    sampler.sample()
    # the first of each warms up
    assert machine.num_prepared == prepared + 2 and machine.done == ["r"] * 3 + ["a"] * 3


def test_real_products_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "_SHAPES", ((32, 64, 128),))
    sampler = limit_sampler()
    peaks = typical([sampler.sample(), sampler.sample()])
    assert peaks.read_bytes_per_s > 0 and peaks.best_gemm > 0 and peaks.gemm_flops_per_s["int8"] > 0
    assert all(name.endswith(" 32x64x128") for name in peaks.products.values())


def test_both_kinds_of_quires_own_products_compute() -> None:
    works = list(limits._quire_products([(4, 64, 32)]))
    assert [each.kind for each in works] == ["bfloat16", "int8"]
    for work in works:
        assert work.amount == 2 * 4 * 64 * 32 and work.prepare()().shape == (4, 32)  # type: ignore[attr-defined]

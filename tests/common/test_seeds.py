"""Seeds of sequences."""

from quire.common.seeds import derive_seed, mix64


def test_mix64_is_splitmix64() -> None:
    # The first outputs of the published generator (Vigna's splitmix64.c) seeded with 0: state +=
    # gamma, then finalise.
    gamma, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    assert [mix64(i * gamma & mask) for i in range(3)] == [
        0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F,
    ]  # fmt: skip


def test_mixing_loses_nothing() -> None:
    assert len({mix64(value) for value in range(10_000)}) == 10_000
    assert all(0 <= mix64(value) < 1 << 64 for value in (0, 1, (1 << 64) - 1, 1 << 64, -1))


def test_sequence_zero_keeps_the_seed_and_the_others_are_independent() -> None:
    assert derive_seed(5, 0) == 5 and derive_seed(-1, 0) == (1 << 64) - 1
    seeds = {derive_seed(seed, index) for seed in range(100) for index in range(100)}
    assert len(seeds) == 100 * 99 + 100
    assert derive_seed(1, 2) != derive_seed(2, 1)

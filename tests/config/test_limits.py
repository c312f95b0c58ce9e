"""The scheduler's limits are checked when they are made."""

from typing import Any

import pytest

from quire.config.limits import SchedulerLimits
from quire.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 0}, "num_blocks=0 must be at least 1"),
        ({"block_size": -1}, "block_size=-1"),
        ({"policy": "random"}, "policy='random' is unknown"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 63}, "63 is below max_num_seqs=64"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 4095},
            "below max_model_len=4096",
        ),
        ({"watermark": 1.0}, "watermark=1.0"),
        ({"watermark": -0.1}, "watermark=-0.1"),
    ],
)
def test_impossible_limits_are_refused_with_the_value(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedulerLimits(**({"num_blocks": 8} | {"max_num_seqs": 4} | changes))


def test_slots() -> None:
    assert SchedulerLimits(num_blocks=10, block_size=16).num_slots == 160

"""Building engines: what ends a sequence, and what becomes of an engine in a forked process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quire.engine.assembly.preparation import find_eos_token_ids

pytestmark = pytest.mark.slow

FORK = """
import os, signal, sys
from quire import LLM, SamplingParams

def answer():
    [output] = llm.generate("Once upon a time", SamplingParams(max_tokens=4, temperature=0.0), use_tqdm=False)
    return output.outputs[0].token_ids

llm = LLM("quire-storyteller", kv_cache_memory="4MiB", num_threads=2)
before = answer()
child = os.fork()
if child == 0:
    signal.alarm(30)
    os._exit(0 if answer() == before else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or answer() != before)
"""


def test_a_forked_child_computes_the_same() -> None:
    """A forked process has its parent's engine and none of its threads."""
    outcome = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, text=True, timeout=100
    )
    assert outcome.returncode == 0, outcome.stderr


@pytest.mark.parametrize(
    ("generation_config", "config", "expected"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 6}, {5}),
        ({"eos_token_id": [5, 7]}, {}, {5, 7}),
        ({"eos_token_id": None}, {"eos_token_id": 6}, {6}),
        ({"eos_token_id": []}, {"eos_token_id": "x"}, set()),
        ({"eos_token_id": [5, -1, 10]}, {}, {5}),
        ({"eos_token_id": 99}, {"eos_token_id": 6}, set()),
    ],
)
def test_what_ends_a_sequence(
    generation_config: dict[str, object], config: dict[str, object], expected: set[int]
) -> None:
    assert find_eos_token_ids(generation_config, config, None, vocab_size=10) == expected

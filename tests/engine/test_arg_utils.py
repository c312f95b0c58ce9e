"""Arguments of an engine: one record and one command line,
with vLLM's names and every option of our own."""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from quire import AsyncEngineArgs, EngineArgs
from quire.config.engine import EngineConfig
from quire.config.foreign import FOREIGN_OPTIONS
from quire.errors import ConfigError
from quire.utils import FlexibleArgumentParser


def _parse(*argv: str) -> argparse.Namespace:
    return EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(argv)


def test_every_option_of_both_sides_is_there_once() -> None:
    names = [item.name for item in fields(EngineArgs)]
    renamed = {
        option.text
        for option in FOREIGN_OPTIONS.values()
        if option.kind == "renamed" and not option.values
    }
    assert len(names) == len(set(names))
    assert set(names) == {item.name for item in fields(EngineConfig)} - renamed | set(
        FOREIGN_OPTIONS
    )


def test_defaults_ask_for_nothing_however_they_travel() -> None:
    default = EngineConfig(model="quire-storyteller")
    args = EngineArgs()
    assert args.create_engine_config() == default and args.options() == {
        "model": "quire-storyteller"
    }
    for options in (asdict(args), vars(_parse())):
        assert EngineConfig.from_options(options.pop("model"), options) == default
    assert EngineArgs.from_cli_args(_parse()) == args


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--model", "x", "--max-model-len", "2k"], {"max_model_len": 2000}),
        (["--model", "x", "--max_model_len=128"], {"max_model_len": 128}),
        (["--model", "x", "--max-model-len", "auto"], {}),
        (["--model", "x", "--gpu-memory-utilization", "0.5"], {"memory_utilization": 0.5}),
        (["--model", "x", "--memory-utilization", "0.5"], {"memory_utilization": 0.5}),
        (["--model", "x", "--kv-cache-memory", "1MiB"], {"kv_cache_memory": "1MiB"}),
        (["--model", "x", "--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (["--model", "x", "--enforce-eager", "--trust-remote-code"], {"enforce_eager": True}),
        (["--model", "x", "--hf-overrides", '{"a": 1}'], {"hf_overrides": {"a": 1}}),
        (["--model", "x", "--async-scheduling"], {"overlap": "on"}),
        (["--model", "x", "--no-async-scheduling"], {"overlap": "off"}),
        (["--model", "x", "--compilation-config", "3"], {}),
        (["--model", "x", "--swap-space", "4"], {"kv_offloading_size": 4.0}),
        (["--model", "x", "--seed", "7", "--dtype", "half"], {"seed": 7, "dtype": "float16"}),
    ],
)
def test_a_command_line_becomes_a_config(argv: list[str], expected: dict[str, Any]) -> None:
    assert EngineArgs.from_cli_args(_parse(*argv)).create_engine_config() == EngineConfig(
        model="x", **expected
    )


def test_a_record_can_be_changed_and_made_anew() -> None:
    args = AsyncEngineArgs("x", seed=3, gpu_memory_utilization=0.5)
    assert isinstance(args, EngineArgs) and args.model == "x" and args.seed == 3
    again: Any = replace(args, seed=4)  # type: ignore[call-arg]
    assert again.options() == {"model": "x", "seed": 4, "gpu_memory_utilization": 0.5}
    args.max_model_len = 64
    assert args.create_engine_config() == EngineConfig(
        model="x", seed=3, memory_utilization=0.5, max_model_len=64
    )
    with pytest.raises(TypeError, match="no_such_option"):
        EngineArgs(no_such_option=1)
    with pytest.raises(ConfigError, match="dtype='int3' is not available"):
        EngineArgs(dtype="int3").create_engine_config()


def test_a_length_that_is_none_is_refused_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parse("--max-model-len", "long")
    assert "max_model_len='long' is no number of tokens" in capsys.readouterr().err


def test_other_options_of_a_program_are_left_alone() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--num-prompts", type=int, deprecated=True, default=3)
    args = parser.parse_args(["--num_prompts", "5", "--model=a_b"])
    assert args.num_prompts == 5 and EngineArgs.from_cli_args(args).model == "a_b"

"""vLLM's spellings of a command line, as our parsers take them."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from quire.cli.options import engine_config
from quire.cli.parser import Parser
from quire.cli.serve import add_arguments, api_config, note_unread_key
from quire.config.api import ApiConfig
from quire.config.command_line import known_words
from quire.config.engine import EngineConfig
from quire.engine.arg_utils import EngineArgs
from quire.errors import ConfigError
from quire.server.quota.tenants import read_keys
from quire.utils.argparse_utils import FlexibleArgumentParser

KNOWN = ("--speculative-config", "--tensor-parallel-size", "--optimization-level", "-p", "--prompt")


def _served(*words: str) -> tuple[EngineConfig, ApiConfig]:
    parser = Parser("quire serve", "serve")
    add_arguments(parser)
    args = parser.parse(words)
    return engine_config(args), api_config(args)


@pytest.mark.parametrize(
    ("given", "known"),
    [
        (["-tp", "2", "-tp=2"], ["--tensor-parallel-size", "2", "--tensor-parallel-size=2"]),
        (["-O3", "-O=2", "-O", "1"], ["--optimization-level=3", "--optimization-level=2",
                                      "--optimization-level", "1"]),
        (["-q", "-pp", "2"], ["-q", "-pp", "2"]),
        (["-p", "--x.y", "--prompt=--a.b=c"], ["-p", "--x.y", "--prompt=--a.b=c"]),
        (["--", "-tp", "--speculative-config.method"], ["--", "-tp",
                                                        "--speculative-config.method"]),
        (
            ["--speculative_config.method", "ngram", "m", "--speculative-config.a.b=2",
             "--speculative-config.a.c"],
            ['--speculative-config={"method": "ngram", "a": {"b": 2, "c": true}}', "m"],
        ),
    ],
)  # fmt: skip
def test_words_become_those_that_a_parser_knows(given: list[str], known: list[str]) -> None:
    assert known_words(given, KNOWN) == known


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--speculative-config", "{}", "--speculative-config.method=ngram"], "give it one way"),
        (["--speculative-config.", "x"], "has an empty key"),
        (["--speculative-config.a", "1", "--speculative-config.a.b", "1"], "a key of 'a'"),
        (["--speculative-config.a", "1", "--speculative-config.a=2"], r"\.a is given twice"),
    ],
)
def test_contradictions_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        known_words(words, KNOWN)


@pytest.mark.parametrize(
    "words",
    [
        ["--model", "m", "-tp", "2", "-q", "awq", "--load-format", "safetensors"],
        ["-tp=2", "--quantization=awq", "--model=m", "--enable-sleep-mode"],
        ["m", "--tensor_parallel_size", "2", "--quantization", "awq", "-O3", "-cc.mode=3"],
    ],
)
def test_a_server_takes_them(words: list[str]) -> None:
    assert _served(*words)[0] == EngineConfig(model="m", tensor_parallel_size=2, quantization="awq")


def test_programs_parsers_take_them() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", "m", "-tp", "2", "--speculative-config.method", "suffix"])
    config = EngineArgs.from_cli_args(args).create_engine_config()
    assert config == EngineConfig(
        model="m", tensor_parallel_size=2, speculative_config={"method": "suffix"}
    )


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--allowed-origins", '["*"]', "--allowed-methods", '["*"]'], {"allow_origin": ("*",)}),
        (["--allowed-origins", "https://a.de"], {"allow_origin": ("https://a.de",)}),
        (["--enable-request-id-headers", "--enable-server-load-tracking"], {}),
    ],
)
def test_options_of_the_server(words: list[str], options: dict[str, Any]) -> None:
    assert _served("m", *words)[1] == ApiConfig(**options)


@pytest.mark.parametrize(
    "words",
    [
        ["--speculative-config", '{"method": "ngram", "method": "suffix"}'],
        ["--speculative-config.extra", '{"a": [{"b": 1, "b": 1}]}'],
        ["--override-generation-config", '{"top_k": 1, "top_k": 2}'],
        ["--rope-scaling", '{"factor": 1, "factor": 2}'],
    ],
)
def test_a_key_that_comes_twice_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="comes twice in one object"):
        _served("m", *words)


def test_json_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        _served("m", "--speculative-config", '{"a":' * 20000)


def test_keys_are_taken_as_they_stand() -> None:
    given = ["12345678", "sk-abc==", "tenant=sk-abcdef"]
    for words in ([f"--api-key={key}" for key in given], ["m", "--api-key", *given]):
        keys = read_keys(_served(*words)[1])
        assert [found.name for key in given if (found := keys.find(key.encode()))] == [
            "key-1",
            "key-2",
            "key-3",
        ]
    with pytest.raises(ConfigError, match="without commas"):
        _served("m", "--api-key", "sk-abcdef,sk-ghijkl")


@pytest.mark.parametrize(
    "words",
    [
        ["m", "--served-model-name", "one", "two"],
        ["m", "--served-model-name=one", "--served-model-name", "two"],
        ["--served-model-name", "one, two", "--model", "m"],
        ["--served-model-name", "one", "two", "--port", "1", "m"],
    ],
)
def test_several_names_are_taken(words: list[str]) -> None:
    engine, api = _served(*words)
    assert engine.model == "m" and api.served_names == ("one", "two")


def test_one_name_may_stand_alone() -> None:
    assert _served("--served-model-name", "one")[1].served_names == ("one",)
    assert ApiConfig(served_model_name="one").served_names == ("one",)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a list of names"):
        ApiConfig(served_model_name=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["--served-model-name", "--api-key"])
def test_a_model_that_an_option_takes_for_its_own_is_missed(option: str) -> None:
    with pytest.raises(ConfigError, match=f"'my-model' among them.*MODEL {option} one my-model"):
        _served(option, "one", "my-model")


def test_a_variable_that_would_have_closed_the_server_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    note_unread_key(ApiConfig(api_keys="sk-abcdef"), {"VLLM_API_KEY": "sk-abcdef"})
    note_unread_key(ApiConfig(), {"VLLM_API_KEY": "sk-abcdef", "QUIRE_API_KEYS": "sk-abcdef"})
    note_unread_key(ApiConfig(), {})
    assert not caplog.text
    note_unread_key(ApiConfig(), {"VLLM_API_KEY": "sk-abcdef"})
    assert "VLLM_API_KEY is not read" in caplog.text and "sk-abcdef" not in caplog.text

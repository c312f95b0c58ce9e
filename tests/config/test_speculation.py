"""`speculative_config`: vLLM's keys, and what is said of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.config.speculation import SpeculationConfig
from quire.engine.arg_utils import EngineArgs
from quire.errors import ConfigError, NotAvailableError
from quire.utils.argparse_utils import FlexibleArgumentParser


def test_vllms_keys_are_read() -> None:
    config = SpeculationConfig.from_mapping(
        {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "model": None}
    )
    assert (config.max_tokens, config.ngram_sizes) == (5, (4, 4))
    older = SpeculationConfig.from_mapping(
        {"model": "[ngram]", "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    )
    assert (older.method, older.ngram_sizes) == ("ngram", (2, 3))
    for name in ("model", "method"):
        oldest = SpeculationConfig.from_mapping({name: "[ngram]", "num_speculative_tokens": 3})
        assert oldest == SpeculationConfig(method="ngram", num_speculative_tokens=3)
    suffix = SpeculationConfig.from_mapping(
        {
            "method": "suffix", "suffix_decoding_max_tree_depth": 12,
            "suffix_decoding_max_spec_factor": 2.0, "suffix_decoding_max_cached_requests": 0,
        }
    )  # fmt: skip
    assert suffix.max_tokens == 12
    assert SpeculationConfig.from_mapping({"method": "suffix"}).max_tokens == 24
    model = SpeculationConfig.from_mapping({"model": "x", "num_speculative_tokens": 3})
    assert (model.method, model.model, model.max_tokens) == ("draft_model", "x", 3)
    assert model.is_modelled and model.head is None
    assert (
        SpeculationConfig.from_mapping({"model": Path("x"), "num_speculative_tokens": 3}) == model
    )
    head = SpeculationConfig.from_mapping({"method": "eagle3", "model": "x"})
    assert head.is_modelled and head.head == "eagle3"
    assert SpeculationConfig.from_mapping({"method": "deepseek_mtp"}).head == "mtp"
    auto = SpeculationConfig.from_mapping({"method": "auto"})
    assert not auto.is_modelled and auto.head is None and auto.max_tokens == 24
    auto = SpeculationConfig.from_mapping({"method": "auto", "model": "x"})
    assert auto.is_modelled and auto.head is None
    assert (auto.max_tokens, auto.max_modelled_tokens) == (24, 5)
    auto = SpeculationConfig.from_mapping({"method": "auto", "model_method": "mtp"})
    assert auto.is_modelled and auto.head == "mtp"


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({"method": "medusa"}, NotAvailableError, "method 'medusa' is not available"),
        ({"method": "draft_model"}, ConfigError, "model=None must name the model that drafts"),
        (
            {"method": "guess"},
            ConfigError,
            "'guess'; choose 'auto', 'ngram', 'suffix', 'draft_model', 'eagle', 'eagle3' or 'mtp'",
        ),
        ({"method": "eagle3"}, ConfigError, "model=None must name the model that drafts"),
        ({"method": "mtp", "model": "x"}, ConfigError, "has no effect with method 'mtp'"),
        (
            {"method": "auto", "model_method": "eagle"},
            ConfigError,
            "model=None must name the model",
        ),
        ({"method": "auto", "model_method": "x"}, ConfigError, "choose 'draft_model', 'eagle', 'e"),
        (
            {"method": "auto", "model_method": "mtp", "model": "x"},
            ConfigError,
            "model='x' has no effect with 'mtp'",
        ),
        ({"method": "auto", "prompt_lookup_max": 3}, ConfigError, "no effect with method 'auto'"),
        ({"method": "suffix", "model_method": "mtp"}, ConfigError, "choose 'auto'"),
        ({}, ConfigError, "method is missing"),
        ({"method": ["ngram"]}, ConfigError, "unknown method ['ngram']"),
        ({"method": "suffix", "model": "x"}, ConfigError, "has no effect with method 'suffix'"),
        (
            {"method": "draft_model", "model": "x", "parallel_drafting": True},
            NotAvailableError,
            "parallel_drafting=True is not available",
        ),
        ({"method": "suffix", "depth": 3}, ConfigError, "unknown key 'depth'; known are method"),
        ({"method": "ngram", "num_speculative_tokens": 0}, ConfigError, "must be an integer from"),
        ({"method": "ngram", "num_speculative_tokens": True}, ConfigError, "must be an integer"),
        (
            {"method": "suffix", "prompt_lookup_max": 3},
            ConfigError,
            "has no effect with method 'suffix'",
        ),
        ({"method": "ngram", "suffix_decoding_max_tree_depth": 3}, ConfigError, "choose 'suffix'"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}, ConfigError, "above"),
        (
            {"method": "suffix", "suffix_decoding_min_token_prob": float("nan")},
            ConfigError,
            "must be a number from 0 to 1",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    values: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=r"speculative_config: ") as caught:
        EngineConfig(model="m", speculative_config=values)
    assert text in str(caught.value)


def test_it_is_an_option_of_the_command_line() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--speculative-config", '{"method": "suffix"}'])
    config = EngineArgs.from_cli_args(args).create_engine_config()
    assert config.speculation == SpeculationConfig(method="suffix")


def test_it_needs_numbers_that_do_not_depend_on_the_batch() -> None:
    with pytest.raises(ConfigError, match="needs batch_invariant"):
        EngineConfig(model="m", speculative_config={"method": "suffix"}, batch_invariant=False)
    with pytest.raises(ConfigError, match="must be a dict"):
        EngineConfig(model="m", speculative_config="suffix")  # type: ignore[arg-type]

"""Options as a script for vLLM writes them: renamed, accepted where they ask for nothing,
refused with a reason."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from quire.config.api import ApiConfig
from quire.config.engine import EngineConfig
from quire.config.foreign import FOREIGN_OPTIONS, FOREIGN_SERVER_OPTIONS, translate
from quire.errors import ConfigError, NotAvailableError

OWN = {item.name for item in fields(EngineConfig)}


def test_the_table_holds_no_option_of_our_own_and_renames_only_to_those() -> None:
    assert not set(FOREIGN_OPTIONS) & OWN
    assert {each.text for each in FOREIGN_OPTIONS.values() if each.kind == "renamed"} <= OWN
    servers = {item.name for item in fields(ApiConfig)}
    assert not set(FOREIGN_SERVER_OPTIONS) & (OWN | servers | set(FOREIGN_OPTIONS))
    renamed = {each.text for each in FOREIGN_SERVER_OPTIONS.values() if each.kind == "renamed"}
    assert renamed <= servers


@pytest.mark.parametrize("name", FOREIGN_SERVER_OPTIONS)
def test_an_option_of_the_server_is_taken_explained_or_refused(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    option = FOREIGN_SERVER_OPTIONS[name]
    for value in (None, option.default, *option.neutral):
        assert translate({name: value}, FOREIGN_SERVER_OPTIONS) == {}
    assert not caplog.text
    if option.kind == "renamed":
        other = "hermes" if option.read is None else option.read("hermes")
        assert translate({name: "hermes"}, FOREIGN_SERVER_OPTIONS) == {option.text: other}
    elif option.kind == "ignored":
        assert translate({name: "other"}, FOREIGN_SERVER_OPTIONS) == {}
        assert f"option {name} has no effect: {option.text}" in caplog.text
    else:
        with pytest.raises(NotAvailableError, match=f"{name}='other' is not available"):
            translate({name: "other"}, FOREIGN_SERVER_OPTIONS)


def test_every_option_takes_its_neutral_values_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    for name, option in FOREIGN_OPTIONS.items():
        for value in (None, option.default, *option.neutral):
            assert EngineConfig.from_options("x", {name: value}) == EngineConfig(model="x"), name
    assert not caplog.text


def test_what_has_no_counterpart_is_accepted_with_a_line_that_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ignored = [name for name, option in FOREIGN_OPTIONS.items() if option.kind == "ignored"]
    for name in ignored:
        assert EngineConfig.from_options("x", {name: "something"}) == EngineConfig(model="x")
    assert [record.getMessage().split()[1] for record in caplog.records] == ignored
    EngineConfig.from_options("x", {"trust_remote_code": True})
    assert "trust_remote_code has no effect: no code of a model folder is ever run" in caplog.text


def test_a_feature_that_there_is_not_is_refused_by_name_with_what_to_do() -> None:
    for name, option in FOREIGN_OPTIONS.items():
        if option.kind == "absent":
            with pytest.raises(NotAvailableError) as raised:
                EngineConfig.from_options("x", {name: "something"})
            assert (
                str(raised.value)
                == f"{name}='something' is not available in this version; {option.text}"
            )
            assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"gpu_memory_utilization": 0.5}, {"memory_utilization": 0.5}),
        ({"kv_cache_memory_bytes": 1 << 20}, {"kv_cache_memory": 1 << 20}),
        ({"async_scheduling": True}, {"overlap": "on"}),
        ({"async_scheduling": False}, {"overlap": "off"}),
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"seed": None, "max_num_seqs": None, "enable_prefix_caching": None}, {}),
        ({"load_format": "safetensors", "attention_backend": "CPU_ATTN"}, {}),
        ({"attention_backend": "FLASHINFER"}, {"attention_backend": "flashinfer"}),
        ({"max_model_len": -1}, {}),
        ({"max_model_len": "auto"}, {}),
        ({"max_model_len": "2k"}, {"max_model_len": 2000}),
        ({"max_model_len": "2K"}, {"max_model_len": 2048}),
        ({"max_model_len": "1.5k"}, {"max_model_len": 1500}),
    ],
)
def test_names_and_values_are_translated(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    assert EngineConfig.from_options("x", theirs) == EngineConfig(model="x", **ours)


def test_a_type_of_torch_is_known_by_its_name() -> None:
    import torch

    assert EngineConfig.from_options("x", {"dtype": torch.float32}).dtype == "float32"
    assert EngineConfig.from_options("x", {"dtype": torch.float16}).dtype == "float16"
    with pytest.raises(ConfigError, match="dtype='int64' is not available"):
        EngineConfig.from_options("x", {"dtype": torch.int64})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"gpu_memory_utilization": 0.5, "memory_utilization": 0.5},
            "are the same option; give one of them",
        ),
        ({"max_model_len": "long"}, "max_model_len='long' is no number of tokens"),
        (
            {"hf_overrides": lambda config: config},
            "hf_overrides must be a dict of the file's keys, not function",
        ),
        ({"revision": 3}, "revision=3 must be text"),
        ({"generation_config": ""}, "generation_config='' must be text"),
        ({"tensor_parallel_size": 65}, "tensor_parallel_size=65"),
        ({"cpu_offload_gb": True}, "cpu_offload_gb=True is not available"),
    ],
)
def test_what_cannot_be_translated_is_refused_in_one_line(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        EngineConfig.from_options("x", options)
    assert message in str(raised.value) and "\n" not in str(raised.value)

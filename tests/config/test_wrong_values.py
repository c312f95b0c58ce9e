"""Values that an option cannot have are refused by its name, whatever they are."""

from __future__ import annotations

import contextlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from quire.config.api import ApiConfig
from quire.config.engine import EngineConfig
from quire.engine.assembly.preparation import plan_engine
from quire.errors import ConfigError, QuireError
from quire.media.sources import MediaAccess

VALUES: tuple[Any, ...] = (
    -1, 1.5, float("nan"), 10**30, True, "\0", "\ud800", "9" * 5000, "~nobody-is-called-so/x",
    b"x", [], {"a": 1}, {"rope_scaling": {1: 2}}, int,
)  # fmt: skip
NEEDED: dict[str, dict[str, Any]] = {
    "kv_disk_size": {"kv_cache_dir": "kv"}, "weights_cache": {"quantization": "int8"},
    "distributed_executor_backend": {"tensor_parallel_size": 2},
}  # fmt: skip
"""Without which an option has no effect."""


@pytest.mark.parametrize("name", [each.name for each in fields(EngineConfig)])
def test_nothing_but_a_quire_error_comes_of_a_wrong_value(name: str) -> None:
    for value in VALUES:
        options = {"model": "quire-storyteller", **NEEDED.get(name, {}), name: value}
        with contextlib.suppress(QuireError):
            plan_engine(EngineConfig.from_options(options.pop("model"), options))


@pytest.mark.parametrize("name", ["weights_cache", "kv_cache_dir", "download_dir", "tokenizer"])
def test_a_folder_is_text_or_a_path(name: str) -> None:
    given = EngineConfig.from_options("m", {name: Path("some/folder")})
    assert getattr(given, name) == "some/folder"
    for wrong in (5, "", "a\0b", "9" * 300, "~nobody-is-called-so"):
        with pytest.raises(ConfigError, match=f"^{name}="):
            EngineConfig.from_options("m", {name: wrong})
    assert EngineConfig(model=Path("m")).model == "m"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["api_keys_file", "chat_template", "lora_folder", "weights_folder", "data_folder"]
)
def test_a_path_of_the_server_may_begin_with_the_home_folder(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shell expands it behind an equals sign: a folder named "~" was made in the current one."""
    monkeypatch.setenv("HOME", "/home/of-tests")
    given: dict[str, Any] = {name: "~/some/place"}
    assert getattr(ApiConfig(**given), name) == "/home/of-tests/some/place"
    for wrong in (5, "", "a\0b", "9" * 300, "~nobody-is-called-so"):
        given = {name: wrong}
        with pytest.raises(ConfigError, match=f"^{name}="):
            ApiConfig(**given)


def test_the_folder_of_images_may_begin_with_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert MediaAccess.of_options((), "~/images").folder == tmp_path / "images"

"""Packed weights from a file: the same bytes as packed anew,
and whatever is wrong with the file costs only time."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config.engine import EngineConfig
from quire.engine.assembly.preparation import prepare_model
from quire.errors import ConfigError
from quire.kernels import cpu
from quire.weights import packed_cache

if cpu.IMPORT_ERROR is not None:
    pytest.skip(f"no native kernels: {cpu.IMPORT_ERROR}", allow_module_level=True)

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 77,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def _answer(
    model: Path, cache: Path | None, quantization: str = "int8", seed: int = 0
) -> list[object]:
    options = {
        "quantization": quantization,
        "weights_cache": None if cache is None else str(cache),
        "seed": seed,
    }
    llm = LLM(
        str(model),
        load_format="dummy",
        dtype="bfloat16",
        kv_cache_memory="1MiB",
        num_threads=1,
        **options,
    )
    try:
        params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2, ignore_eos=True)
        output = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)[0].outputs[0]
        return [output.token_ids, output.logprobs]
    finally:
        llm.close()


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def test_the_second_start_reads_what_the_first_packed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    expected = _answer(model, None)
    assert _answer(model, cache) == expected
    (file,) = _files(cache)
    assert file.stat().st_mode & 0o777 == 0o600 and cache.stat().st_mode & 0o777 == 0o700
    before = file.stat()
    written = (before.st_ino, before.st_mtime_ns, before.st_size)  # when it was read may change

    def refuse(*_: object) -> None:
        raise AssertionError("a projection was packed although the cache holds it")

    monkeypatch.setattr("quire.kernels.cpu.kernels.CpuKernels.pack_quantized", staticmethod(refuse))
    assert _answer(model, cache) == expected
    now = file.stat()
    assert (now.st_ino, now.st_mtime_ns, now.st_size) == written


def test_biases_travel_along(model: Path, tmp_path: Path) -> None:
    _answer(model, tmp_path / "cache")
    (file,) = _files(tmp_path / "cache")
    length = int.from_bytes(file.read_bytes()[:8], "little")
    names = json.loads(file.read_bytes()[8 : 8 + length])
    assert sum(name.endswith(".bias") for name in names) == CONFIG["num_hidden_layers"]


def test_each_form_has_its_file_and_a_new_state_replaces_the_old(
    model: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    eight, four = _answer(model, cache, "int8"), _answer(model, cache, "int4")
    assert eight != four and len(_files(cache)) == 2
    assert _answer(model, cache, "int8", seed=1) != eight
    assert len(_files(cache)) == 2
    assert _answer(model, cache, "int4") == four


@pytest.mark.parametrize("place", ["header", "weights", "bias", "end"])
def test_a_damaged_file_is_packed_anew(
    place: str, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    expected = _answer(model, cache)
    (file,) = _files(cache)
    good = file.read_bytes()
    first = 8 + int.from_bytes(good[:8], "little")
    at = {"header": 20, "weights": first + 100, "bias": len(good) - 1, "end": len(good)}[place]
    file.write_bytes(
        good[: -1 if place == "end" else None]
        if place == "end"
        else good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]
    )
    with caplog.at_level(logging.WARNING, "quire"):
        assert _answer(model, cache) == expected
    assert "are not used" in caplog.text
    assert file.read_bytes() == good


def test_a_file_that_others_could_have_written_is_left_alone(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    expected = _answer(model, cache)
    cache.chmod(0o777)
    with caplog.at_level(logging.WARNING, "quire"):
        assert _answer(model, cache) == expected
    assert "can be written by other users" in caplog.text


def test_a_folder_that_cannot_be_written_costs_a_warning(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_cache, "_write", full)
    with caplog.at_level(logging.WARNING, "quire"):
        assert _answer(model, tmp_path / "cache") == _answer(model, None)
    assert "No space left on device" in caplog.text and not _files(tmp_path / "cache")


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_folder_that_cannot_be_is_refused_before_the_model_is_loaded(
    name: str, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    config = EngineConfig(model=str(model), load_format="dummy", weights_cache=str(tmp_path / name))
    with pytest.raises(ConfigError, match=r"weights_cache='.*' cannot be used: .*another folder"):
        prepare_model(config, is_for_here=False)


def test_a_folder_that_can_only_be_read_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed_cache.check_folder(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700 and not caplog.text
    monkeypatch.setattr("os.access", lambda *_: False)  # the superuser may write anywhere
    packed_cache.check_folder(tmp_path)
    assert f"weights_cache={str(tmp_path)!r} cannot be written" in caplog.text


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.kernels.cpu.linear import pack_linear

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        packed_cache._write(tmp_path / "x", {"a": pack_linear(torch.ones(3, 4))}, "digest")
    assert not _files(tmp_path)


def test_floating_point_models_need_no_cache(model: Path, tmp_path: Path) -> None:
    options = {
        "weights_cache": str(tmp_path / "cache"),
        "load_format": "dummy",
        "kv_cache_memory": "1MiB",
    }
    LLM(str(model), dtype="bfloat16", num_threads=1, **options).close()
    assert not _files(tmp_path / "cache")

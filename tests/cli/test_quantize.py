"""`quire quantize`: what it writes computes as quantizing at load does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.config.engine import EngineConfig
from quire.engine.assembly.model_files import find_model

_HOLD = """
import pathlib, sys, time
from quire.common.scratch import make_folder
from quire.engine.assembly.quantization import _PREFIX
folder, _ = make_folder(pathlib.Path(sys.argv[1]), _PREFIX)
print(folder, flush=True)
time.sleep(600)
"""


def _answer(model: str, **options: Any) -> list[tuple[int, float]]:
    with LLM(model, max_model_len=128, num_threads=1, kv_cache_memory="8MiB", **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0)
        [output] = llm.generate("Once upon a time", params, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    steps = zip(completion.token_ids, completion.logprobs, strict=True)
    return [(token_id, held[token_id].logprob) for token_id, held in steps]


@pytest.mark.slow_except("int8")
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_written_checkpoint_computes_what_quantizing_at_load_computes(
    form: str, tmp_path: Path
) -> None:
    folder = tmp_path / form
    assert main(["quantize", "quire-storyteller", "--to", form, "-o", str(folder)]) == 0
    written = _answer(str(folder))
    assert written == _answer("quire-storyteller", quantization=form)
    assert written != _answer("quire-storyteller")


@pytest.mark.parametrize("kind", ["folder", "link to a folder", "link to nothing"])
def test_a_folder_that_is_there_is_written_into(kind: str, tmp_path: Path) -> None:
    """It may be mounted, and cannot be replaced by another then."""
    target, named = tmp_path / "target", tmp_path / "named"
    if kind == "folder":
        target = named
    else:
        named.symlink_to(target)
    if kind != "link to nothing":
        target.mkdir()
    before = os.stat(target).st_ino if target.exists() else None
    assert main(["quantize", "quire-storyteller", "--to", "int8", "-o", str(named)]) == 0
    assert before in (None, os.stat(target).st_ino) and named.is_symlink() == (kind != "folder")
    assert find_model(EngineConfig(model=str(named))).config["quantization_config"]
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.parametrize("is_there", [True, False])
def test_what_a_killed_process_leaves_is_deleted_by_the_next(
    is_there: bool, tmp_path: Path
) -> None:
    """And what one that is alive writes is not."""
    output = tmp_path / "made"
    if is_there:
        output.mkdir()
    begun = [sys.executable, "-c", _HOLD, str(output if is_there else tmp_path)]
    with subprocess.Popen(begun, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        command = ["quantize", "quire-storyteller", "--to", "int8", "-o", str(output)]
        assert main(command) == (2 if is_there else 0) and left.is_dir()
        process.kill()
    if not is_there:
        shutil.rmtree(output)
    assert main(command) == 0
    assert find_model(EngineConfig(model=str(output))).config["quantization_config"]
    assert not list(tmp_path.rglob(".*"))


def test_templates_that_requests_can_name_go_along(tmp_path: Path) -> None:
    model, output = tmp_path / "model", tmp_path / "made"
    shutil.copytree(find_model(EngineConfig(model="quire-storyteller")).folder, model)
    for name in ("additional_chat_templates", "chat_templates"):
        (model / name).mkdir()
        (model / name / "rag.jinja").write_text("{{ messages }}")
    assert main(["quantize", str(model), "--to", "int8", "-o", str(output)]) == 0
    kept = sorted(str(path.relative_to(output)) for path in output.rglob("*.jinja"))
    assert kept == ["additional_chat_templates/rag.jinja", "chat_templates/rag.jinja"]


def test_a_file_system_is_empty_with_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    assert main(["quantize", "quire-storyteller", "--to", "int8", "-o", str(tmp_path)]) == 0


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, said in (
        ("full", "exists already"), ("full/a", "exists already"),
        ("full/a/b", "cannot be written"), ("loop", "cannot be written"),
        ("x" * 300, "cannot be written"),
    ):  # fmt: skip
        output = tmp_path / name
        assert main(["quantize", "quire-storyteller", "--to", "int8", "-o", str(output)]) == 2
        assert f"{output} {said}" in capsys.readouterr().err

"""Platforms of other packages: the example, installed as a package is, passes every check and gives
the answers of a model; one that is missing, broken or made for another version is an error."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.errors import ConfigError
from quire.kernels import load
from quire.kernels.conformance import check_kernels
from quire.kernels.interface import PackedLinear
from quire.kernels.platforms import PROTOCOL_VERSION, platform_kernels, required_names
from quire.kernels.reference import ReferenceKernels
from quire.kernels.reference.linear import ReferenceLinear

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_torch_platform"
SMALL: dict[str, Any] = {"kv_cache_memory": "16MiB", "num_threads": 1, "max_num_seqs": 4}


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the example was installed, without a network."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("platform")
    shutil.copytree(EXAMPLE, folder / "source")  # a build leaves files beside it
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "--target", str(folder / "site"), str(folder / "source")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if "No module named pip" in done.stderr:
        pytest.skip("there is no pip here")
    assert done.returncode == 0, done.stderr
    return folder / "site"


def offered(folder: Path, name: str, source: str, version: str = "1.0") -> None:
    """Have a package on the path that offers a platform `bad`."""
    (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[quire.platforms]\nbad = {name}:Made\n")


@pytest.fixture(scope="session")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the example lies as it is, with the entry points of its project: what an
    installation makes of it, in none of the seconds that it takes."""
    folder = tmp_path_factory.mktemp("platform")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {target}" for name, target in entries.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    shutil.copytree(EXAMPLE / "quire_plain_torch", folder / "quire_plain_torch")
    return folder


@pytest.mark.slow
def test_the_example_passes_every_check_of_the_kit(
    installed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(installed))
    assert main(["plugin", "list"]) == 0
    assert "plain-torch  quire-plain-torch 1.0.0" in capsys.readouterr().out
    assert main(["plugin", "check", "plain-torch", "--kernels-only"]) == 0
    assert "and all are right" in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_on_the_example_keeps_every_promise(
    installed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(installed))
    assert main(["plugin", "check", "plain-torch", "--verbose"]) == 0
    assert "ok    model: prompts in pieces" in capsys.readouterr().out


def test_an_engine_computes_with_the_kernels_of_its_platform(
    beside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(beside))
    llm = LLM("quire-storyteller", platform="plain-torch", **SMALL)
    worker: Any = llm.engine.executor
    assert worker.worker.model.kernels.name == "plain-torch"
    assert ("platform", "plain-torch") in [each[:2] for each in llm.engine.plan.decisions]
    (output,) = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=3))
    other = LLM("quire-storyteller", **SMALL)
    (expected,) = other.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=3))
    assert output.outputs[0].text == expected.outputs[0].text


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_the_kernels_here_pass_every_check(name: str) -> None:
    try:
        kernels = load(name)
    except ConfigError as error:
        pytest.skip(str(error))
    verdicts = list(check_kernels(kernels))
    assert len(verdicts) > 100 and [each for each in verdicts if each.problem is not None] == []


class _Together(ReferenceKernels):
    """Rows that know of one another."""

    def linear(self, x: Tensor, weight: PackedLinear, *, out_dtype: str | None = None) -> Tensor:
        found = super().linear(x, weight, out_dtype=out_dtype)
        return found + 1e-7 * len(x)


class _Wrong(ReferenceKernels):
    """Numbers that are off, and a cache of other bytes."""

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0
    ) -> Tensor:
        return x * weight

    def write_kv(self, key: Tensor, *others: Tensor) -> None:
        super().write_kv(key * 1.01, *others)


class _Raising(ReferenceKernels):
    """An operation that is missing."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> ReferenceLinear:
        raise NotImplementedError("later")


class _ByBlocks(ReferenceKernels):
    """Attention whose bits depend on the size of blocks."""

    def paged_attention(
        self, query: Tensor, key_cache: Tensor, *others: Any, **more: Any
    ) -> Tensor:
        found: Tensor = super().paged_attention(query, key_cache, *others, **more)
        return found + 1e-6 * key_cache.shape[2]


@pytest.mark.slow_except("_Together-*", "_Wrong-float32: rms_norm-*")
@pytest.mark.parametrize(
    ("kernels", "name", "problem"),
    [
        (_Together(), "float32: linear: alone", "depend on the rows beside it"),
        (_Wrong(), "float32: rms_norm", "off by"),
        (_Wrong(), "float32: write_kv, int8", "its bytes are others"),
        (_Raising(), "float32: products", "NotImplementedError: later"),
        (_ByBlocks(), "float32: attention: blocks", "the block size"),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_the_kit_finds_what_is_wrong(kernels: Any, name: str, problem: str) -> None:
    found = {each.name: each.problem for each in check_kernels(kernels)}
    assert problem in (found[name] or "")


HEAD = f"class Made:\n    protocol_version = {PROTOCOL_VERSION}\n"
BROKEN = {
    "import": ("raise ImportError('no driver')", "could not be loaded: ImportError: no driver"),
    "version": ("class Made:\n    protocol_version = 99\n", "made for version 99"),
    "no version": ("class Made: pass\n", "made for version None"),
    "no method": (HEAD, r"has no method reasons_against\(\)"),
    "no device": (
        HEAD + "    kernels = None\n    def reasons_against(self): return ['no card']\n"
        "    def kernels(self): return None\n",
        "cannot compute here: no card",
    ),
    "half the kernels": (
        HEAD + "    def reasons_against(self): return []\n    def kernels(self): return object()\n",
        "its kernels have no activate",
    ),
    "kernels that fail": (
        HEAD + "    def reasons_against(self): return []\n    def kernels(self): return 1 / 0\n",
        "could not make its kernels: ZeroDivisionError",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_platform_that_cannot_be_used_is_an_error_and_no_slow_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, reason = BROKEN[how]
    name = f"quire_broken_{how.replace(' ', '_')}"
    offered(tmp_path, name, source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=rf"platform='bad' of {name} 1.0.*{reason}"):
        platform_kernels("bad")
    with pytest.raises(ConfigError, match=reason):
        LLM("quire-storyteller", platform="bad", **SMALL)
    assert main(["plugin", "check", "bad"]) == 2
    assert name in capsys.readouterr().err


def test_a_platform_that_is_missing_or_offered_twice_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="is not installed; installed are: "):
        LLM("quire-storyteller", platform="plane-torch")
    for name in ("quire_twin_one", "quire_twin_two"):
        offered(tmp_path, name, HEAD)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="offered by quire_twin_one and quire_twin_two"):
        LLM("quire-storyteller", platform="bad")


@pytest.mark.parametrize(
    "options",
    [
        {"kernels": "cpu"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"device": "cuda"},
        {"platform": ""},
    ],
    ids=str,
)
def test_a_platform_goes_with_no_other_choice_of_kernels(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="platform="):
        LLM("quire-storyteller", **{"platform": "plain-torch", **options})


def test_the_protocol_is_all_of_the_kernels() -> None:
    names = required_names()
    assert {"linear", "paged_attention", "compile", "device", "shared_prefix_unit"} <= set(names)
    assert [each for each in names if not hasattr(ReferenceKernels(), each)] == []
    assert torch.device("cpu") == ReferenceKernels().device

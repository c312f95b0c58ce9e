"""Every command and snippet of the README, CONTRIBUTING and the how-to pages is run as it stands.

Commands of `quire` run in this process; Python snippets one after the other in a process of their
own; clients and curl against a server that the README's own command started, but for its port. What
needs a network, minutes or another machine (`pip install`, `make`, `python -m pytest`, scripts) is
resolved: the target, the tests, the requirement exist.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import gzip
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest
import yaml
from adapters import write_adapter
from markdown_pages import ROOT, Block, blocks

from quire.cli.main import COMMANDS, main
from quire.cli.parser import Parser
from quire.config.engine import EngineConfig
from quire.core.structure import StructuredOutputsParams
from quire.grammar.judge import judge
from quire.models.registry import declare
from quire.ray.settings import RaySettings
from quire.weights.folder import read_model_config, resolve_model

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs" / "howto").glob("*.md")),
]
BLOCKS = [block for page in PAGES for block in blocks(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
COMMAND_LINES = [
    (block.page, line)
    for block in BLOCKS
    if block.language == "bash"
    for line in re.sub(r"\\\n\s*", " ", block.code).splitlines()
    if line.strip()
]
MENTIONED = [
    (str(page.relative_to(ROOT)), code)
    for page in [*PAGES, ROOT / "docs" / "troubleshooting.md"]
    for code in re.findall(
        r"`(quire [^`\n]+)`",
        re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL),
    )
]
SERVE = "quire serve --port 8000"
DEADLINE_S = 100.0
RUN_PAGES = """
import runpy, sys

names, before = {}, None
for path in sys.argv[1:]:
    page = path.rpartition("-")[0]
    names = names if page == before else {}
    names, before = runpy.run_path(path, init_globals=names, run_name="__main__"), page
print("-- done")
"""
# One thread, so that tests side by side do not fight; nothing is looked up on the network.
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
}


def _is_client(block: Block) -> bool:
    return "localhost" in block.code


def _words(line: str) -> list[str]:
    return shlex.split(line, comments=True)


# -- what can be resolved, in the fast suite
# -------------------------------------------------------------------------------


def _check_options(words: list[str]) -> None:
    """Hold a command of `quire` to its parser: the command exists, and so does every option."""
    name = next(
        (" ".join(words[1:count]) for count in (3, 2) if " ".join(words[1:count]) in COMMANDS), None
    )
    assert name is not None, f"there is no command {words[1:3]}"
    parser = Parser(f"quire {name}", COMMANDS[name].help)
    importlib.import_module(COMMANDS[name].module).add_arguments(parser)
    known = {text for action in parser._actions for text in action.option_strings}
    assert [
        word for word in words if re.match(r"--?[a-z]", word) and word.split("=")[0] not in known
    ] == []


def _check_make(words: list[str]) -> None:
    targets = set(
        re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert {word for word in words[1:] if "=" not in word} <= targets


def _check_pip(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert words[1] == "install"
    for word in words[2:]:
        extra = re.fullmatch(r"quire-llm\[(\w+)\]", word)
        assert (
            word.partition("[")[0] in {".", "-e"}
            or word.startswith("--")
            or (extra and extra[1] in project["optional-dependencies"])
        )


def _check_pytest(words: list[str]) -> None:
    assert words[:3] == ["python", "-m", "pytest"]
    paths = [word for word in words[3:] if word.startswith("tests/")]
    assert paths and all((ROOT / path).exists() for path in paths)


def _check_script(words: list[str]) -> None:
    subprocess.run(["sh", "-n", str(ROOT / words[1])], check=True)


def _check_curl(words: list[str]) -> None:
    assert any(word.startswith("http://localhost:8000/") for word in words), (
        "run against the server in the slow suite"
    )


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "quire": _check_options, "make": _check_make, "pip": _check_pip, "python": _check_pytest,
    "sh": _check_script, "curl": _check_curl,
}  # fmt: skip


@pytest.mark.parametrize(("page", "line"), COMMAND_LINES)
def test_every_command_exists_with_its_options(page: str, line: str) -> None:
    words = _words(line)
    CHECKS[words[0]](words)


def test_every_command_is_parsed_as_it_stands() -> None:
    """The order of its words included, which the names of its options say nothing about."""
    lines = [words[1:] for _, line in COMMAND_LINES if (words := _words(line))[0] == "quire"]
    assert lines
    for words in lines:
        if "--help" in words:
            continue
        count = 2 if " ".join(words[:2]) in COMMANDS else 1
        name = " ".join(words[:count])
        parser = Parser(f"quire {name}", COMMANDS[name].help)
        importlib.import_module(COMMANDS[name].module).add_arguments(parser)
        parser.parse(words[count:])


@pytest.mark.parametrize(("page", "code"), MENTIONED)
def test_every_command_mentioned_exists_with_its_options(page: str, code: str) -> None:
    words = [word for word in code.replace("...", "").split() if not word.startswith("'")]
    if words[1] == "COMMAND" or (
        len(words) == 2 and any(name.startswith(f"{words[1]} ") for name in COMMANDS)
    ):
        return
    _check_options(words)


def test_every_python_snippet_is_whole() -> None:
    for block in PYTHON:
        compile(block.code, f"{block.page}:{block.number}", "exec")


def test_the_blocks_are_found() -> None:
    readme = [line for page, line in COMMAND_LINES if page == "README.md"]
    assert {"pip install '.[serve]'", SERVE} <= set(readme) and any(
        line.startswith("make demo") for line in readme
    )
    assert (
        any(line.startswith("make test ") for line in readme)
        and len(PYTHON) >= 8
        and len(COMMAND_LINES) > 20
    )
    unknown = {block.language for block in BLOCKS} - {
        "python",
        "py",
        "yaml",
        "bash",
        "ebnf",
        "toml",
    }
    assert not unknown, f"blocks in {unknown} are not run by any test"


def test_scripts_for_a_cluster_give_options_that_there_are() -> None:
    """Those run in `tests/parallel/test_ray.py`, where Ray is installed."""
    known = {each.name for each in dataclasses.fields(EngineConfig)}
    scripts = [block for block in BLOCKS if block.language == "py"]
    assert scripts
    for block in scripts:
        calls = [
            node
            for node in ast.walk(ast.parse(block.code))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "LLM"
        ]
        assert calls and {word.arg for call in calls for word in call.keywords} <= known


def test_applications_for_ray_serve_are_understood() -> None:
    files = [yaml.safe_load(block.code) for block in BLOCKS if block.language == "yaml"]
    applications = [each for file in files for each in file.get("applications", ())]
    assert applications
    for each in applications:
        module, _, name = each["import_path"].partition(":")
        assert callable(getattr(importlib.import_module(module), name))
        RaySettings.of(each["args"])


def test_files_of_options_are_understood(tmp_path: Path) -> None:
    files = [block for block in BLOCKS if block.language == "yaml"]
    files = [block for block in files if "applications" not in yaml.safe_load(block.code)]
    assert files
    for number, block in enumerate(files):
        path = tmp_path / f"{number}.yaml"
        path.write_text(block.code, encoding="utf-8")
        parser = Parser("quire serve", COMMANDS["serve"].help)
        importlib.import_module(COMMANDS["serve"].module).add_arguments(parser)
        found = parser.parse(["--config", str(path)])
        assert found.model == yaml.safe_load(block.code)["model"]


def test_entry_points_name_what_the_example_has() -> None:
    blocks = [tomllib.loads(block.code) for block in BLOCKS if block.language == "toml"]
    example = ROOT / "examples/plain_torch_platform/pyproject.toml"
    project = tomllib.loads(example.read_text(encoding="utf-8"))["project"]
    assert blocks == [{"project": {"entry-points": project["entry-points"]}}]


def test_grammars_are_understood() -> None:
    grammars = [block.code for block in BLOCKS if block.language == "ebnf"]
    assert grammars
    for grammar in grammars:
        judge.check(StructuredOutputsParams(grammar=grammar).wire)


# -- what runs
# --------------------------------------------------------------------------------------------------

RUNNABLE = sorted(
    {
        line.partition("  #")[0].strip()
        for _, line in COMMAND_LINES
        if line.startswith("quire ") and not line.startswith("quire serve")
    }
)
LOCAL = [block for block in PYTHON if not _is_client(block)]
CLIENTS = [block for block in BLOCKS if _is_client(block) and not block.code.startswith("pip")]


@pytest.mark.slow
@pytest.mark.parametrize("line", RUNNABLE)
def test_commands_run(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    request = {
        "arrival_s": 0,
        "prompt_tokens": 64,
        "output_tokens": 2,
        "block_hashes": [1, 2, 3, 4],
    }
    with gzip.open(tmp_path / "multiturn.jsonl.gz", "wt", encoding="utf-8") as trace:
        trace.write(f"{json.dumps(request)}\n" * 3)
    code = main(_words(line)[1:])
    captured = capsys.readouterr()
    assert code == 0 and captured.out + captured.err, captured.err


@pytest.mark.slow
def test_snippets_that_load_the_model(tmp_path: Path) -> None:
    """In one process, which pays for importing torch once; a failure names the page and the number
    of its block. The blocks of a page go on from one another."""
    files = []
    for block in LOCAL:
        file = tmp_path / f"{block.page.replace('/', '-')}-{block.number}.py"
        file.write_text(block.code, encoding="utf-8")
        files.append(str(file))
    said = _run([sys.executable, "-W", "error", "-c", RUN_PAGES, *files], tmp_path)
    assert "-- done" in said and len(said.split()) > 20 * len(LOCAL)  # some say a line


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Where a server listens that was started by the README's command, but for its port:
    one that is free."""
    words = _words(SERVE.replace("8000", "0"))
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen([sys.executable, "-m", *words], env=ENVIRONMENT, stderr=log) as process,
    ):
        try:
            began_s = time.monotonic()
            while not (found := _ready_port(log)):
                assert process.poll() is None and time.monotonic() - began_s < DEADLINE_S
                time.sleep(0.1)
            yield found
        finally:
            process.kill()


def _ready_port(log: TextIO) -> int | None:
    """The port in the server's log, once the server is ready."""
    log.seek(0)
    found = re.search(r"listening on http://[^:]+:(\d+)", log.read())
    if found is None:
        return None
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/readyz", timeout=60):
            return int(found[1])
    except (OSError, urllib.error.URLError):
        return None


def _run(command: list[str], folder: Path) -> str:
    paths = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=paths, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SERVED = sorted(
    {
        line.partition("  #")[0].strip()
        for _, line in COMMAND_LINES
        if line.startswith("quire serve quire-storyteller")
        and line.replace(" quire-storyteller", "", 1) != SERVE  # which the clients ask
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("line", SERVED)
def test_servers_get_ready(line: str, tmp_path: Path) -> None:
    """With the options of the pages, on any free port."""
    spec = declare(read_model_config(resolve_model("quire-storyteller")))
    for folder in re.findall(r"=(adapters/\w+)", line):
        write_adapter(tmp_path / folder, spec, rank=4)
    command = [sys.executable, "-m", *_words(line), "--port", "0"]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, env=environment, stderr=log, cwd=tmp_path) as process,
    ):
        try:
            began_s = time.monotonic()
            while not _ready_port(log):
                assert process.poll() is None and time.monotonic() - began_s < DEADLINE_S
                time.sleep(0.1)
        finally:
            process.kill()


@functools.cache
def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@pytest.mark.slow
@pytest.mark.parametrize("block", CLIENTS, ids=lambda block: f"{block.page}:{block.number}")
def test_snippets_that_ask_the_server(port: int, block: Block, tmp_path: Path) -> None:
    code = block.code.replace("localhost:8000", f"127.0.0.1:{port}")
    if block.language == "bash":
        if shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        assert '"finish_reason":' in _run(["sh", "-c", code], tmp_path)
        return
    for module in re.findall(r"^from (\w+)", code, re.MULTILINE):
        if not _is_installed(module):
            pytest.skip(f"{module} is not installed")
    assert len(_run([sys.executable, "-W", "error", "-c", code], tmp_path).split()) > 5

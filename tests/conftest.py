"""Shared by all tests: where the shared data lies, draws without a deadline,
interrupts that reach the programs under test."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType

import hypothesis
import pytest
from code_in_data import watch
from suites import mark_slow

from quire.bench.limits import torch_multiplies_bfloat16
from quire.text.sandbox import TemplateEnvironment
from quire.text.tokenizer import Tokenizer
from quire.weights.folder import resolve_model

SHARED = Path(os.environ.get("QUIRE_SHARED", Path(__file__).parent.parent.parent / "shared"))
NOT_SHARED = f"no shared data at {SHARED} (set QUIRE_SHARED)"

# Triton reads at its first import whether to interpret kernels on the CPU, so this comes before
# anything can import it.
if os.environ.get("QUIRE_TEST_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

# On some virtual machines with AMX a bfloat16 GEMM of torch, as the reference kernels compute it,
# ends the process by an illegal instruction. Asked once, before torch is imported; the suite's
# workers inherit the answer.
if (
    "ONEDNN_MAX_CPU_ISA" not in os.environ
    and "PYTEST_XDIST_WORKER" not in os.environ
    and not torch_multiplies_bfloat16()
):
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"

# A suite started in the background of a shell inherits an interrupt that is ignored, and so would
# the programs it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What is drawn must hold however long it takes: by default an example that a busy machine holds up
# for 200 ms is a failure.
hypothesis.settings.register_profile(
    "quire",
    deadline=None,
    max_examples=int(os.environ.get("QUIRE_HYPOTHESIS_EXAMPLES", "50")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("quire")

MARK = "mark.slow"
USES_LARGE_PACKAGE = re.compile(
    r"\b(transformers|folders|vision_models|draft_heads|peft|anthropic|langchain_\w+|from modules)\b"
)
"""Packages that take seconds to import, modules of tests/support that import one, a package that
does, and the module that parses all of Quire."""
ALL_SLOW = re.compile(r"^pytestmark = .*\bpytest\.mark\.slow\b", re.MULTILINE)

watch()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """More than there are cores: a third of the time a test waits for
    something that it has started."""
    num_cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return num_cores + (num_cores + 1) // 2


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how much was not tested because the shared data is missing: among thousands of passed
    tests, their number alone is not noticed."""
    skipped = terminalreporter.stats.get("skipped", ())
    num_tests = sum(NOT_SHARED in str(report.longrepr) for report in skipped)
    if num_tests:
        terminalreporter.section("shared data", yellow=True)
        terminalreporter.line(
            f"There is no folder {SHARED}, where models, traces and goldens are looked for: "
            f"{num_tests} tests were skipped. Set QUIRE_SHARED to where it is."
        )


def pytest_sessionstart() -> None:
    """Collect no garbage while thousands of modules and tests are made, all of which stay."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Keep thousands of collected tests out of every later collection of garbage:
    many tests ask for one, and pytest for five at the end."""
    gc.enable()
    gc.freeze()
    # With Python's 700 and 10, the collector takes 6 % of the tests of a server.
    gc.set_threshold(5_000, 10, 5)
    # pytest gives each of the 40 loggers of torch that do not propagate two handlers in each of a
    # test's three phases, and takes them back.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True
    # The interpreter's last collection finds everything: the native extension reports what is left.
    atexit.register(gc.unfreeze)
    _FROZEN.append(len(sys.modules))


_FROZEN: list[int] = []
"""How many modules there were each time that objects were put aside for good."""
_MANY_MODULES = 100
"""A package that takes long to import: transformers, a client of a server."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Between files, when only what lasts is left, keep packages that were imported meanwhile out
    of later collections as well: a full one takes 0.3 s with transformers, and 10 ms without."""
    yield
    expect_best_instruction_set()
    is_last = nextitem is None or nextitem.path != item.path
    if is_last and len(sys.modules) > _FROZEN[-1] + _MANY_MODULES:
        gc.collect()
        gc.freeze()
        _FROZEN.append(len(sys.modules))


def expect_best_instruction_set() -> None:
    """Blame the test that leaves the process with another: every later one that compares it with
    a process of its own would fail in its place."""
    cpu = sys.modules.get("quire.kernels.cpu")
    if cpu is None or cpu.IMPORT_ERROR is not None:
        return
    found, best = cpu.isa(), cpu.supported_isas()[-1]
    cpu.set_isa(best)
    assert found == best, f"the test leaves instruction set {found} in use, not {best}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no module all of whose tests would be deselected: some import what takes seconds."""
    if config.option.markexpr not in ("slow", "not slow") or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text(encoding="utf-8")
    is_wanted = MARK in text if config.option.markexpr == "slow" else not ALL_SLOW.search(text)
    return None if is_wanted else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Let each of several workers begin with other folders. pytest keeps the modules whose
    assertions it has rewritten; in a fresh clone, workers in step would each rewrite all of them,
    which takes 13 s of a processor."""
    worker, arguments = os.environ.get("PYTEST_XDIST_WORKER"), session.config.args
    if worker is None or len(arguments) != 1 or not Path(arguments[0]).is_dir():
        return
    parts = sorted(
        str(path)
        for path in Path(arguments[0]).iterdir()
        if (path.is_dir() and any(path.rglob("test_*.py"))) or path.match("test_*.py")
    )
    number, count = int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    first = len(parts) * number // count
    session.config.args = parts[first:] + parts[:first]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cells that are slow, and find slow tests that the slow suite would not, since their
    modules do not say so. Put tests that import the largest packages first: of several
    workers, each of which begins with a part of them all, one imports them. Put all in the same
    order, whichever folder was read first."""
    mark_slow(items, has_all_cells=not any("::" in each for each in config.args))
    texts = {path: path.read_text(encoding="utf-8") for path in {item.path for item in items}}
    for item in items:
        if item.get_closest_marker("slow") is not None and MARK not in texts[item.path]:
            raise pytest.UsageError(f"{item.path}: write out pytest.{MARK}, by which it is found")
    are_others = {path: USES_LARGE_PACKAGE.search(text) is None for path, text in texts.items()}
    items.sort(key=lambda item: (are_others[item.path], item.nodeid.split("/")[:2]))


@pytest.fixture(scope="session", autouse=True)
def _shipped_tokenizer() -> Iterator[None]:
    """Read the tokenizer of the shipped model once in a process: hundreds of engines have it, and
    reading it takes as long as the rest of a tiny engine. It keeps nothing of a request."""
    read = Tokenizer.from_folder
    kept: list[Tokenizer] = []

    def from_folder(path: str | Path) -> Tokenizer:
        if Path(path) != resolve_model("quire-storyteller"):
            return read(path)
        if not kept:
            kept.append(read(path))
        return kept[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "from_folder", from_folder)
        yield


@pytest.fixture(scope="session", autouse=True)
def _compiled_templates() -> Iterator[None]:
    """Compile each chat template once in a process: hundreds of servers have that of the shipped
    model. All that the code knows of its environment is the list of the template's literals."""
    compile_anew = TemplateEnvironment.compile

    @lru_cache(maxsize=64)
    def compile_source(source: str) -> tuple[CodeType, list[str]]:
        environment = TemplateEnvironment(str)
        return compile_anew(environment, source), environment.literals

    def compile_once(environment: TemplateEnvironment, source: str) -> CodeType:
        code, literals = compile_source(source)
        environment.literals[:] = literals
        return code

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TemplateEnvironment, "compile", compile_once)
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared models, traces and goldens;
    tests that need it are skipped where it is missing."""
    if not SHARED.is_dir():
        pytest.skip(NOT_SHARED)
    return SHARED

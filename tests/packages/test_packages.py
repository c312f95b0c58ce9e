"""What is published: the files of sdist and wheel, and that each extra brings what it is for and
nothing else."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest
from modules import Module

from tools import check_package

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# A distribution's module, where it is not the name with underscores.
MODULES = {
    "pillow": "PIL",
    "pyyaml": "yaml",
    "python_multipart": "python_multipart",
    "opentelemetry_sdk": "opentelemetry",
    "opentelemetry_exporter_otlp_proto_http": "opentelemetry",
}
# Which packages of Quire are for an extra: only they may import what it brings.
PLACES = {
    "serve": ("server", "router", "ray/ingress.py"),
    "images": ("media",),
    "otel": ("server",),
    "ray": ("parallel/ray_places.py", "ray"),
    "gpu": ("kernels/triton", "bench", "cli", "engine/plan", "worker", "kernels/selection"),
}
# Imported by the framework itself when a request has parts (`Request.form`).
IMPORTED_BY_OTHERS = {"python_multipart"}
# What a dependency always brings.
BROUGHT = {"markupsafe": "jinja2"}
SERVING = """
import sys
from quire.cli.main import main
try:
    main(["serve", "--help"])
except SystemExit:
    pass
import quire.server.app, quire.server.lifecycle, quire.router.app, quire.router.lifecycle
print(" ".join(sorted({name.partition(".")[0] for name in sys.modules})))
"""
OFFLINE = """
import sys
from quire import LLM, SamplingParams
with LLM("quire-storyteller", kv_cache_memory="4MiB") as llm:
    llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)
print(" ".join(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def _module(requirement: str) -> str:
    name = re.split(r"[^\w-]", requirement, maxsplit=1)[0].replace("-", "_")
    return MODULES.get(name, name)


def _modules(extra: str | None) -> set[str]:
    wanted = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    return {_module(each) for each in wanted}


@functools.cache
def _imports() -> dict[str, set[str]]:
    """Modules from outside that the package imports anywhere, with the files that do."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "quire").rglob("*.py")):
        for name, _ in Module.read(path).imports:
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and top != "quire":
                found.setdefault(top, set()).add(str(path.relative_to(ROOT / "quire")))
    return found


@pytest.mark.slow
def test_every_import_is_declared_and_every_dependency_imported() -> None:
    declared = _modules(None).union(*(_modules(extra) for extra in PLACES))
    imported = {BROUGHT.get(name, name) for name in _imports()}
    assert imported - declared == set()
    assert declared - imported == IMPORTED_BY_OTHERS & declared


@pytest.mark.slow
@pytest.mark.parametrize("extra", PLACES)
def test_what_an_extra_brings_is_imported_where_the_extra_is_for(extra: str) -> None:
    for module in _modules(extra) - _modules(None) - IMPORTED_BY_OTHERS:
        elsewhere = [path for path in _imports()[module] if not path.startswith(PLACES[extra])]
        assert elsewhere == [], module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "used", "unused"),
    [
        (OFFLINE, [None], ["serve", "images", "otel"]),
        (SERVING, ["serve"], ["images", "otel"]),
    ],
    ids=["offline", "serving"],
)
def test_a_process_loads_what_its_extra_brings_and_nothing_of_others(
    code: str, used: Sequence[str | None], unused: Sequence[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=250, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = set(done.stdout.splitlines()[-1].split())
    for extra in unused:
        assert loaded & (_modules(extra) - _modules(None)) == set()
    if used == ["serve"]:
        assert _modules("serve") - IMPORTED_BY_OTHERS <= loaded


def test_a_fault_in_a_package_is_found() -> None:
    fine = [pattern.replace("*", "x") for pattern in check_package.WHEEL]
    native = check_package.NATIVE.replace("*", "x")
    assert check_package.faults([*fine, native], is_wheel=True) == []
    assert check_package.faults(fine, is_wheel=True) == [f"lacks {check_package.NATIVE}"]
    [stray] = check_package.faults([*fine, native, "tests/test_llm.py"], is_wheel=True)
    assert stray == "holds tests/test_llm.py, which is no part of it"
    cache = "quire/__pycache__/llm.cpython-311.pyc"
    assert check_package.faults([*fine, native, cache], is_wheel=True) == [f"holds {cache}"]
    sources = [pattern.replace("*", "x") for pattern in check_package.SDIST]
    assert check_package.faults([*sources, native], is_wheel=False) == [
        f"holds {native}, which is built"
    ]
    model = "quire/assets/quire-storyteller/model.safetensors"
    assert check_package.faults([each for each in sources if each != model], is_wheel=False) == [
        f"lacks {model}"
    ]


@pytest.mark.slow
def test_sdist_and_wheel_hold_what_runs_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    code = (
        "import sys; from scikit_build_core import build; "
        "build.build_sdist(sys.argv[1]); "
        # without the kernels, which take minutes to compile
        "build.build_wheel(sys.argv[1], {'wheel.cmake': 'false'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True, text=True, timeout=250, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    [sdist], [wheel] = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")
    assert check_package.file_faults(sdist) == []
    names = check_package.names_of(wheel)
    assert check_package.faults(names, is_wheel=True, is_native=False) == []
    kept = {name for name in check_package.names_of(sdist) if name.startswith("quire/")}
    assert kept == {name for name in names if name.startswith("quire/")}


def test_what_the_index_shows_links_nowhere_into_the_repository() -> None:
    text = (ROOT / PROJECT["readme"]).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert [link for link in links if not link.startswith("https://")] == []
    named = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert named == set(PLACES)


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_images_are_built_from_all_that_the_build_reads(name: str) -> None:
    lines = (ROOT / "deploy" / "docker" / name).read_text(encoding="utf-8").splitlines()
    copied = {
        word for line in lines if re.match(r"COPY (?!--)", line) for word in line.split()[1:-1]
    }
    read = {"pyproject.toml", "CMakeLists.txt", "csrc", "quire", PROJECT["readme"]}
    for path in (*read, *PROJECT["license-files"]):
        assert any(path == each or path.startswith(f"{each}/") for each in copied), path


def test_messages_and_pages_name_the_distribution_as_it_is_called() -> None:
    assert PROJECT["name"] == "quire-llm"
    texts = [*(ROOT / "quire").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    wrong = [
        str(path)
        for path in texts
        if re.search(r"pip install ['\"]?quire[\[ '\"]", path.read_text(encoding="utf-8"))
    ]
    assert wrong == []


def test_an_installation_has_the_version_of_the_package() -> None:
    import quire

    try:
        assert metadata.version(PROJECT["name"]) == quire.__version__
    except metadata.PackageNotFoundError:
        pytest.skip("run from sources")

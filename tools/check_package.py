"""Judges what would be published: `python tools/check_package.py dist/*`, or `--installed` for the
installation of the Python that runs it.

A wheel or sdist must hold what runs (package, types, licence, shipped model, Triton kernels; the
sdist also the C++ sources) and nothing else: no tests, no caches, nothing built. An installation
must answer on native kernels. Exit code 1, with one line for each fault.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

PACKAGE = (
    "quire/__init__.py",
    "quire/py.typed",
    "quire/cli/main.py",
    "quire/kernels/triton/attention.py",
    "quire/server/ops/page/*.js",
    "quire/assets/quire-storyteller/ATTRIBUTION.txt",
    "quire/assets/quire-storyteller/config.json",
    "quire/assets/quire-storyteller/model.safetensors",
    "quire/assets/quire-storyteller/tokenizer.json",
    "quire/assets/quire-storyteller/tokenizer_config.json",
    "quire/assets/quire-embedder/model.safetensors",
    "quire/assets/quire-embedder/modules.json",
    "quire/assets/quire-embedder/tokenizer.json",
    "quire/assets/quire-viewer/model.safetensors",
    "quire/assets/quire-viewer/preprocessor_config.json",
    "quire/assets/quire-viewer/tokenizer.json",
)
WHEEL = (*PACKAGE, "*.dist-info/METADATA", "*.dist-info/licenses/LICENSE")
SDIST = (
    *PACKAGE, "PKG-INFO", "LICENSE", "CMakeLists.txt", "pyproject.toml",
    "deploy/package/README.md", "csrc/cpu/*.cpp", "csrc/cpu/isa/*.cpp",
)  # fmt: skip
WHEEL_PLACES = ("quire/*", "*.dist-info/*")
SDIST_PLACES = (
    "quire/*", "csrc/*", "deploy/package/README.md", "PKG-INFO", "LICENSE", "CHANGELOG.md",
    "README.md", "CMakeLists.txt", "pyproject.toml",
)  # fmt: skip
UNWANTED = ("*__pycache__*", "*.pyc", "*/.*", ".*", "*/tests/*", "*.log", "*.orig")
NATIVE = "quire/kernels/cpu/_native*.so"
MAX_SHOWN = 20
MAX_BYTES = {".whl": 40 << 20, ".gz": 25 << 20}
"""An sdist is 18 MB of models and a few of sources, a wheel has the kernels beside the model; the
rest of the bound is room to grow. More is something that should not be there."""


def names_of(path: Path) -> list[str]:
    """The files in a wheel or sdist, without the folder that an sdist is in."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            return [name for name in archive.namelist() if not name.endswith("/")]
    with tarfile.open(path) as tar:
        return [member.name.partition("/")[2] for member in tar.getmembers() if member.isfile()]


def faults(names: Sequence[str], *, is_wheel: bool, is_native: bool = True) -> list[str]:
    """What is missing from the files of a package, and what should not be among them; `is_native`
    where a wheel must hold the compiled kernels."""
    wanted = (*WHEEL, *((NATIVE,) if is_native else ())) if is_wheel else SDIST
    places = WHEEL_PLACES if is_wheel else SDIST_PLACES
    found = [f"lacks {pattern}" for pattern in wanted if not fnmatch.filter(names, pattern)]
    for name in names:
        if not any(fnmatch.fnmatch(name, place) for place in places):
            found.append(f"holds {name}, which is no part of it")
        elif any(fnmatch.fnmatch(name, pattern) for pattern in UNWANTED):
            found.append(f"holds {name}")
        elif not is_wheel and fnmatch.fnmatch(name, NATIVE):
            found.append(f"holds {name}, which is built")
    return found


def file_faults(path: Path) -> list[str]:
    """What is wrong with a wheel or an sdist."""
    limit = MAX_BYTES.get(path.suffix)
    if limit is None:
        return ["is neither a wheel (.whl) nor an sdist (.tar.gz)"]
    found = faults(names_of(path), is_wheel=path.suffix == ".whl")
    if path.stat().st_size > limit:
        found.append(f"has {path.stat().st_size} bytes, more than {limit}")
    return found


def installation_faults() -> list[str]:
    """What is wrong with the installation of this Python: it must answer, on native kernels."""
    from quire import LLM, SamplingParams
    from quire.kernels import cpu

    found = [] if cpu.IMPORT_ERROR is None else [f"has no native kernels: {cpu.IMPORT_ERROR}"]
    with LLM("quire-storyteller") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8)
        [output] = llm.generate("Once upon a time", params, use_tqdm=False)
    if not output.outputs[0].text.strip():
        found.append("answers nothing")
    return found


def main() -> None:
    """Judge each file, or the installation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--installed", action="store_true", help="judge what is installed here")
    args = parser.parse_args()
    if not args.files and not args.installed:
        parser.error("name wheels and sdists, or give --installed")
    judged = [(path.name, file_faults(path)) for path in args.files]
    judged += [("the installation", installation_faults())] if args.installed else []
    for name, found in judged:
        shown = [f"{name} {fault}" for fault in found[:MAX_SHOWN]]
        if len(found) > MAX_SHOWN:
            shown.append(f"{name} has {len(found) - MAX_SHOWN} more faults")
        print("\n".join(shown) or f"{name}: as it should be")
    sys.exit(any(found for _, found in judged))


if __name__ == "__main__":
    main()

"""The archive of comparison records: docs/benchmarks/records.tar.xz, evidence behind the table of
results.

A record's name is made of its own fields (start, machine, model), so two records never collide by
accident. The archive has the same bytes whenever the same records are written. Owns no figures:
`benchmarks.results` reads them from here.
"""

from __future__ import annotations

import io
import json
import lzma
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import ConfigError

Record = Mapping[str, Any]

ARCHIVE = Path(__file__).parent.parent / "docs" / "benchmarks" / "records.tar.xz"
MODELS = {
    "M1": "SmolLM2-135M",
    "M2": "Qwen3-0.6B",
    "M3": "Llama-3.2-1B",
    "M4": "Qwen3-30B-A3B, 8 layers",
    "M5": "OLMoE-1B-7B",
    "M6": "DeepSeek-V2-Lite, 8 layers",
}
"""Folders of `benchmarks.models`, and whose configuration they have."""
_MAX_BYTES = 256 << 20
"""Refuse to unpack more than this."""


def read_archive(path: Path = ARCHIVE) -> dict[str, Record]:
    """Return every record by name, oldest first; ConfigError says what is wrong with the file."""
    try:
        unpacked = lzma.LZMADecompressor().decompress(path.read_bytes(), _MAX_BYTES)
        with tarfile.open(fileobj=io.BytesIO(unpacked)) as tar:
            files = {member.name: tar.extractfile(member) for member in tar.getmembers()}
            return {
                Path(name).stem: json.load(file)
                for name, file in sorted(files.items())
                if file is not None
            }
    except (OSError, lzma.LZMAError, tarfile.TarError, ValueError) as error:
        raise ConfigError(f"{path} is no archive of benchmark records: {error}") from None


def write_archive(records: Mapping[str, Record], path: Path = ARCHIVE) -> None:
    """Write all records, the same bytes for the same records."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(records):
            data = (json.dumps(records[name], indent=1) + "\n").encode()
            member = tarfile.TarInfo(f"{name}.json")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    path.write_bytes(lzma.compress(packed.getvalue(), preset=9 | lzma.PRESET_EXTREME))


def name_of(record: Record) -> str:
    """Return the record's name in the archive: when it began, on what, with which model."""
    began = record["started_at"].replace(":", "")
    return f"{began}-{machine_of(record).slug}-{record['model']}"


class Machine:
    """What a record's figures were measured on:
    a processor and the instruction sets that engines could use."""

    def __init__(self, slug: str, name: str, wrapper: str = "") -> None:
        self.slug, self.name, self.wrapper = slug, name, wrapper


CASCADE_LAKE = Machine("cascade-lake", "Cascade Lake, 2 cores")
EMERALD_AVX512 = Machine(
    "emerald-avx512", "Emerald Rapids, 2 cores, AVX-512 only", "python -m benchmarks.without_amx "
)
EMERALD_AMX = Machine("emerald-amx", "Emerald Rapids, 2 cores, AMX")
EPYC_BF16 = Machine("epyc-bf16", "EPYC with AVX512-BF16, 2 cores")


def machine_of(record: Record) -> Machine:
    """Return the machine that a record names; one that is not known yet gets a
    slug of its processor's name."""
    cpu, instructions = record["machine"]["cpu"], record.get("instruction_set")
    if cpu == "Intel(R) Xeon(R) Processor @ 2.50GHz":
        return CASCADE_LAKE
    if cpu == "Intel(R) Xeon(R) Processor":  # virtualised: the kernel does not say which
        return EMERALD_AVX512 if instructions == "avx512vnni" else EMERALD_AMX
    if cpu == "AMD EPYC" and instructions == "avx512bf16":
        return EPYC_BF16
    slug = "-".join("".join(each if each.isalnum() else " " for each in cpu.lower()).split())
    return Machine(slug, f"{cpu}, {record['machine']['num_cores']} cores")

"""Counts instructions of the innermost loops of Arm's GEMM kernels, the largest tiles first.

    python tools/inner_loops.py build/arm/native

No Arm machine has timed these kernels; how many instructions a loop takes for its products says how
near they can come to the processor's rate of products. Reads objects that `make test-arm` compiled.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

OBJDUMP = "aarch64-linux-gnu-objdump"
PRODUCTS = ("fmla", "sdot", "usdot", "usmmla", "bfdot", "bfmmla")
_MAX_LOOP = 128
"""Instructions; longer loops are those around the innermost ones."""
_NUM_SHOWN = 4
_INSTRUCTION = re.compile(r"\s*([0-9a-f]+):\s+(\S+)\s*(.*)")
_TARGET = re.compile(r"(?:0x)?([0-9a-f]+) <")


class Loop(NamedTuple):
    """An innermost loop."""

    product: str
    num_products: int
    num_instructions: int
    num_on_stack: int
    """Loads and stores of what did not fit the registers."""


def loops(path: Path) -> Iterator[Loop]:
    """Yield the innermost loops of an object file that multiply."""
    text = subprocess.run(
        [OBJDUMP, "-d", "--no-show-raw-insn", str(path)], check=True, capture_output=True, text=True
    ).stdout
    found = [match for line in text.splitlines() if (match := _INSTRUCTION.match(line))]
    code = [(match[2], match[3]) for match in found]
    places = {int(match[1], 16): place for place, match in enumerate(found)}
    for end, (name, operands) in enumerate(code):
        target = _TARGET.search(operands) if name.startswith(("b.", "cbnz", "tbnz")) else None
        begin = places.get(int(target[1], 16), end) if target else end
        if not 0 < end - begin < _MAX_LOOP:
            continue
        body = code[begin : end + 1]
        counts = {each: sum(name == each for name, _ in body) for each in PRODUCTS}
        most = max(counts, key=counts.__getitem__)
        if counts[most] >= 4:
            on_stack = sum("[sp" in operands for _, operands in body)
            yield Loop(most, counts[most], len(body), on_stack)


def _largest(found: set[Loop]) -> Iterator[Loop]:
    """Yield those with the most products of each kind."""
    for product in PRODUCTS:
        yield from sorted((each for each in found if each.product == product), reverse=True)[
            :_NUM_SHOWN
        ]


def main() -> None:
    """Print the loops with the most products of each kind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("build", type=Path, help="folder in which CMake built the kernels")
    args = parser.parse_args()
    print(f"{'kernels':40} {'products':>14} {'instructions':>12} {'on the stack':>12}")
    for folder in sorted(args.build.rglob("quire_isa_neon*.dir")):
        for name in ("gemm", "gemm_integers"):
            kernels = f"{folder.stem.removeprefix('quire_isa_')}, {name}"
            for path in folder.rglob(f"isa/{name}.cpp.o"):  # not of all sets
                for loop in _largest(set(loops(path))):
                    print(
                        f"{kernels:40} {loop.num_products:7} {loop.product:>6} "
                        f"{loop.num_instructions:12} {loop.num_on_stack:12}"
                    )


if __name__ == "__main__":
    main()

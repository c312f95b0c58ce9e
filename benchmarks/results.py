"""The table of present results, docs/benchmarks/results.csv, and what is made of it: the benchmark
page and the README's plot.

    python -m benchmarks.results                   makes table, page and plot again from the archive
    python -m benchmarks.results --add RECORD...   puts records of benchmarks.compare into the
    archive first python -m benchmarks.results --check           exit code 1 if any file is not up
    to date

Rows with a record come from the archive: for each machine, model, workload and engine those of the
newest record that has them, and Quire's own row of that same record, so that a ratio is always of
one run. Other rows are written by hand into the table and stay. Owns which result is the present
one; `benchmarks.results_page` and `benchmarks.chart` draw.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.chart import THEMES, draw_peers
from benchmarks.records import (
    ARCHIVE,
    MODELS,
    Record,
    machine_of,
    name_of,
    read_archive,
    write_archive,
)
from benchmarks.result import Result, counterpart
from benchmarks.results_page import BEGIN, END, render_page
from benchmarks.variants import Variant

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "docs" / "benchmarks" / "results.csv"
PAGE = ROOT / "docs" / "benchmarks" / "README.md"
PLOT = ROOT / "docs" / "images"


def collect(records: Mapping[str, Record]) -> list[Result]:
    """Select the present results of an archive, see above; sorted by machine, model,
    workload and engine."""
    newest: dict[tuple[str, str, str, str], str] = {}
    for name, record in records.items():  # oldest first, so that the newest stays
        for workload, rows in record["summary"].items():
            for variant in rows:
                newest[machine_of(record).slug, record["model"], workload, variant] = name
    wanted = set()
    for (_, _, workload, variant), name in newest.items():
        wanted |= {(name, workload, variant), (name, workload, counterpart(variant))}
    results = [
        _result(name, records[name], workload, variant)
        for name, workload, variant in wanted
        if variant in records[name]["summary"][workload]
    ]
    return sorted(
        results,
        key=lambda each: (
            each.machine,
            each.model,
            each.workload,
            each.engine,
            each.format,
            each.record,
        ),
    )


def _result(name: str, record: Record, workload: str, variant: str) -> Result:
    row, parsed, machine = (
        record["summary"][workload][variant],
        Variant.parse(variant),
        machine_of(record),
    )
    value, unit, share = _value(row)
    if not record["measurements"] or "limits" not in record["measurements"][0]:
        share = ""  # older records held medians against the best of bursts
    return Result(
        machine=machine.name,
        date=record["started_at"][:10],
        commit=" ".join(record.get("commits") or [record["versions"]["commit"]]),
        model=MODELS.get(record["model"]) or str(record["model"]),
        workload=workload,
        engine=parsed.engine,
        format=":".join((parsed.form, *parsed.extra)),
        value=value,
        unit=unit,
        share_of_limit=share,
        rounds=str(row["num_rounds"]),
        record=name,
        command=command_of(record),
    )


def _value(row: Mapping[str, float]) -> tuple[str, str, str]:
    """Return what is measured of a workload: time per token of one request, seconds of one prompt,
    else throughput."""
    if "token_s" in row:
        return f"{1e3 * row['token_s']:.1f}", "ms/token", f"{row['token_bandwidth_share']:.2f}"
    if "ttft_s" in row:
        return f"{row['ttft_s']:.2f}", "s", f"{row['compute_share']:.2f}"
    return f"{row['output_tokens_per_s']:.1f}", "tokens/s", f"{row['compute_share']:.2f}"


def command_of(record: Record) -> str:
    """Return the command that repeats a record;
    peers are installed as benchmarks/README.md says."""
    rounds = 1 + max((each["round"] for each in record["measurements"]), default=0)
    variants = ",".join(record["variants"])
    # earlier records do not say it
    is_resident = record.get("is_resident", "transformers" not in variants)
    resident = "--resident " if is_resident else ""
    what = f"--model models/{record['model']} --workloads {','.join(record['workloads'])}"
    compare = (
        f"python -m benchmarks.compare {resident}{what} --rounds {rounds} --variants {variants} "
        "$peers"
    )
    return machine_of(record).wrapper + compare


# -- files
# --------------------------------------------------------------------------------------------------


def read_table(path: Path = TABLE) -> list[Result]:
    """Read the table; ValueError if its columns are others."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    if tuple(rows[0]) != Result._fields or any(len(row) != len(Result._fields) for row in rows):
        raise ValueError(
            f"{path} does not have the columns {', '.join(Result._fields)} in every row"
        )
    return [Result(*row) for row in rows[1:]]


def write_table(results: Iterable[Result]) -> str:
    """Return the table as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Result._fields)
    writer.writerows(results)
    return text.getvalue()


def generate() -> Iterator[tuple[Path, str]]:
    """Yield each file that is made from the archive, with what it should contain."""
    by_hand = [each for each in read_table() if not each.record]
    results = [*collect(read_archive()), *by_hand]
    yield TABLE, write_table(results)
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    yield PAGE, f"{head}{BEGIN}\n{render_page(results)}{END}{rest.partition(END)[2]}"
    for theme in THEMES:
        yield PLOT / f"peers-{theme}.svg", draw_peers(results, theme)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the files, or check them."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], prog="python -m benchmarks.results"
    )
    parser.add_argument(
        "--add",
        nargs="+",
        type=Path,
        default=[],
        metavar="RECORD",
        help="JSON files of benchmarks.compare",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit code 1 if a file is not up to date",
    )
    args = parser.parse_args(argv)
    if args.add:
        added = [json.loads(path.read_text()) for path in args.add]
        write_archive(
            {
                **(read_archive() if ARCHIVE.exists() else {}),
                **{name_of(each): each for each in added},
            }
        )
    stale = [
        (path, text)
        for path, text in generate()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path, text in stale:
        print(f"{path.relative_to(ROOT)} {'is not up to date' if args.check else 'written'}")
        if not args.check:
            path.write_text(text, encoding="utf-8")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

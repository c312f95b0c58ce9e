"""The generated part of docs/benchmarks/README.md: tables of present results, and the runs that
they are from.

Owns wording and layout alone: figures, and the choice of them, are `benchmarks.results`'.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.result import ENGINES, WORKLOADS, Result, factor, label_of, pairs

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def render_page(results: Sequence[Result]) -> str:
    """Return the generated Markdown, from results in the table's order."""
    compared = [each for each in results if each.record]
    runs = {
        name: number for number, name in enumerate(sorted({each.record for each in compared}), 1)
    }
    lines: list[str] = []
    for machine in sorted({each.machine for each in compared}, key=_order):
        lines += [
            "",
            f"### {machine}",
            "",
            *_machine_table([each for each in compared if each.machine == machine], runs),
        ]
    lines += [
        "",
        "### Other figures",
        "",
        *_other_table([each for each in results if not each.record]),
    ]
    lines += ["", "### Runs", "", *_runs_table(compared, runs)]
    return "\n".join(lines[1:]) + "\n"


def _order(machine: str) -> int:
    return next(
        (rank for rank, part in enumerate(("AVX-512 only", "AMX", "Cascade")) if part in machine), 9
    )


def _machine_table(results: Sequence[Result], runs: dict[str, int]) -> list[str]:
    rows: list[tuple[tuple[str, ...], str]] = []
    shown = set()
    for mine, theirs in pairs(results):
        shown.add((mine.model, mine.workload, mine.format))
        cells = [
            mine.model, WORKLOADS[mine.workload], label_of(mine), _measured(mine), _share(mine),
            label_of(theirs), _measured(theirs), f"{factor(mine, theirs):.2f}x", mine.rounds,
            str(runs[mine.record]),
        ]  # fmt: skip
        rows.append((_sort_key(mine, theirs.engine), f"| {' | '.join(cells)} |"))
    for each in results:
        if each.engine == "quire" and (each.model, each.workload, each.format) not in shown:
            cells = [
                each.model, WORKLOADS[each.workload], label_of(each), _measured(each), _share(each),
                "", "", "", each.rounds, str(runs[each.record]),
            ]  # fmt: skip
            rows.append((_sort_key(each, ""), f"| {' | '.join(cells)} |"))
    head = (
        "| model | workload | Quire | measured | of the limit | beside | measured | Quire is "
        "faster by | rounds | run |"
    )
    return [head, "|---|---|---|---|---|---|---|---|---|---|", *(line for _, line in sorted(rows))]


def _sort_key(result: Result, peer: str) -> tuple[str, ...]:
    models = ("Qwen3-0.6B", "Llama-3.2-1B", "SmolLM2-135M")
    model = str(models.index(result.model)) if result.model in models else result.model
    kind, number = result.workload[0], result.workload[1:]
    return model, {"W": "0", "B": "1"}.get(kind, "2"), number.rjust(3), result.format, peer


def _measured(result: Result) -> str:
    return f"{result.value} {result.unit}"


def _share(result: Result) -> str:
    return f"{float(result.share_of_limit):.0%}" if result.share_of_limit else ""


def _other_table(results: Sequence[Result]) -> list[str]:
    lines = [
        "| what | engine | value | model | machine | date, commit | command |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in results:
        where = f"{each.date}, {each.commit}"
        lines.append(
            f"| {each.workload} | {ENGINES[each.engine]} {each.format} | {each.value} "
            f"{each.unit} | {each.model} "
            f"| {each.machine} | {where} | `{each.command}` |"
        )
    return lines


def _runs_table(results: Sequence[Result], runs: dict[str, int]) -> list[str]:
    lines = ["| run | record | commit | command |", "|---|---|---|---|"]
    for name, number in runs.items():
        each = next(result for result in results if result.record == name)
        lines.append(f"| {number} | {name} | {each.commit} | `{each.command}` |")
    return lines

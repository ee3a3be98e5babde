"""The levers of `flint bench kernels` as tables, one a lever, each variant's reason below it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from engine.bench.levers import Outcome, Row
from engine.files.disk import human_bytes

REASON_INDENT = 2


def levers_report(outcome: Outcome) -> Group:
    """Everything: conditions, then lever by lever."""
    size, peak, read = outcome.size, outcome.peak, outcome.read
    facts = [
        f"{outcome.gpu}: {size.layers} MLPs of {size.hidden:,} x {size.inner:,} in int4, group 128: "
        f"{human_bytes(size.total_bytes)} of random weights a sweep",
        f"time: median of {outcome.rounds} sweeps in turn, by the GPU's events; where nothing else is said, each "
        "matrix is a launch in a CUDA graph",
        "below each table: what a variant was built to show, written before it was measured",
    ]
    if peak:
        facts.append(f"peak: {peak.gb_s:,.0f} GB/s, {peak.source}")
    if read:
        facts.append(f"read: {read.gb_s:,.0f} GB/s, the fastest streaming read below ({read.source})")
    parts: list[Text | Table | Padding] = [Text(fact) for fact in facts]
    for lever, rows in groupby(outcome.rows, key=lambda row: row.lever):
        parts += [Text(), *_lever(lever, list(rows), outcome)]
    return Group(*parts)


def _lever(lever: str, rows: list[Row], outcome: Outcome) -> Iterator[Text | Table | Padding]:
    unit = rows[0].unit
    with_bytes = any(row.bytes for row in rows)
    table = Table(title=f"{lever}, each {unit}", title_justify="left", title_style="bold", pad_edge=False)
    table.add_column("variant", overflow="fold")
    for heading in ("us", "±", *(("GB/s", "peak", "read") if with_bytes else ()), "speed", "verdict"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if row.samples:
            table.add_row(*_cells(row, outcome, with_bytes))
    yield table
    for row in rows:
        if row.problem:
            yield Padding(
                Text(f"{row.name}: {row.problem}", "red" if row.error is not None else "yellow"),
                (0, 0, 0, REASON_INDENT),
            )
        else:
            yield Padding(Text.assemble(f"{row.name}: ", (row.why, "dim")), (0, 0, 0, REASON_INDENT))


def _cells(row: Row, outcome: Outcome, with_bytes: bool) -> list[str]:
    summary, comparison, gb_s = row.summary, outcome.comparison(row), row.gb_s

    def share(of: float | None) -> str:
        return f"{gb_s / of:.0%}" if gb_s and of else ""

    cells = [row.name, f"{summary.median * 1e6:,.2f}", f"{summary.sd * 1e6:,.2f}"]
    if with_bytes:
        peak, read = outcome.peak, outcome.read
        cells += [f"{gb_s:,.0f}" if gb_s else "", share(peak and peak.gb_s), share(read and read.gb_s)]
    cells.append("" if comparison is None else f"x{comparison.ratio:.2f}")
    cells.append("base" if row.base else "" if comparison is None else comparison.verdict)
    return cells

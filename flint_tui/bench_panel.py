"""The quick benchmark as one Rich panel: what was decoded, how fast, and where that stands under the roof."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.bench.conditions import Conditions
from engine.errors import printable
from engine.files.disk import human_bytes
from engine.files.strict_json import Record
from engine.machine.hardware import Bandwidth
from engine.machine.roofline import intensity, token_rate
from flint_tui.bench_quick import BenchResult, BenchRow

if TYPE_CHECKING:
    from rich.panel import Panel


def quick_panel(result: BenchResult, where: Conditions) -> Panel:
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    for label, value in _facts(where):
        facts.add_row(label, Text(value))
    both = where.measured is not None and where.measured != where.peak
    rates = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    rates.add_column("", no_wrap=True)
    for heading in ("tok/s", "ttft", "tok/step", "MB/token", "GB/s", "MBU", *(["of measured"] if both else [])):
        rates.add_column(heading, justify="right", no_wrap=True)
    for row in result.rows:
        rates.add_row(*_cells(row, where)[: None if both else -1])
    roof = Text("\n".join(roofline_lines(result.rows, where)), style="dim")
    return Panel(Group(facts, Text(), rates, Text(), roof), title="flint bench quick", title_align="left")


def quick_json(result: BenchResult, where: Conditions) -> dict[str, Any]:
    """The panel's content. The names are stable."""
    measured = where.measured
    rows = [
        {
            "test": row.test,
            "samples_ts": list(row.samples),
            "avg_ts": row.mean,
            "stddev_ts": row.deviation,
            "ttft_s": row.ttft_s,
            "bytes_per_token": row.bytes_per_token,
            "bandwidth_gb_s": row.gb_s,
            "mbu": mbu(row, where.peak.gb_s if where.peak else None),
            "mbu_measured": mbu(row, measured.gb_s if measured else None),
            "acceptance_length": row.acceptance_length,
        }
        for row in result.rows
    ]
    return {"bench": "quick", "created": result.created, **where.to_json(), "rows": rows}


def quick_from_json(value: dict[str, Any], where: str) -> tuple[BenchResult, Conditions]:
    """What `quick_json` wrote. Raises CheckpointError."""
    record = Record(value, where)

    def words(key: str) -> str:
        return printable(record.text(key))

    def bandwidth(name: str) -> Bandwidth | None:
        if record.take(f"{name}_gb_s") is None:
            return None
        gb_s = Record(value, where).number(f"{name}_gb_s")
        return Bandwidth(gb_s, words(f"{name}_source")) if gb_s > 0 else record.fail(f"{name}_gb_s", "out of range")

    def count(source: Record, key: str) -> int:
        number = source.integer(key)
        return number if 0 <= number < 1 << 50 else source.fail(key, "out of range")

    ledger = record.record("ledger")
    entries = record.take("rows")
    if not isinstance(entries, list):
        record.fail("rows", "expected a list")
    conditions = Conditions(
        words("model"),
        words("variant"),
        max(1, count(record, "parameters")),
        words("backend"),
        words("device"),
        {printable(kind): count(ledger, kind) for kind in ledger.remaining()},
        count(record, "kv_bytes_per_position"),
        bandwidth("peak"),
        bandwidth("measured"),
    )
    rows = tuple(_row_from_json(Record(entry, f"{where}: rows")) for entry in entries)
    peak = conditions.peak
    created = record.number("created")
    result = BenchResult(
        created, conditions.model, conditions.description, peak and peak.gb_s, peak.source if peak else "", rows
    )
    return result, conditions


def _row_from_json(record: Record) -> BenchRow:
    def figure(key: str) -> float | None:
        value = record.take(key)
        if value is None:
            return None
        number = Record({key: value}, record.where).number(key)
        return number if 0 <= number < 1e15 else record.fail(key, "out of range")

    samples = record.numbers("samples_ts")
    if not samples or not all(0 < sample < 1e9 for sample in samples):
        record.fail("samples_ts", "expected rates above 0")
    bytes_per_token = figure("bytes_per_token")
    if bytes_per_token is not None and bytes_per_token <= 0:
        record.fail("bytes_per_token", "out of range")
    return BenchRow(
        printable(record.text("test")),
        samples,
        figure("ttft_s"),
        bytes_per_token,
        figure("bandwidth_gb_s"),
        figure("mbu"),
        figure("acceptance_length"),
    )


def archive_lines(value: Any, label: str = "") -> list[str]:
    """Any JSON value as "key.key: value" lines, harmless to a terminal."""
    if isinstance(value, dict):
        return [line for key, item in value.items() for line in archive_lines(item, f"{label}.{key}" if label else key)]
    if isinstance(value, list):
        value = ", ".join(str(item) for item in value)
    return [] if value is None else [printable(f"{label}: {value}")]


def mbu(row: BenchRow, gb_s: float | None) -> float | None:
    return row.gb_s / gb_s if row.gb_s and gb_s else None


def roofline_lines(rows: tuple[BenchRow, ...], where: Conditions) -> list[str]:
    """Where each decode row stands: its ceiling is bandwidth / bytes per token."""
    per_byte = intensity(max(where.step_bytes, 1) / where.parameters)
    lines = [f"roofline: {per_byte:.2f} FLOP per byte of weights, so memory is the limit"]
    for row in rows:
        if row.bytes_per_token and where.peak:
            ceiling = token_rate(where.peak.gb_s * 1e9, row.bytes_per_token)
            lines.append(f"  {row.test}: {row.mean:.1f} of at most {ceiling:.1f} tok/s, {row.mean / ceiling:.0%}")
    return lines


def _facts(where: Conditions) -> list[tuple[str, str]]:
    kinds = sorted(where.weight_bytes.items(), key=lambda item: -item[1])
    ledger = ", ".join(f"{kind} {human_bytes(size)}" for kind, size in kinds)
    facts = [
        ("device", where.description),
        ("model", f"{where.model} {where.variant}, {where.parameters / 1e6:,.1f} M weights"),
        ("bytes", f"{human_bytes(where.step_bytes)} of weights a pass: {ledger}"),
        ("", f"{human_bytes(where.kv_bytes)} of KV cache for each position before it"),
    ]
    if where.peak:
        facts.append(("peak", f"{where.peak.gb_s:.1f} GB/s, {where.peak.source}"))
    if where.measured and where.measured != where.peak:
        facts.append(("measured", f"{where.measured.gb_s:.1f} GB/s, {where.measured.source}"))
    return facts


def _cells(row: BenchRow, where: Conditions) -> tuple[str, ...]:
    peak, measured = where.peak, where.measured
    share = mbu(row, peak.gb_s if peak else None)
    of_measured = mbu(row, measured.gb_s if measured else None)

    def cell(value: float | None, form: str, scale: float = 1.0) -> str:
        return "" if value is None else format(value * scale, form)

    return (
        row.test,
        f"{row.mean:.1f} ± {row.deviation:.1f}",
        "" if row.ttft_s is None else f"{row.ttft_s * 1e3:,.0f} ms",
        cell(row.acceptance_length, ".2f"),
        cell(row.bytes_per_token, ".1f", 1e-6),
        cell(row.gb_s, ".2f"),
        cell(share, ".0%"),
        cell(of_measured, ".0%"),
    )

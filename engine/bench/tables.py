"""Benchmark rows as text: markdown, CSV, JSON and JSON lines. Keys are llama-bench's where it has them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from engine.bench.conditions import Conditions
from engine.bench.rows import Row
from engine.errors import UsageError

FORMATS = ("md", "csv", "json", "jsonl")


def row_json(row: Row, where: Conditions) -> dict[str, Any]:
    """One row with its conditions: everything a reader needs to judge it alone."""
    summary = row.summary
    peak, measured = where.peak, where.measured
    prefill = row.test.kind == "pp"
    return {
        "model": where.model,
        "variant": where.variant,
        "model_size": where.step_bytes,
        "model_n_params": where.parameters,
        "backend": where.backend,
        "device": where.description,
        "mode": row.mode,
        "test": row.test.name,
        "n_prompt": row.test.tokens if prefill else 0,
        "n_gen": 0 if prefill else row.test.tokens,
        "n_depth": row.test.depth,
        "avg_ts": summary.mean,
        "stddev_ts": summary.sd,
        "median_ts": summary.median,
        "samples_ts": list(row.samples),
        "samples_ns": [round(seconds * 1e9) for seconds in row.seconds],
        "bytes_per_token": row.bytes_per_token,
        "bandwidth_gb_s": row.gb_s,
        "mbu": row.gb_s / peak.gb_s if row.gb_s and peak else None,
        "mbu_measured": row.gb_s / measured.gb_s if row.gb_s and measured else None,
        "peak_gb_s": peak.gb_s if peak else None,
        "peak_source": peak.source if peak else None,
        "measured_gb_s": measured.gb_s if measured else None,
        "measured_source": measured.source if measured else None,
        "latency_p50_s": row.latencies[0] if row.latencies else None,
        "latency_p99_s": row.latencies[1] if row.latencies else None,
        "acceptance_length": row.acceptance_length,
    }


def render(rows: Sequence[Row], where: Conditions, kind: str) -> str:
    """The rows as one of FORMATS, ending in a newline."""
    objects = [row_json(row, where) for row in rows]
    match kind:
        case "json":
            return json.dumps(objects, indent=2) + "\n"
        case "jsonl":
            return "".join(json.dumps(value) + "\n" for value in objects)
        case "csv":
            return _csv(objects)
        case "md":
            return markdown(rows, where)
    raise UsageError(f"-o {kind[:30]!r} is not one of {', '.join(FORMATS)}")


def markdown(rows: Sequence[Row], where: Conditions) -> str:
    """llama-bench's columns, then what it leaves out: bytes a token and the share of the bandwidth."""
    table = [["model", "size", "params", "backend", "mode", "test", "t/s", "MB/token", "GB/s", "MBU"]]
    for row in rows:
        summary, mbu = row.summary, row_json(row, where)["mbu"]
        table.append(
            [
                f"{where.model} {where.variant}",
                f"{where.step_bytes / 2**20:.2f} MiB",
                f"{where.parameters / 1e6:.2f} M",
                where.description,
                row.mode,
                row.test.name,
                f"{summary.mean:.2f} ± {summary.sd:.2f}",
                "" if row.bytes_per_token is None else f"{row.bytes_per_token / 1e6:.2f}",
                "" if row.gb_s is None else f"{row.gb_s:.2f}",
                "" if mbu is None else f"{mbu:.1%}",
            ]
        )
    return table_markdown(table, right_from=6) + "\n" + bandwidth_lines(where)


def table_markdown(table: Sequence[Sequence[str]], right_from: int) -> str:
    """Columns padded to their widest cell; from `right_from` on they are figures, set flush right."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = []
    for index, row in enumerate(table):
        cells = [
            cell.rjust(width) if i >= right_from else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("| " + " | ".join(cells) + " |")
        if index == 0:
            marks = [
                "-" * (width + 1) + ":" if i >= right_from else "-" * (width + 2) for i, width in enumerate(widths)
            ]
            lines.append("|" + "|".join(marks) + "|")
    return "\n".join(lines) + "\n"


def bandwidth_lines(where: Conditions) -> str:
    """What 100 % MBU stands for, and what was measured here."""
    lines = []
    if where.peak is not None:
        lines.append(f"MBU against {where.peak.gb_s:.1f} GB/s: {where.peak.source}.")
    if where.measured is not None and where.measured != where.peak:
        lines.append(f"Measured beside it: {where.measured.gb_s:.1f} GB/s, {where.measured.source}.")
    return "".join(line + "\n" for line in lines)


def _csv(objects: Sequence[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(objects[0])
    for value in objects:
        writer.writerow(
            ";".join(map(str, cell)) if isinstance(cell, list) else "" if cell is None else cell
            for cell in value.values()
        )
    return out.getvalue()

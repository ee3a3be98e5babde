"""`flint bench compare` as markdown: a row for every arm, those that are missing or wrong with their reason."""

from __future__ import annotations

from engine.bench.compare import Outcome, Result
from engine.bench.tables import table_markdown
from engine.statistics import ROUNDS, summarise

COLUMNS = ("arm", "tok/s", "prefill tok/s", "MB/token", "bytes", "GB/s", "MBU", "speed", "95 % interval", "verdict")


def comparison_markdown(outcome: Outcome) -> str:
    """ "bytes" and "speed" are the base's divided by the row's arm's."""
    base = next((result for result in outcome.results if result.arm.name == outcome.base), None)
    table = [list(COLUMNS)]
    table += [_cells(result, outcome, base) for result in outcome.measured()]
    lines = [table_markdown(table, right_from=1)] if len(table) > 1 else ["No arm was measured.\n"]
    if outcome.stopped_of:
        lines.append(f"STOPPED after {outcome.rounds} of {outcome.stopped_of} rounds; these are what had ended.")
    if base is not None:
        lines.append(
            f"bytes, speed, verdict: {base.arm.name} against the arm of the row. {_equal_bytes(outcome, base)}"
        )
        if outcome.rounds < ROUNDS:
            lines.append(f"No verdict: {outcome.rounds} rounds are fewer than {ROUNDS}.")
    for place in sorted({result.place for result in outcome.measured()} & set(outcome.peaks)):
        peak = outcome.peaks[place]
        lines.append(f"MBU on the {place.upper()} against {peak.gb_s:.1f} GB/s: {peak.source}.")
    for result in outcome.measured():
        lines.append(f"{result.arm.name}: {result.device}; {_gate(result)}{_note(result)}")
    for result in outcome.results:
        if result.state != "measured":
            lines.append(f"{result.arm.name}: {result.state.upper()}, {result.problem}")
    return "\n".join(lines) + "\n"


def _cells(result: Result, outcome: Outcome, base: Result | None) -> list[str]:
    summary, comparison = summarise(result.samples), outcome.comparison(result)
    peak = outcome.peaks.get(result.place)
    moved = result.bytes_per_token
    gb_s = summary.mean * moved / 1e9 if moved else None
    ratio = base.bytes_per_token / moved if base and base.bytes_per_token and moved else None
    prefill = summarise(result.prefill).mean if result.prefill else None
    return [
        result.arm.name,
        f"{summary.mean:.2f} ± {summary.sd:.2f}",
        "" if prefill is None else f"{prefill:.1f}",
        "" if not moved else f"{moved / 1e6:.2f}",
        "" if ratio is None else f"x{ratio:.2f}",
        "" if gb_s is None else f"{gb_s:.2f}",
        "" if gb_s is None or peak is None else f"{gb_s / peak.gb_s:.0%}",
        "" if comparison is None else f"x{comparison.ratio:.2f}",
        "" if comparison is None else f"{comparison.low:.2f} to {comparison.high:.2f}",
        "base" if result is base else "" if comparison is None else comparison.verdict,
    ]


def _equal_bytes(outcome: Outcome, base: Result) -> str:
    """Which arms read as much as the base, so that their difference is the runtime's and not the quantisation's."""
    same = [
        result.arm.name
        for result in outcome.measured()
        if result is not base
        and result.bytes_per_token
        and base.bytes_per_token
        and abs(base.bytes_per_token / result.bytes_per_token - 1) < 0.05
    ]
    return f"Equal bytes within 5 %: {', '.join(same) or 'none'}."


def _gate(result: Result) -> str:
    return f"correct: {result.gate}" if result.gate else "correctness not checked"


def _note(result: Result) -> str:
    return f"; {result.arm.note}" if result.arm.note else ""

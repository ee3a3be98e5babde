"""The quick benchmark of the app: prefill, single pass and speculative decoding through the same replies a chat makes.

A runner is any function (engine, cancel) -> iterator of BenchProgress and BenchRow; the bench screen shows whatever one
yields, so a larger benchmark plugs in here. Included in a rate: sampling, detokenising, and nothing of the screen.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.errors import BackendError
from engine.events import Finished, Usage
from engine.files.paths import data_dir
from engine.sampling import Sampling
from flint_tui.engine_door import ChatEngine, TurnOptions
from flint_tui.live import EngineFacts, Mode

PREFILL_WORDS = 220
DECODE_TOKENS = 96
PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, then a test for it.",
    "Count from one to forty in words, separated by commas.",
)


@dataclass(frozen=True)
class BenchProgress:
    """What is being measured; done of total runs."""

    text: str
    done: int
    total: int


@dataclass(frozen=True)
class BenchRow:
    """One test. samples: tokens per second of each run. The rest are means over the runs; None where it has no meaning.

    bytes_per_token: memory traffic by the ledger. gb_s: what the runs achieved. mbu: its share of the peak, 0..1.
    """

    test: str
    samples: tuple[float, ...]
    ttft_s: float | None = None
    bytes_per_token: float | None = None
    gb_s: float | None = None
    mbu: float | None = None
    acceptance_length: float | None = None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.samples)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.samples) if len(self.samples) > 1 else 0.0


def quick_bench(engine: ChatEngine, cancel: threading.Event) -> Iterator[BenchProgress | BenchRow]:
    """Three prompts, each decoded in both modes one after the other (A B A B A B), after a warm-up that is not counted.

    Ends early when cancelled. Raises BackendError when a run fails or decodes nothing.
    """
    both = engine.facts.verify_width > 1
    modes: tuple[Mode, ...] = ("single", "speculative") if both else ("single",)
    total = len(PROMPTS) * (1 + len(modes)) + 1
    yield BenchProgress("warm-up", 0, total)
    _reply(engine, cancel, PROMPTS[0], "single", 16)
    done = 1
    prefill: list[Usage] = []
    for run in range(len(PROMPTS)):
        if cancel.is_set():
            return
        yield BenchProgress("prefill", done, total)
        # The first word differs, so that nothing but the template's head can come from the KV cache.
        text = f"{run} {time.time_ns() % 10**6} " + " ".join(f"word{i % 97}" for i in range(PREFILL_WORDS))
        prefill.append(_reply(engine, cancel, text, "single", 1))
        done += 1
    if cancel.is_set():
        return
    yield _prefill_row(prefill)
    decode: dict[Mode, list[Usage]] = {mode: [] for mode in modes}
    for prompt in PROMPTS:
        for mode in modes:
            if cancel.is_set():
                return
            yield BenchProgress("single pass" if mode == "single" else mode, done, total)
            decode[mode].append(_reply(engine, cancel, prompt, mode, DECODE_TOKENS))
            done += 1
    if cancel.is_set():
        return
    for mode in modes:
        yield _decode_row("single pass" if mode == "single" else mode, decode[mode], engine.facts)
    yield BenchProgress("done", total, total)


def _reply(engine: ChatEngine, cancel: threading.Event, prompt: str, mode: Mode, max_tokens: int) -> Usage:
    options = TurnOptions(mode=mode, sampling=Sampling(temperature=0.0), max_tokens=max_tokens)
    usage = None
    for event in engine.reply([{"role": "user", "content": prompt}], options, cancel):
        if isinstance(event, Finished):
            if event.reason == "error":
                raise BackendError(event.error, event.hint)
            usage = event.usage
    if usage is None:
        raise BackendError("The decoder stopped without saying why")
    return usage


def _prefill_row(runs: Sequence[Usage]) -> BenchRow:
    rates = tuple(rate for usage in runs if (rate := usage.prefill_tok_s))
    if not rates:
        raise BackendError("The prefill took no measurable time")
    tokens = round(statistics.fmean(usage.prompt_tokens - usage.cached_tokens for usage in runs))
    return BenchRow(f"prefill {tokens}", rates, ttft_s=statistics.fmean(usage.ttft_s for usage in runs))


def _decode_row(test: str, runs: Sequence[Usage], facts: EngineFacts) -> BenchRow:
    rates = tuple(rate for usage in runs if (rate := usage.decode_tok_s))
    if not rates:
        raise BackendError(f"{test}: the model ended every reply at once, so there is nothing to measure")
    seconds = sum(usage.decode_s for usage in runs)
    moved = sum(usage.decode_bytes for usage in runs)
    tokens = sum(max(0, usage.completion_tokens - 1) for usage in runs)
    gb_s = moved / seconds / 1e9 if moved and seconds else None
    verify_steps = sum(usage.verify_steps for usage in runs)
    return BenchRow(
        test,
        rates,
        ttft_s=statistics.fmean(usage.ttft_s for usage in runs),
        bytes_per_token=moved / tokens if moved and tokens else None,
        gb_s=gb_s,
        mbu=gb_s / facts.peak_gb_s if gb_s and facts.peak_gb_s else None,
        acceptance_length=1 + sum(usage.accepted for usage in runs) / verify_steps if verify_steps else None,
    )


# -- kept results


@dataclass(frozen=True)
class BenchResult:
    """One finished benchmark and its conditions. created: seconds since 1970."""

    created: float
    model: str
    backend: str
    peak_gb_s: float | None
    peak_source: str
    rows: tuple[BenchRow, ...]


class BenchStore:
    """Finished results, one JSON line each, in the data directory."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path if path is not None else data_dir() / "bench.jsonl"

    def add(self, result: BenchResult) -> None:
        """Append; raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def all(self) -> list[BenchResult]:
        """Oldest first; a line that was cut off by a crash is left out."""
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        results = []
        for line in lines:
            try:
                raw = json.loads(line)
                rows = tuple(BenchRow(**{**row, "samples": tuple(row["samples"])}) for row in raw.pop("rows"))
                results.append(BenchResult(rows=rows, **raw))
            except (ValueError, TypeError, KeyError):
                continue
        return results


def export_text(result: BenchResult, kind: str) -> str:
    """A result as "json", "csv" or "md"; the columns are those of llama-bench where it has them."""
    if kind == "json":
        return json.dumps(asdict(result), indent=2) + "\n"
    header = ("model", "backend", "test", "t/s", "sd", "ms first token", "MB/token", "GB/s", "MBU %", "tok/step")
    table = [header, *(_cells(result, row) for row in result.rows)]
    if kind == "csv":
        return "".join(",".join(f'"{cell}"' if "," in cell else cell for cell in cells) + "\n" for cells in table)
    lines = ["| " + " | ".join(cells) + " |" for cells in table]
    lines.insert(1, "|" + "---|" * len(header))
    peak = f"\nPeak: {result.peak_gb_s:.1f} GB/s, {result.peak_source}.\n" if result.peak_gb_s else ""
    return "\n".join(lines) + "\n" + peak


def _cells(result: BenchResult, row: BenchRow) -> tuple[str, ...]:
    def cell(value: float | None, digits: int, scale: float = 1.0) -> str:
        return "" if value is None else f"{value * scale:.{digits}f}"

    return (
        result.model,
        result.backend,
        row.test,
        f"{row.mean:.2f}",
        f"{row.deviation:.2f}",
        cell(row.ttft_s, 1, 1e3),
        cell(row.bytes_per_token, 2, 1e-6),
        cell(row.gb_s, 2),
        cell(row.mbu, 1, 100),
        cell(row.acceptance_length, 2),
    )

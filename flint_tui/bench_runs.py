"""What `flint bench quick`, `compare` and `reproduce` run: the same measurements, whoever shows them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.bench import arms as contestants
from engine.bench.compare import Outcome, run
from engine.bench.conditions import Conditions, conditions
from engine.bench.gguf_peer import find_gguf, gguf_bytes_per_token
from engine.bench.workload import prompt_ids
from engine.errors import BackendError, Cancelled, UsageError
from engine.machine.hardware import gpu_bandwidth, streaming_bandwidth
from engine.packed.model import PackedModel
from engine.text.tokenizer import Tokenizer
from flint_tui.bench_quick import BenchResult, BenchRow, BenchStore, quick_bench
from flint_tui.engine_door import OpenedEngine
from kernels.cpu.threads import default_threads

if TYPE_CHECKING:
    from engine.loading import Engine

SPARE = 16  # positions behind the last token of a comparison: a verify step may reach beyond it

Say = Callable[[str], None]


def run_quick(
    engine: Engine, cancel: threading.Event, say: Say, single: bool = False, done: Say = lambda text: None
) -> tuple[BenchResult, Conditions]:
    """The app's quick benchmark on an opened engine, kept where the app keeps its own.

    say: told what runs. done: told what each test came to."""
    opened = OpenedEngine(engine)
    if single:
        opened.facts = replace(opened.facts, verify_width=1)
    rows: list[BenchRow] = []
    complete = False
    for event in quick_bench(opened, cancel):
        if isinstance(event, BenchRow):
            rows.append(event)
            done(f"{event.test}: {event.mean:.1f} tok/s")
        else:
            complete = event.done == event.total
            say(f"{event.text}  {event.done}/{event.total}")
    if not complete:
        raise Cancelled("The benchmark was stopped")
    where = conditions(engine, max((row.gb_s or 0.0 for row in rows), default=0.0))
    peak = where.peak
    result = BenchResult(
        time.time(),
        where.model,
        where.description,
        peak.gb_s if peak else None,
        peak.source if peak else "",
        tuple(rows),
    )
    with contextlib.suppress(OSError):  # a data folder that cannot be written costs the history, not the result
        BenchStore().add(result)
    return result, where


@dataclass(frozen=True)
class Contest:
    """A comparison that can begin. gguf: what llama.cpp and transformers are given."""

    packed: PackedModel
    arms: list[contestants.Arm]
    gguf: Path | None
    request: dict[str, Any]


def prepare_compare(
    packed: PackedModel,
    names: list[str] | None,
    prompt_tokens: int,
    tokens: int,
    gguf: Path | None,
    llama_python: str | None,
    threads: int | None,
) -> Contest:
    """Everything that can be wrong with what was asked for, before the minutes that a comparison takes. Raises
    UsageError."""
    trained = packed.config.max_position_embeddings
    if prompt_tokens + tokens + SPARE > trained:
        raise UsageError(
            f"-p {prompt_tokens} and -n {tokens} are more than the {trained} positions of {packed.manifest.name}",
            f"{SPARE} are kept free; take less of one",
        )
    path, problem = find_gguf(packed, gguf)
    taking_part = contestants.find_arms(names, path, problem, llama_python)
    request = {
        "prompt": prompt_ids(Tokenizer.from_packed(packed), prompt_tokens),
        "tokens": tokens,
        "threads": threads or default_threads(),
        "context": prompt_tokens + tokens + SPARE,
        "gpu": _gpu() is not None,
        "model": str(packed.directory),
        "gguf": str(path) if path else None,
    }
    return Contest(packed, taking_part, path, request)


def run_compare(contest: Contest, against: str | None, rounds: int, say: Say, note: Say, answered: Say) -> Outcome:
    """A comparison on the machine as it is. say, note, answered: the listeners of engine.bench.compare.run."""
    request, gpu = contest.request, _gpu()

    def weights(arm: contestants.Arm) -> float | None:
        if arm.name != "llama.cpp" or contest.gguf is None:
            return None
        middle = len(request["prompt"]) + request["tokens"] / 2
        return gguf_bytes_per_token(contest.gguf, contest.packed.config, middle)

    outcome = run(contest.arms, request, rounds, contestants.launch, against, weights, say, note, answered)
    on_cpu = [result for result in outcome.measured() if result.place == "cpu"]
    if on_cpu:
        rates = [(result.bytes_per_token or 0.0) * max(result.samples) / 1e9 for result in on_cpu]
        outcome.peaks["cpu"] = streaming_bandwidth(max(rates))
    peak = gpu_bandwidth(gpu) if gpu is not None else None
    if peak is not None:
        outcome.peaks["gpu"] = peak
    return outcome


def _gpu() -> Any:
    from engine.backends.cuda import find_gpu

    try:
        return find_gpu()
    except BackendError:
        return None

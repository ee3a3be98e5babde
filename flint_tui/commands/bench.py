"""`flint bench`: how fast this machine decodes, with the bytes and the bandwidth beside every tok/s.

stdout carries the result, stderr what is being measured.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from flint_tui.commands.chat import BackendChoice, DrafterChoice, Mode

if TYPE_CHECKING:
    from engine.loading import Engine


class BenchGroup(typer.core.TyperGroup):
    """`flint bench` and `flint bench MODEL` mean `flint bench quick ...`."""

    def parse_args(self, ctx, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["quick", *args]
        return super().parse_args(ctx, args)


bench = typer.Typer(
    cls=BenchGroup, help="Measure prefill and decoding; bytes and bandwidth stand beside every figure. Default: quick."
)


def register(app: typer.Typer) -> None:
    app.add_typer(bench, name="bench")


class QuickMode(StrEnum):
    both = "both"
    single = "single"


class Format(StrEnum):
    md = "md"
    csv = "csv"
    json = "json"
    jsonl = "jsonl"


Model = Annotated[
    str | None, typer.Argument(help="A packed model, a directory or a GGUF file. Default: the newest that runs well.")
]
Backend = Annotated[BackendChoice, typer.Option(help="Where to decode.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of the cpu and torch backends.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


@bench.command()
def quick(
    model: Model = None,
    backend: Backend = BackendChoice.auto,
    threads: Threads = None,
    mode: Annotated[QuickMode, typer.Option(help="Both modes, or single pass alone.")] = QuickMode.both,
    as_json: AsJson = False,
) -> None:
    """Prefill, single pass and speculation in under a minute: the benchmark of the app's bench screen."""
    import json
    import threading

    from flint_tui.bench_panel import quick_json, quick_panel

    busy = _say_if_busy()
    engine = _open(model, backend.value, threads)
    try:
        result, where = run_quick(engine, threading.Event(), single=mode is QuickMode.single)
    finally:
        engine.close()
    if as_json:
        typer.echo(json.dumps(quick_json(result, where) | {"note": busy}, indent=2))
        return
    from rich.console import Console

    Console().print(quick_panel(result, where))


def run_quick(engine: Engine, cancel, single: bool = False) -> tuple[Any, Any]:
    """(BenchResult, Conditions) of the app's quick benchmark on an opened engine; kept where the app keeps its own."""
    import contextlib
    import time
    from dataclasses import replace

    from engine.bench.conditions import conditions
    from engine.errors import Cancelled
    from flint_tui.bench_quick import BenchResult, BenchRow, BenchStore, quick_bench
    from flint_tui.engine_door import OpenedEngine

    opened = OpenedEngine(engine)
    if single:
        opened.facts = replace(opened.facts, verify_width=1)
    rows: list[BenchRow] = []
    complete = False
    with _status() as say:
        for event in quick_bench(opened, cancel):
            if isinstance(event, BenchRow):
                rows.append(event)
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


@bench.command()
def decode(
    model: Model = None,
    prompt: Annotated[str, typer.Option("-p", "--n-prompt", help="Prompt tokens, also a list; 0: no prefill.")] = "512",
    generate: Annotated[
        str, typer.Option("-n", "--n-gen", help="Generated tokens, also a list; 0: no decoding.")
    ] = "128",
    depth: Annotated[str, typer.Option("-d", "--n-depth", help="Tokens in the KV cache before; also a list.")] = "0",
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", min=1, max=1000)] = 5,
    backend: Backend = BackendChoice.auto,
    threads: Threads = None,
    mode: Annotated[Mode, typer.Option(help="One token per pass, or draft several and verify them.")] = Mode.single,
    drafter: Annotated[DrafterChoice, typer.Option(help="Who drafts.")] = DrafterChoice.auto,
    output: Annotated[
        Format, typer.Option("-o", "--output", help="Every format but md keeps the samples.")
    ] = Format.md,
    as_json: AsJson = False,
) -> None:
    """Rows as llama-bench prints them (pp512, tg128): tok/s as mean and standard deviation, bytes a token, MBU.

    Included: greedy sampling and detokenising. The first token belongs to the prefill; the text is flint's own.
    """
    from engine.bench.conditions import conditions
    from engine.bench.rows import parse_counts, plan, run
    from engine.bench.tables import render

    tests = plan(
        parse_counts(prompt, "-p", zero=True),
        parse_counts(generate, "-n", zero=True),
        parse_counts(depth, "-d", zero=True),
    )
    _say_if_busy()
    engine = _open(model, backend.value, threads)
    try:
        with _status() as say:
            rows = list(run(engine, tests, repetitions, mode.value, drafter.value, watch=say))
        where = conditions(engine, max((row.gb_s or 0.0 for row in rows), default=0.0))
    finally:
        engine.close()
    typer.echo(render(rows, where, "json" if as_json else output.value), nl=False)


# --- what the commands share ------------------------------------------------------------------------------------------


def _open(model: str | None, backend: str, threads: int | None) -> Engine:
    from engine.loading import open_engine
    from flint_tui.pack_progress import show_progress

    with show_progress() as report:
        return open_engine(model, backend, threads, notify=_note, progress=report)


def _note(line: str) -> None:
    typer.echo(f"flint: {line}", err=True)


def _say_if_busy() -> str | None:
    from engine.bench.conditions import busy_note

    note = busy_note()
    if note:
        _note(note)
    return note


def _status():
    """A context manager yielding say(text): a spinner on a terminal's stderr, nothing otherwise."""
    from contextlib import contextmanager

    from rich.console import Console

    @contextmanager
    def shown():
        console = Console(stderr=True)
        if not console.is_terminal:
            yield lambda text: None
            return
        with console.status("") as status:
            yield lambda text: status.update(text)

    return shown()

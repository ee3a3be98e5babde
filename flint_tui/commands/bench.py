"""`flint bench`: how fast this machine decodes, with the bytes and the bandwidth beside every tok/s.

stdout carries the result, stderr what is being measured.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
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


@bench.command()
def compare(
    model: Model = None,
    arms: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Who takes part. Default: all; those missing here are named.")
    ] = None,
    against: Annotated[str | None, typer.Option(metavar="ARM", help="Who is compared with the others.")] = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="5 for a verdict, 10 for a claim.")] = 5,
    prompt: Annotated[int, typer.Option("-p", "--n-prompt", min=16, help="Prompt tokens.")] = 128,
    generate: Annotated[int, typer.Option("-n", "--n-gen", min=8, help="Generated tokens.")] = 64,
    gguf: Annotated[
        Path | None, typer.Option(help="The GGUF that the model was packed from, for llama.cpp and transformers.")
    ] = None,
    llama_python: Annotated[
        str | None, typer.Option(metavar="PATH", help="A Python that can import llama_cpp.")
    ] = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Arms side by side in fresh processes, A B A B: correct before timed, with intervals and the bytes of each.

    Arms: cuda-single, cuda-speculative, cpu-single, cpu-speculative, torch-single, torch-int4-graph,
    torch-int4-compile, transformers, llama.cpp.
    """
    import json

    from engine.bench.compare import outcome_json
    from engine.bench.compare_table import comparison_markdown

    busy = _say_if_busy()
    with _status() as say:
        outcome, peak = run_compare(
            model,
            arms.split(",") if arms else None,
            against,
            rounds,
            prompt,
            generate,
            gguf,
            llama_python,
            threads,
            say,
        )
    if as_json:
        from engine.bench.conditions import bandwidth_json

        typer.echo(json.dumps(outcome_json(outcome) | bandwidth_json(peak, None) | {"note": busy}, indent=2))
    else:
        typer.echo(comparison_markdown(outcome, peak), nl=False)
    if not outcome.measured():
        raise typer.Exit(1)


def run_compare(
    model: str | None,
    names: list[str] | None,
    against: str | None,
    rounds: int,
    prompt_tokens: int,
    tokens: int,
    gguf: Path | None,
    llama_python: str | None,
    threads: int | None,
    say,
) -> tuple[Any, Any]:
    """(Outcome, Bandwidth or None) of a comparison on the machine as it is."""
    from engine.bench import arms as contestants
    from engine.bench.compare import run
    from engine.bench.gguf_peer import find_gguf, gguf_bytes_per_token
    from engine.bench.workload import prompt_ids
    from engine.hardware import gpu_bandwidth, streaming_bandwidth
    from engine.loading import open_model
    from engine.tokenizer import Tokenizer
    from kernels.cpu.threads import default_threads

    packed = open_model(model, notify=_note)
    if gguf is None and model is not None and model.lower().endswith(".gguf"):
        gguf = Path(model)
    path, problem = find_gguf(packed, gguf)
    gpu = _gpu()
    taking_part = contestants.find_arms(names, path, problem, llama_python)
    request = {
        "prompt": prompt_ids(Tokenizer.from_packed(packed), prompt_tokens),
        "tokens": tokens,
        "threads": threads or default_threads(),
        "context": prompt_tokens + tokens + 16,
        "gpu": gpu is not None,
        "model": str(packed.directory),
        "gguf": str(path) if path else None,
    }

    def weights(arm) -> float | None:
        if arm.name != "llama.cpp" or path is None:
            return None
        return gguf_bytes_per_token(path, packed.config, prompt_tokens + tokens / 2)

    outcome = run(taking_part, request, rounds, contestants.launch, against, weights, say)
    if gpu is not None:
        return outcome, gpu_bandwidth(gpu)
    seen = [
        result.bytes_per_token * max(result.samples) / 1e9 for result in outcome.measured() if result.bytes_per_token
    ]
    return outcome, streaming_bandwidth(max(seen, default=0.0))


@bench.command()
def reproduce(
    model: Model = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Default: flint-bench-DATE.zip, here.")] = None,
    arms: Annotated[str | None, typer.Option(metavar="A,B,...", help="As in compare.")] = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="10 for a claim.")] = 10,
    prompt: Annotated[int, typer.Option("-p", "--n-prompt", min=16)] = 128,
    generate: Annotated[int, typer.Option("-n", "--n-gen", min=8)] = 64,
    gguf: Annotated[Path | None, typer.Option(help="As in compare.")] = None,
    llama_python: Annotated[str | None, typer.Option(metavar="PATH", help="As in compare.")] = None,
    backend: Backend = BackendChoice.auto,
    threads: Threads = None,
) -> None:
    """Run quick and compare, capture the environment, and pack everything into one archive for others to check.

    User names, host names, paths, addresses and serial numbers are taken out; processes are never listed.
    `flint bench show` prints what is left.
    """
    import threading
    import time

    from engine.bench.archive import FORMAT_VERSION, write
    from engine.bench.compare import outcome_json
    from engine.bench.conditions import bandwidth_json, utc_now
    from engine.bench.environment import environment
    from engine.errors import ArchiveError
    from engine.machine import inspect
    from flint_tui.bench_panel import quick_json

    path = output or Path(f"flint-bench-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.zip")
    if path.exists():  # known before the minutes that follow
        raise ArchiveError(f"{path} exists already", "Give another name with -o.")
    busy = _say_if_busy()
    machine = environment(inspect(_note))
    engine = _open(model, backend.value, threads)
    try:
        result, where = run_quick(engine, threading.Event())
    finally:
        engine.close()
    names = arms.split(",") if arms else None
    with _status() as say:
        outcome, peak = run_compare(model, names, None, rounds, prompt, generate, gguf, llama_python, threads, say)
    command = f"flint bench reproduce --rounds {rounds} -p {prompt} -n {generate} --backend {backend.value}"
    manifest = {
        "format_version": FORMAT_VERSION,
        "flint": machine["flint"],
        "commit": machine["commit"],
        "created": utc_now(),
        "command": command + (f" --arms {arms}" if arms else "") + (f" --threads {threads}" if threads else ""),
        "note": busy,
    }
    comparison = outcome_json(outcome) | bandwidth_json(peak, None)
    write(
        path,
        {"manifest": manifest, "environment": machine, "quick": quick_json(result, where), "compare": comparison},
    )
    typer.echo(str(path))


@bench.command()
def show(
    archive: Annotated[Path, typer.Argument(help="What `flint bench reproduce` wrote.")], as_json: AsJson = False
) -> None:
    """Print an archive. Its statistics are computed again from its samples."""
    import json

    from engine.bench.archive import read
    from engine.bench.compare import outcome_from_json
    from engine.bench.compare_table import comparison_markdown
    from engine.errors import ArchiveError, CheckpointError
    from engine.hardware import Bandwidth
    from flint_tui.bench_panel import archive_lines, quick_from_json, quick_panel

    parts = read(archive)
    try:
        quick = quick_from_json(parts["quick"], f"{archive.name}: quick.json")
        outcome = outcome_from_json(parts["compare"], f"{archive.name}: compare.json")
    except CheckpointError as error:
        raise ArchiveError(str(error)) from None
    if as_json:
        typer.echo(json.dumps(parts, indent=2))
        return
    from rich.console import Console

    for name in ("manifest", "environment"):
        for line in archive_lines(parts[name]):
            typer.echo(line)
        typer.echo()
    Console().print(quick_panel(*quick))
    peak = quick[1].peak
    typer.echo(comparison_markdown(outcome, Bandwidth(peak.gb_s, peak.source) if peak else None), nl=False)


# --- what the commands share ------------------------------------------------------------------------------------------


def _open(model: str | None, backend: str, threads: int | None) -> Engine:
    from engine.loading import open_engine
    from flint_tui.pack_progress import show_progress

    with show_progress() as report:
        return open_engine(model, backend, threads, notify=_note, progress=report)


def _gpu():
    from engine.backends.cuda import find_gpu
    from engine.errors import BackendError

    try:
        return find_gpu()
    except BackendError:
        return None


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

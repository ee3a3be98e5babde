"""`flint bench`: how fast this machine decodes, with the bytes and the bandwidth beside every tok/s.

stdout carries the result, stderr what is being measured.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import typer.core

from flint_tui.commands.chat import BackendChoice, DrafterChoice, Mode

if TYPE_CHECKING:
    from engine.loading import Engine


INTERRUPTED = 130  # Ctrl-C or SIGTERM, with what had been measured by then


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
    from flint_tui.commands.bench_kernels import kernels
    from flint_tui.commands.bench_spec import spec

    bench.command()(spec)
    bench.command()(kernels)
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
    from flint_tui.bench_runs import run_quick

    busy = say_if_busy()
    engine = open_shown(model, backend.value, threads)
    try:
        with status() as say:
            result, where = run_quick(engine, threading.Event(), say, single=mode is QuickMode.single)
    finally:
        engine.close()
    if as_json:
        typer.echo(json.dumps(quick_json(result, where) | {"note": busy}, indent=2))
        return
    from rich.console import Console

    Console().print(quick_panel(result, where))


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
    say_if_busy()
    engine = open_shown(model, backend.value, threads)
    try:
        with status() as say:
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

    Ctrl-C prints the rounds that have ended.

    Arms: cuda-single, cuda-speculative, cpu-single, cpu-speculative, torch-single, torch-int4-graph,
    torch-int4-compile, transformers, llama.cpp.
    """
    import json

    from engine.bench.compare import outcome_json
    from engine.bench.compare_table import comparison_markdown
    from engine.errors import UsageError
    from engine.loading import open_model
    from flint_tui.bench_runs import prepare_compare, run_compare

    busy = say_if_busy()
    names = arms.split(",") if arms else None
    contest = prepare_compare(
        open_model(model, notify=note), names, prompt, generate, gguf or named_gguf(model), llama_python, threads
    )
    taking_part = [arm.name for arm in contest.arms]
    if against is not None and against not in taking_part:
        raise UsageError(f"--against {against}: no such arm takes part", f"Use one of {', '.join(taking_part)}.")
    with status() as say, stoppable():
        outcome = run_compare(contest, against, rounds, say, note, plain)
    if as_json:
        typer.echo(json.dumps(outcome_json(outcome) | {"note": busy}, indent=2))
    else:
        typer.echo(comparison_markdown(outcome), nl=False)
    if outcome.stopped_of:
        raise typer.Exit(INTERRUPTED)
    if not outcome.measured():
        raise typer.Exit(1)


@bench.command()
def reproduce(
    model: Model = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Default: flint-bench-DATE.zip, here.")] = None,
    arms: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="As in compare. Default: flint on --backend, and who else runs there."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="10 for a claim.")] = 10,
    prompt: Annotated[int, typer.Option("-p", "--n-prompt", min=16)] = 128,
    generate: Annotated[int, typer.Option("-n", "--n-gen", min=8)] = 64,
    gguf: Annotated[Path | None, typer.Option(help="As in compare.")] = None,
    llama_python: Annotated[str | None, typer.Option(metavar="PATH", help="As in compare.")] = None,
    backend: Backend = BackendChoice.auto,
    threads: Threads = None,
) -> None:
    """Run quick and compare, capture the environment, and pack everything into one archive for others to check.

    Every arm starts a process in every round, which takes seconds to minutes each; how long the rest will take is said
    after every answer. Ctrl-C packs the rounds that have ended.

    User names, host names, paths, addresses and serial numbers are taken out; processes are never listed.
    `flint bench show` prints what is left.
    """
    import threading
    import time

    from engine.bench.archive import FORMAT_VERSION, require_new, write
    from engine.bench.arms import NAMES, OF_BACKEND
    from engine.bench.compare import outcome_json
    from engine.bench.conditions import utc_now
    from engine.bench.environment import environment
    from engine.machine.capabilities import inspect
    from flint_tui.bench_panel import quick_json
    from flint_tui.bench_runs import prepare_compare, run_compare, run_quick

    path = output or Path(f"flint-bench-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.zip")
    require_new(path)  # known before the minutes that follow
    busy = say_if_busy()
    machine = environment(inspect(note))
    engine = open_shown(model, backend.value, threads)
    names = arms.split(",") if arms else list(OF_BACKEND.get(engine.backend.name, NAMES))
    try:
        contest = prepare_compare(
            engine.model, names, prompt, generate, gguf or named_gguf(model), llama_python, threads
        )
        with status() as say:
            result, where = run_quick(engine, threading.Event(), say, done=plain)
    finally:
        engine.close()
    with status() as say, stoppable():
        outcome = run_compare(contest, None, rounds, say, note, plain)
    command = f"flint bench reproduce --rounds {rounds} -p {prompt} -n {generate} --backend {backend.value}"
    manifest = {
        "format_version": FORMAT_VERSION,
        "flint": machine["flint"],
        "commit": machine["commit"],
        "created": utc_now(),
        "command": command + (f" --arms {arms}" if arms else "") + (f" --threads {threads}" if threads else ""),
        "note": busy,
    }
    write(
        path,
        {
            "manifest": manifest,
            "environment": machine,
            "quick": quick_json(result, where),
            "compare": outcome_json(outcome),
        },
    )
    typer.echo(str(path))
    if outcome.stopped_of:
        raise typer.Exit(INTERRUPTED)
    if not outcome.measured():
        reasons = "; ".join(f"{result.arm.name}: {result.problem}" for result in outcome.results)
        note(f"no arm could be measured, the archive holds the quick benchmark alone ({reasons})")
        raise typer.Exit(1)


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
    typer.echo(comparison_markdown(outcome), nl=False)


# --- what the commands share ------------------------------------------------------------------------------------------


def open_shown(model: str | None, backend: str, threads: int | None) -> Engine:
    from engine.loading import open_engine
    from flint_tui.pack_progress import show_progress

    with show_progress() as report:
        return open_engine(model, backend, threads, notify=note, progress=report)


def named_gguf(model: str | None) -> Path | None:
    """The file, where the model is given as one."""
    return Path(model) if model is not None and model.lower().endswith(".gguf") else None


def note(line: str) -> None:
    typer.echo(f"flint: {line}", err=True)


def say_if_busy() -> str | None:
    from engine.bench.conditions import busy_note

    busy = busy_note()
    if busy:
        note(busy)
    return busy


def plain(line: str) -> None:
    """Where `status` shows nothing, a line for everything that has ended."""
    if not sys.stderr.isatty():
        note(line)


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM is taken as Ctrl-C is: what has been measured is kept."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        note("stopped before the first round had ended: there is nothing to keep")
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def status() -> Iterator[Callable[[str], None]]:
    """say(text): a spinner on a terminal's stderr, nothing otherwise."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("") as shown:
        yield shown.update

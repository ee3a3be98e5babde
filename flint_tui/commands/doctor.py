"""`flint doctor`: this machine as flint sees it, which backends will run, and why not where one will not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.text import Text

    from engine.machine.capabilities import Processor, Report


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Show the device, driver, CUDA, processor, memory bandwidth and caches, and which backends will run here.

    Exits with 1 when none will.
    """
    from engine.machine.capabilities import inspect

    report = inspect(lambda line: typer.echo(line, err=True))
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        _print(report)
    if report.auto is None:
        raise typer.Exit(1)


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in (
        ("flint", f"{report.flint} · Python {report.python} · {report.system}"),
        ("processor", _processor(report.processor)),
        ("memory", _memory(report)),
        ("native library", report.native_library or f"none: {report.native_problem}"),
        ("GPU", _gpu(report)),
        ("CUDA", _cuda(report)),
        ("models", _models(report)),
    ):
        facts.add_row(name, Text(value))
    states = Table.grid(padding=(0, 2))
    states.add_column(no_wrap=True)
    states.add_column(no_wrap=True, style="bold")
    states.add_column(overflow="fold")
    for state in report.backends:
        mark = Text("runs", "green") if state.runs else Text("no", "red")
        states.add_row(mark, state.name, _because(state.detail, state.hint))
    console = Console(highlight=False)
    console.print(facts)
    console.print()
    console.print(states)
    console.print()
    console.print(Text(f"--backend auto takes {report.auto}." if report.auto else "No backend will run here."))


def _because(detail: str, hint: str) -> Text:
    from rich.text import Text

    return Text.assemble(detail, *([("\n" + hint, "dim")] if hint else []))


def _processor(processor: Processor) -> str:
    parts = [processor.name, _count(processor.cores, "core"), _count(processor.threads, "thread") + " used"]
    if processor.cpu_limit is not None:
        parts.append(f"limited to {processor.cpu_limit:g} CPUs")
    if processor.features:
        parts.append(" ".join(processor.features))
    if processor.caches:
        parts.append(", ".join(f"{name} {_binary(size)}" for name, size in processor.caches.items()))
    return " · ".join(parts)


def _memory(report: Report) -> str:
    size = [_binary(report.memory_bytes)] if report.memory_bytes else []
    return " · ".join([*size, f"{report.bandwidth.gb_s:,.1f} GB/s ({report.bandwidth.source})"])


def _gpu(report: Report) -> str:
    gpu = report.gpu
    if gpu is None:
        return "none"  # the cuda backend's line says why
    parts = [gpu.name, f"compute capability {gpu.capability[0]}.{gpu.capability[1]}", f"{gpu.sm_count} SMs"]
    parts += [_binary(gpu.memory_bytes), f"L2 {_binary(gpu.l2_bytes)}"]
    if report.gpu_bandwidth is not None:
        parts.append(f"{report.gpu_bandwidth.gb_s:,.0f} GB/s (driver: memory clock x bus width)")
    return " · ".join(parts)


def _cuda(report: Report) -> str:
    parts = []
    if report.driver:
        parts.append(f"driver {report.driver}")
    if report.gpu:
        parts.append(f"CUDA {report.gpu.driver_version // 1000}.{report.gpu.driver_version % 1000 // 10}")
    parts.append(f"NVRTC {report.packages['nvidia-cuda-nvrtc'] or 'not installed'}")
    parts.append(f"cuda-core {report.packages['cuda-core'] or 'not installed'}")
    parts.append(f"torch {report.packages['torch'] or 'not installed'}")
    return " · ".join(parts)


def _models(report: Report) -> str:
    from engine.files.disk import human_bytes

    packed = f"{report.models} packed, {human_bytes(report.models_bytes)}" if report.models else "none packed yet"
    return f"{packed} · {report.cache_dir} ({human_bytes(report.cache_free_bytes)} free)"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _binary(size: int) -> str:
    """Memory and caches come in powers of two."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return f"{size / (1 << power):.4g} {unit}"
    return f"{size} bytes"

"""`flint roofline`: how fast a model could be decoded at most, on this machine or another.

Nothing is downloaded, and nothing measured but the memory of this machine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from engine.machine.roofline import Ceiling, Machine, Roofline, Workload

DEFAULT_CONTEXT = 4096


def register(app: typer.Typer) -> None:
    app.command()(roofline)


def roofline(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A packed model, a name of `flint models`, a folder with config.json, or a GGUF file. Without it: the "
            "newest packed model.",
        ),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="A GPU by its datasheet, for instance h200 or rtx-4090.")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Memory bandwidth in GB/s, instead of --gpu.")] = None,
    flops: Annotated[float | None, typer.Option(help="Peak arithmetic in TFLOP/s, beside --bandwidth.")] = None,
    ctx: Annotated[int, typer.Option(help="Positions of context.")] = DEFAULT_CONTEXT,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write the plot as an SVG picture.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the plot as a PNG picture (needs resvg-py).")] = None,
) -> None:
    """How fast a model can be decoded at most: FLOP per byte, ridge point, ceilings by precision, KV cache, batch.

    Without --gpu or --bandwidth: this machine.
    """
    from engine.errors import UsageError
    from engine.machine.roofline import roofline as compute

    if ctx < 0:
        raise UsageError(f"--ctx {ctx} is negative")
    load = _workload(model)
    result = compute(load, _machine(gpu, bandwidth, flops), min(ctx, load.context))
    for path, write in ((svg, _write_svg), (png, _write_png)):
        if path is not None:
            write(result, path)
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2))
    else:
        _print(result)


# --- what and where ---------------------------------------------------------------------------------------------------


def _workload(model: str | None) -> Workload:
    from engine.errors import ModelNotFound
    from engine.machine.shapes import known_workload
    from engine.packed.library import packed_models, resolve
    from engine.sources.catalog import EMBEDDED_DEFAULT, find

    if model is None:
        newest = next(iter(packed_models()), None)
        return _packed(newest.directory) if newest else known_workload(EMBEDDED_DEFAULT)
    try:
        return _packed(resolve(model))
    except ModelNotFound:
        entry, path = find(model), Path(model).expanduser()
        if entry is not None:
            return known_workload(entry.name)
        if not path.exists():
            raise
        return _checkpoint(path)


def _packed(directory: Path) -> Workload:
    from engine.machine.roofline import workload
    from engine.meter import packed_weight_bytes
    from engine.packed.model import PackedModel

    packed = PackedModel.open(directory)
    return workload(packed.manifest.name, packed.config, (packed.manifest.variant, packed_weight_bytes(packed)))


def _checkpoint(path: Path) -> Workload:
    """A GGUF file, or config.json in a folder with or without weights beside it."""
    from engine.checkpoint import open_checkpoint
    from engine.checkpoint.hf_config import config_from_hf
    from engine.errors import CheckpointError
    from engine.machine.roofline import workload

    config_file = path / "config.json" if path.is_dir() else path
    if config_file.name != "config.json":
        with open_checkpoint(path) as checkpoint:
            return workload(path.stem, checkpoint.config)
    try:
        raw = json.loads(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{config_file}: cannot be read ({error})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{config_file}: not a JSON object")
    return workload(config_file.resolve().parent.name, config_from_hf(raw))


def _machine(gpu: str | None, bandwidth: float | None, flops: float | None) -> Machine:
    from engine.errors import UsageError
    from engine.machine.datasheets import datasheet
    from engine.machine.roofline import Machine

    for name, value in (("--bandwidth", bandwidth), ("--flops", flops)):
        if value is not None and not 0 < value < 1e9:
            raise UsageError(f"{name} {value:g} is not a positive number")
    if gpu is not None:
        if bandwidth is not None or flops is not None:
            raise UsageError("--gpu and --bandwidth or --flops contradict each other", "give one or the other")
        sheet = datasheet(gpu)
        return Machine(sheet.name, sheet.bandwidth_gb_s, "datasheet", sheet.tflops["bf16"], "bf16, datasheet")
    if bandwidth is not None:
        return Machine("a given machine", bandwidth, "given", flops, "given" if flops else "")
    here = _this_machine()
    if flops is None:
        return here
    return Machine(here.name, here.gb_s, here.gb_s_source, flops, "given")


def _this_machine() -> Machine:
    from engine.backends.cuda import find_gpu
    from engine.errors import BackendError
    from engine.machine.datasheets import recognise
    from engine.machine.hardware import gpu_bandwidth, processor, streaming_bandwidth
    from engine.machine.roofline import Machine

    try:
        gpu = find_gpu()
    except BackendError:
        gpu = None
    known = gpu_bandwidth(gpu) if gpu else None
    if gpu is None or known is None:
        measured = streaming_bandwidth()
        return Machine(processor(), measured.gb_s, measured.source)
    sheet = recognise(gpu.name, gpu.memory_bytes)
    arithmetic = (sheet.tflops["bf16"], "bf16, datasheet") if sheet else (None, "")
    return Machine(gpu.name, known.gb_s, "driver: memory clock x bus width", *arithmetic)


# --- output -----------------------------------------------------------------------------------------------------------


def _print(result: Roofline) -> None:
    from rich.console import Console
    from rich.text import Text

    from flint_tui.roofline_plot import terminal_plot

    console = Console(highlight=False)
    load, machine = result.workload, result.machine
    console.print(Text.assemble((load.name, "bold"), " on ", (machine.name, "bold")))
    console.print(
        f"{load.weights / 1e9:,.3g} G weights read per token · "
        f"KV cache {load.kv_per_position / 1024:,.4g} KiB per position (fp16)",
        soft_wrap=True,
    )
    arithmetic = "arithmetic not known (--flops)"
    if machine.tflops is not None and machine.ridge is not None:
        arithmetic = (
            f"{machine.tflops:,.3g} TFLOP/s ({machine.tflops_source}) · ridge {machine.ridge:,.3g} FLOP per byte"
        )
    console.print(Text(f"{machine.gb_s:,.4g} GB/s ({machine.gb_s_source}) · {arithmetic}"), soft_wrap=True)
    console.print(_table(result, padding=1 if console.width >= 80 else 0))  # narrow: the figures need its columns
    width = min(console.width, 100)
    colour = console.is_terminal and not console.no_color
    sys.stdout.write(terminal_plot(result, width, 20, colour) + "\n")


def _table(result: Roofline, padding: int) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, padding))
    for heading in (
        *("weights", "bytes each", "GB a token", "FLOP per byte", "tok/s at most", f"at {result.context:,}"),
        *("KV = weights at", f"batch at ridge ({result.context:,})"),
    ):
        first = heading == "weights"
        table.add_column(heading, justify="left" if first else "right", no_wrap=first, overflow="fold")
    for ceiling in result.ceilings:
        table.add_row(
            ceiling.precision,
            f"{ceiling.bytes_per_weight:.4g}",
            f"{ceiling.weight_bytes / 1e9:.4g}",
            f"{ceiling.flop_per_byte:.3g}",
            f"{ceiling.tok_s:,.0f}",
            f"{ceiling.tok_s_context:,.0f}",
            f"{ceiling.kv_equals_weights:,.0f}",
            _batch(ceiling, result),
        )
    return table


def _batch(ceiling: Ceiling, result: Roofline) -> str:
    if result.machine.ridge is None:
        return "-"
    if ceiling.batch_at_ridge is None:
        return f"never (cap {ceiling.flop_per_byte_limit:,.3g})"
    return f"{ceiling.batch_at_ridge:,.0f}"


def _write_svg(result: Roofline, path: Path) -> None:
    from flint_tui.roofline_plot import svg

    _write(path, svg(result).encode())


def _write_png(result: Roofline, path: Path) -> None:
    from engine.errors import UsageError
    from flint_tui.roofline_plot import svg

    try:
        import resvg_py
    except ImportError:
        raise UsageError("--png needs resvg-py", "run: pip install resvg-py; or use --svg") from None
    _write(path, bytes(resvg_py.svg_to_bytes(svg_string=svg(result), zoom=2)))


def _write(path: Path, data: bytes) -> None:
    from engine.errors import UsageError

    try:
        path.write_bytes(data)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None

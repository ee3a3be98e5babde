"""`flint bench kernels`: what single ideas of fast int4 decoding are worth on this GPU."""

from __future__ import annotations

from typing import Annotated

import typer


def kernels(
    only: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Of read, gemv, tensor, split, sparsity, fusion, mlp, barrier."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Sweeps of each variant; 5 for a verdict.")] = 10,
    hidden: Annotated[int, typer.Option(min=128, help="Channels of the residual stream.")] = 2560,
    inner: Annotated[int, typer.Option(min=512, help="Rows of gate and up.")] = 8192,
    layers: Annotated[int, typer.Option(min=1, help="Distinct MLPs a sweep reads.")] = 40,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead, with every sample.")] = False,
) -> None:
    """Small kernels, each checked against numpy before it is timed over weights that no cache holds (GPU only).

    Exit code 1 where there is no GPU, or a kernel's result is wrong.
    """
    import json

    from engine.bench.levers import chosen, open_device, outcome_json, run
    from flint_tui.commands.bench import note, status
    from kernels.cuda.experiments.sweep import Size

    keys = chosen(only)
    size = Size(hidden, inner, layers)
    device = open_device(note)
    with status() as say:
        outcome = run(device, size, rounds, keys, say)
    if as_json:
        typer.echo(json.dumps(outcome_json(outcome), indent=2))
    else:
        from rich.console import Console

        from flint_tui.bench_levers import levers_report

        Console().print(levers_report(outcome))
    if not outcome.complete:
        raise typer.Exit(1)

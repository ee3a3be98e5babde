"""`flint models`: what is packed here and what can be packed; show, verify and remove packed models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from engine.packed.library import BrokenEntry, PackedEntry
    from engine.sources.catalog import CatalogEntry

models = typer.Typer(name="models", help="List, inspect, verify and remove packed models.")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    app.add_typer(models)


@models.callback(invoke_without_command=True)
def main(context: typer.Context, as_json: AsJson = False) -> None:
    if context.invoked_subcommand is None:
        list_models(as_json)


@models.command("list")
def list_models(as_json: AsJson = False) -> None:
    """What is packed on this machine, newest first, and what can be packed."""
    from engine.packed.library import scan
    from engine.sources.catalog import CATALOG

    packed, broken = scan()
    names = {entry.name for entry in packed}
    available = [entry for entry in CATALOG.values() if entry.name not in names]
    if as_json:
        _echo_json(
            {
                "packed": [_packed_json(entry) for entry in packed],
                "broken": [{"path": str(entry.directory), "problem": entry.problem} for entry in broken],
                "available": [_catalog_json(entry) for entry in available],
            }
        )
        return
    _print_packed(packed, broken)
    if available:
        typer.echo("Can be packed with `flint pack NAME`: size to download, licence, source")
        _print_table([_catalog_row(entry) for entry in available])


@models.command()
def show(name: Annotated[str, typer.Argument(help="NAME or NAME/VARIANT.")], as_json: AsJson = False) -> None:
    """The essentials of one model: shape, quantisation, source, licence, files."""
    from engine.errors import ModelNotFound
    from engine.packed.library import lookup
    from engine.sources.catalog import find

    try:
        entry = lookup(name)
    except ModelNotFound:
        known = find(name)
        if known is None:
            raise
        _show_catalog(known, as_json)
    else:
        _show_packed(entry, as_json)


@models.command()
def verify(
    names: Annotated[list[str] | None, typer.Argument(help="NAME or NAME/VARIANT; all of them if left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read every file of packed models again and compare its sha256; exit 1 if one is damaged."""
    from engine.errors import FlintError
    from engine.packed.library import lookup, scan
    from engine.packed.model import PackedModel

    if names:
        entries, broken = [lookup(name) for name in names], []
    else:
        entries, broken = scan()
    results = [{"model": _identifier(b), "path": str(b.directory), "ok": False, "problem": b.problem} for b in broken]
    for entry in entries:
        problem = ""
        try:
            PackedModel.open(entry.directory, verify=True)
        except FlintError as error:
            problem = str(error)
        result = {"model": entry.identifier, "path": str(entry.directory), "ok": not problem, "problem": problem}
        results.append(result)
    if as_json:
        _echo_json({"results": results})
    else:
        for result in results:
            typer.echo(f"{result['model']}: {result['problem'] or 'ok'}")
    if not all(result["ok"] for result in results):
        typer.echo("flint: a packed model is damaged", err=True)
        typer.echo(
            "       pack it again with `flint pack MODEL --force`, or remove it with `flint models rm`", err=True
        )
        raise typer.Exit(1)


@models.command("rm")
def remove(
    names: Annotated[list[str], typer.Argument(help="NAME or NAME/VARIANT.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete packed models; asks first."""
    from engine.errors import UsageError
    from engine.files.disk import human_bytes
    from engine.packed.library import remove as remove_directory

    chosen = [_removable(name) for name in names]
    if not yes:
        if not _is_terminal():
            raise UsageError("Nothing was removed: there is no terminal to ask on", "add --yes")
        for entry in chosen:
            typer.echo(f"{_identifier(entry)}  {human_bytes(_bytes(entry))}", err=True)
        if not typer.confirm("Remove?", err=True):
            raise typer.Exit(1)
    freed = sum(_bytes(entry) for entry in chosen)
    for entry in chosen:
        remove_directory(entry.directory)
    if as_json:
        _echo_json({"removed": [_identifier(entry) for entry in chosen], "bytes": freed})
    else:
        for entry in chosen:
            typer.echo(f"removed {_identifier(entry)}")


def _is_terminal() -> bool:
    import sys

    return sys.stdin.isatty()


def _removable(name: str) -> PackedEntry | BrokenEntry:
    """What `rm NAME` means: one directory, sound or broken. A name with several variants is not enough."""
    from engine.errors import UsageError
    from engine.packed.library import lookup, scan

    packed, broken = scan()
    wanted = name.lower()
    everything = [*packed, *broken]
    matches = [entry for entry in everything if _identifier(entry).lower() == wanted]
    matches = matches or [entry for entry in everything if entry.directory.parent.name.lower() == wanted]
    if len(matches) > 1:
        variants = ", ".join(sorted(_identifier(entry) for entry in matches))
        raise UsageError(f"{name} is packed {len(matches)} times", f"name one: {variants}")
    return matches[0] if matches else lookup(name)


def _identifier(entry: PackedEntry | BrokenEntry) -> str:
    return f"{entry.directory.parent.name}/{entry.directory.name}"


def _bytes(entry: PackedEntry | BrokenEntry) -> int:
    return sum(path.stat().st_size for path in entry.directory.rglob("*") if path.is_file())


def _packed_json(entry: PackedEntry) -> dict[str, Any]:
    from flint_tui.commands.pack import describe

    return describe(entry)


def _catalog_json(entry: CatalogEntry) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "model": entry.name,
        "origin": entry.origin,
        "license": entry.licence,
        "gated": entry.gated,
        "parameters": entry.parameters,
        "download_bytes": entry.download_bytes,
        "context": entry.context,
        "stop_tokens": list(entry.stop_tokens),
        "sampling": asdict(entry.sampling),
    }


def _print_packed(packed: list[PackedEntry], broken: list[BrokenEntry]) -> None:
    from engine.files.disk import human_bytes

    if packed:
        typer.echo("Packed, newest first")
        _print_table(
            [(e.identifier, human_bytes(e.bytes), e.manifest.created[:10], e.manifest.source.location) for e in packed]
        )
    else:
        typer.echo("Nothing is packed yet.")
    for entry in broken:
        typer.echo(f"  {_identifier(entry)}  does not load: {entry.problem}")
    typer.echo()


def _catalog_row(entry: CatalogEntry) -> tuple[str, ...]:
    from engine.files.disk import human_bytes

    licence = f"{entry.licence}{' (gated)' if entry.gated else ''}"
    return (entry.name, human_bytes(entry.download_bytes), licence, entry.origin)


def _show_catalog(entry: CatalogEntry, as_json: bool) -> None:
    from engine.files.disk import human_bytes

    if as_json:
        _echo_json(_catalog_json(entry) | {"packed": False})
        return
    _print_fields(
        {
            "model": f"{entry.name} (not packed: flint pack {entry.name})",
            "from": entry.origin,
            "licence": entry.licence + (" (must be accepted on the hub)" if entry.gated else ""),
            "download": human_bytes(entry.download_bytes),
            "parameters": f"{entry.parameters:,}",
            "context": f"{entry.context:,} tokens",
            "stops at": " ".join(entry.stop_tokens),
        }
    )


def _show_packed(entry: PackedEntry, as_json: bool) -> None:
    from engine.files.disk import human_bytes

    manifest, config = entry.manifest, entry.manifest.config
    if as_json:
        files = {name: {"bytes": file.bytes, "sha256": file.sha256} for name, file in manifest.files.items()}
        _echo_json(_packed_json(entry) | {"packed": True, "config": config.to_json(), "files": files})
        return
    source = manifest.source
    _print_fields(
        {
            "model": entry.identifier,
            "path": str(entry.directory),
            "size": human_bytes(entry.bytes),
            "shape": f"{config.family}, {config.num_layers} layers of {config.hidden_size}, "
            f"{config.num_heads} heads on {config.num_kv_heads} kv heads, vocabulary {config.vocab_size:,}",
            "context": f"{config.max_position_embeddings:,} tokens",
            "stops at": " ".join(map(str, config.eos_token_ids)),
            "weights": _quantization_text(entry),
            "from": " ".join(part for part in (source.location, source.revision, source.format) if part),
            "licence": manifest.license or "not known",
            "packed": f"{manifest.created} by flint {manifest.flint}",
            "files": ", ".join(f"{name} {human_bytes(file.bytes)}" for name, file in manifest.files.items()),
        }
    )


def _quantization_text(entry: PackedEntry) -> str:
    q = entry.manifest.quantization
    group = f", groups of {q.group}" if q.group else ""
    minima = "" if q.symmetric or q.format != "int4" else ", with minima"
    embed = f"; embedding {q.embed_format}" if q.embed_format != q.format else ""
    return f"{q.format}{group}{minima}{embed}{'; every value as in the source' if q.lossless else ''}"


def _print_fields(fields: dict[str, str]) -> None:
    from engine.errors import printable

    for key, value in fields.items():
        typer.echo(f"{key:<11}{printable(value)}")


def _print_table(rows: list[tuple[str, ...]]) -> None:
    """Left-aligned columns; lines are never cut, so that a pipe gets everything."""
    from engine.errors import printable

    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        typer.echo("  " + printable("  ".join(cells).rstrip()))


def _echo_json(value: Any) -> None:
    import json

    typer.echo(json.dumps(value, indent=2))

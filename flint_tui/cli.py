"""The `flint` command: assembles the sub-commands and turns known failures into one line and an exit code.

Every command lives in flint_tui/commands/<name>.py. Those modules import only typer and the standard library at
the top; engine, torch and textual are imported inside the command, so that `flint --help` stays instant.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from flint_tui.commands import bench, chat, doctor, draft, eval, models, pack, roofline

app = typer.Typer(
    name="flint",
    help="The fastest way to talk to one language model from a terminal.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    from importlib.metadata import PackageNotFoundError, version  # a quarter of this module's import time

    try:
        typer.echo(f"flint {version('flint')}")
    except PackageNotFoundError:
        typer.echo("flint (not installed)")
    raise typer.Exit


@app.callback()
def flint(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before any command."""


bench.register(app)
chat.register(app)
doctor.register(app)
draft.register(app)
eval.register(app)
pack.register(app)
models.register(app)
roofline.register(app)


def report(error: BaseException) -> int:
    """Print a failure as one line and what to do; return the exit code (0 ok, 1 failure, 2 usage, 130 interrupted)."""
    from engine.errors import FlintError, UsageError

    if os.environ.get("FLINT_DEBUG"):
        raise error
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, FlintError):
        print(f"flint: {error}", file=sys.stderr)
        if error.hint:
            print(f"       {error.hint}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    print(f"flint: unexpected {type(error).__name__}: {error}", file=sys.stderr)
    print("       set FLINT_DEBUG=1 to see where", file=sys.stderr)
    return 1


def main() -> None:
    """Entry point."""
    try:
        app()
    except SystemExit:
        raise
    except BaseException as error:
        sys.exit(report(error))


if __name__ == "__main__":
    main()

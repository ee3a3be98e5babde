"""The `flint` command: assembles the sub-commands and turns known failures into one line and an exit code.

Every command lives in flint_tui/commands/<name>.py. Those modules import only typer and the standard library at
the top; engine, torch and textual are imported inside the command, so that `flint --help` stays instant.
"""

from __future__ import annotations

import os
import signal

# Importing the rest takes 0.1 s. An interrupt meanwhile ends quietly: there is no main() yet to catch it.
_before = signal.getsignal(signal.SIGINT)
if _before is signal.default_int_handler:
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import sys  # noqa: E402
from typing import Annotated  # noqa: E402

import typer  # noqa: E402

from flint_tui import streams  # noqa: E402
from flint_tui.commands import HelpfulGroup, bench, chat, doctor, draft, eval, models, pack, roofline  # noqa: E402

app = typer.Typer(
    name="flint",
    help="The fastest way to talk to one language model from a terminal.",
    cls=HelpfulGroup,
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

signal.signal(signal.SIGINT, _before)


def report(error: BaseException) -> int:
    """Print a failure as one line and what to do; return the exit code (0 ok, 1 failure, 2 usage, 130 interrupted)."""
    if os.environ.get("FLINT_DEBUG"):
        raise error
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, BrokenPipeError):
        return 1  # whoever read the output has seen enough
    from engine.errors import FlintError, UsageError, printable
    from engine.files.disk import FULL

    match error:
        case FlintError():
            message, hint = str(error), error.hint
        case MemoryError():
            message, hint = "There is not enough memory", "close other programs, or take a smaller model or --ctx"
        case OSError() if error.filename or error.errno in FULL:  # writing to an open file names none
            message = f"{error.filename or 'The output could not be written'}: {error.strerror}"
            hint = "check that it exists, its permissions, and the room on its disk"
        case _:
            message, hint = f"unexpected {type(error).__name__}: {error}", "set FLINT_DEBUG=1 to see where"
    print(f"flint: {printable(message)}", file=sys.stderr)
    if hint:
        print(f"       {hint}", file=sys.stderr)
    return 2 if isinstance(error, UsageError) else 1


def main() -> None:
    """Entry point."""
    try:
        streams.mend()
        try:
            app()
        finally:
            sys.stdout.flush()  # here, where a failure is reported; not while Python shuts down
    except SystemExit:
        raise
    except BaseException as error:
        sys.exit(report(error))


if __name__ == "__main__":
    main()

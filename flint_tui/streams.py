"""The standard streams of the command, in whatever state its caller left them: closed, full, unread, not UTF-8."""

from __future__ import annotations

import io
import os
import select
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def mend() -> None:
    """Make the standard streams safe to use.

    A closed one leads nowhere: else the next file that is opened would take its number, and be written to by any
    library that prints. What a stream's encoding does not have is replaced; a path's bytes that are not UTF-8 come out
    as they are. Output that cannot be written fails once; messages that cannot be are dropped.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  it stays open
        elif name != "stdin":
            setattr(sys, name, _failing_once(stream, needed=name == "stdout"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        utf8 = sys.stdout.encoding.lower() in ("utf-8", "utf8")
        sys.stdout.reconfigure(errors="surrogateescape" if utf8 else "replace")


def _failing_once(stream: TextIO, needed: bool) -> TextIO:
    """The same stream over a _Descriptor, where it is a descriptor's: a Windows console or a test's text is not."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    buffer = stream.buffer
    if not isinstance(getattr(buffer, "raw", buffer), io.FileIO):
        return stream
    descriptor = _Descriptor(stream.fileno(), needed)
    unbuffered = isinstance(buffer, io.RawIOBase)  # PYTHONUNBUFFERED
    return io.TextIOWrapper(
        descriptor if unbuffered else io.BufferedWriter(descriptor),  # pyright: ignore[reportArgumentType]
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Descriptor(io.FileIO):
    """Writes all that it is given or fails, and after a failure takes the rest without writing it.

    Else a buffer keeps what could not be written, Python tries again while it shuts down, and says what became of that
    in words and with an exit code (120) of its own. Only without a buffer (PYTHONUNBUFFERED) would it not.

    needed: a failure is raised, as BrokenPipeError or a FlintError; the other stream is silent, and what the command
    does and returns does not depend on whether anybody can read its messages.
    """

    def __init__(self, number: int, needed: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self._needed = needed
        self._failed = False

    def write(self, data: ReadableBuffer, /) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            # A disk takes what it has room for; a text stream without a buffer would not ask what became of the rest.
            while rest and not self._failed:
                written: int | None = super().write(rest)
                if written is None:  # the caller left it non-blocking, and its reader is slow
                    select.select((), (self,), ())
                rest = rest[written or 0 :]
        except OSError as error:
            self._failed = True
            if self._needed:
                raise _reported(error) from error
        return size


def _reported(error: OSError) -> Exception:
    """What is raised for it: typer, Rich and `one_shot` know that a broken pipe is no news."""
    if isinstance(error, BrokenPipeError):
        return error
    from engine.errors import FlintError

    return FlintError(f"The output could not be written: {error.strerror}", "check where standard output leads to")

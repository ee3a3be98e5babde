"""Keeps native code from writing over the screen: file descriptors 1 and 2 lead into a log while the app runs.

Python's own streams are already caught by Textual; a C library's printf is not. The app draws through a private copy
of the terminal's descriptor, which children such as an editor must be given too.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from flint_tui.text.safety import printable

LINES = 2000


class FdGuard:
    """lines: the last LINES lines that were caught; count: how many there ever were; terminal: the real terminal."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=LINES)
        self.count = 0
        self.terminal: TextIO | None = None

    def add(self, text: str) -> None:
        for line in text.splitlines():
            self.lines.append(printable(line))
            self.count += 1

    @contextmanager
    def active(self) -> Iterator[FdGuard]:
        """Redirect for as long as the block lasts; both descriptors are restored whatever happens in it."""
        sys.stdout.flush()
        sys.stderr.flush()
        saved = {1: os.dup(1), 2: os.dup(2)}
        streams = sys.__stdout__, sys.__stderr__
        read_end, write_end = os.pipe()
        self.terminal = os.fdopen(os.dup(saved[2]), "w", encoding="utf-8", errors="replace")
        reader = threading.Thread(target=self._read, args=(read_end,), name="flint-log", daemon=True)
        try:
            # Textual's driver draws on the one and asks the other for the terminal's size.
            sys.__stdout__ = sys.__stderr__ = self.terminal  # type: ignore[misc]
            os.dup2(write_end, 1)
            os.dup2(write_end, 2)
            os.close(write_end)
            reader.start()
            yield self
        finally:
            self.terminal.flush()
            for descriptor, copy in saved.items():
                os.dup2(copy, descriptor)
                os.close(copy)
            sys.__stdout__, sys.__stderr__ = streams  # type: ignore[misc]
            reader.join(0.2)  # a child that still holds the pipe must not delay quitting

    def _read(self, read_end: int) -> None:
        pending = b""
        with os.fdopen(read_end, "rb", buffering=0) as pipe:
            while chunk := pipe.read(65536):
                *complete, pending = (pending + chunk).split(b"\n")
                for line in complete:
                    self.add(line.decode("utf-8", "replace"))
                pending = pending[-65536:]
        if pending:
            self.add(pending.decode("utf-8", "replace"))

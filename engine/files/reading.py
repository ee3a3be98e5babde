"""Reads files that others wrote: regular files only, never more than a limit, every complaint one line.

A named pipe in a model's folder would hang its reader, and a device or a file of terabytes would fill the memory.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from engine.errors import CheckpointError


class FileMissing(CheckpointError):
    """There is no file of that name."""


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """A regular file, open. Raises FileMissing, or CheckpointError where it is something else or cannot be read."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CheckpointError(f"{path}: not a file")
            yield file
    except (FileNotFoundError, NotADirectoryError):
        raise FileMissing(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})", "check its permissions") from None


def read_file(path: Path, limit: int) -> bytes:
    """The bytes of a regular file of at most `limit` bytes. Raises CheckpointError."""
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise CheckpointError(f"{path}: larger than {limit} bytes")
    return data


def read_text(path: Path, limit: int) -> str:
    """The same, as UTF-8."""
    try:
        return read_file(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 (at byte {error.start})") from None


def _without_waiting(path: str, flags: int) -> int:
    """Opening a pipe waits for its writer, unless told not to; regular files never wait."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))

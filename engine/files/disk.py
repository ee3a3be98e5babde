"""Room on the disk: asked for before anything is written, and named when it runs out all the same."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import DiskFull, FlintError

MARGIN_BYTES = 32 << 20  # file system overhead, manifests, tokenizers
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EIO)
UNWRITABLE += (errno.ENAMETOOLONG, errno.ELOOP)

_ANOTHER_FOLDER = "set FLINT_CACHE_DIR (downloads: HF_HOME) to a folder you may write"


def require_room(needs: Iterable[tuple[Path, int]], what: str) -> None:
    """Raise DiskFull unless every file system has room for all that will be written to it: (folder, bytes) pairs."""
    wanted: dict[int, tuple[Path, int]] = {}
    for folder, size in needs:
        if size > 0:
            place = existing_parent(folder)
            device = place.stat().st_dev
            wanted[device] = (wanted.get(device, (place, 0))[0], wanted.get(device, (place, 0))[1] + size)
    for place, size in wanted.values():
        free = shutil.disk_usage(place).free
        if free < size + MARGIN_BYTES:
            raise DiskFull(
                f"{what} needs {human_bytes(size + MARGIN_BYTES)} in {place}, which has {human_bytes(free)} free",
                "free some space, or set FLINT_CACHE_DIR (downloads: HF_HOME) to a folder on a larger disk",
            )


def require_writable(folder: Path) -> None:
    """Raise FlintError unless files can be made in the folder, or in the nearest one above it that exists."""
    place = existing_parent(folder)
    if not os.access(place, os.W_OK | os.X_OK):
        raise FlintError(f"Cannot write {place}", _ANOTHER_FOLDER)


@contextmanager
def disk_errors(folder: Path, what: str) -> Iterator[None]:
    """Turn the operating system's complaints about `folder` into one line and what to do.

    what: what was going on, for instance "smollm2 was being packed". Raises DiskFull, or FlintError where the folder
    cannot be made or written; any other OSError passes.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            free = human_bytes(shutil.disk_usage(existing_parent(folder)).free)
            raise DiskFull(
                f"The disk filled up while {what} ({free} free in {folder})",
                "free some space and run it again; what was packed before is intact",
            ) from error
        # A missing file is somebody's mistake; a folder that cannot be made (below /proc, say) is the user's setting.
        unmade = error.errno == errno.ENOENT and _leads_to(folder, error.filename)
        if error.errno in UNWRITABLE or unmade:
            where = error.filename or folder
            raise FlintError(f"Cannot write {where}: {error.strerror}", _ANOTHER_FOLDER) from error
        raise


def _leads_to(folder: Path, path: str | None) -> bool:
    """Whether `path` is the folder or one above it."""
    return path is not None and Path(path) in (folder, *folder.parents)


def existing_parent(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder


def human_bytes(size: int) -> str:
    """Decimal units, as disks and downloads are sold: 98.4 MB."""
    value, unit = float(size), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{size} B" if unit == "B" else f"{value:.3g} {unit}"

"""One process at a time: a lock file that the operating system releases when its holder dies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.progress import check_cancelled

POLL_SECONDS = 0.2


@contextmanager
def locked(path: Path, cancel: threading.Event | None, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path`. While another process holds it, call `waiting` and look at `cancel` now and then."""
    from filelock import FileLock, Timeout

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    while True:
        try:
            lock.acquire(timeout=POLL_SECONDS)
            break
        except Timeout:
            check_cancelled(cancel)
            waiting()
    try:
        yield
    finally:
        lock.release()

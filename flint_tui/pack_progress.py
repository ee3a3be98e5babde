"""Shows a download or a pack on stderr: bars with bytes, rate and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from engine.files.disk import human_bytes
from engine.progress import Progress, Report, Stage

TITLES: dict[Stage, str] = {
    "wait": "waiting for another flint",
    "download": "downloading",
    "verify": "checking digests",
    "unpack": "unpacking",
    "pack": "packing",
}
LINE_SECONDS = 5.0  # between two plain lines of one stage


@contextmanager
def show_progress() -> Iterator[Report]:
    """A Report that draws on stderr until the block ends."""
    if sys.stderr.isatty():
        with _bars(sys.stderr) as report:
            yield report
    else:
        yield PlainLines(sys.stderr)


class PlainLines:
    """One line when a stage begins, one every few seconds, one when it is complete."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.stage: Stage | None = None
        self.began = self.printed = 0.0
        self.complete = False

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        title = TITLES[progress.stage]
        if progress.stage != self.stage:
            self.stage, self.began, self.printed, self.complete = progress.stage, now, now, False
            size = f", {human_bytes(progress.total)}" if progress.total else ""
            self._line(f"{title} {progress.item}{size}")
        elif progress.total and progress.done >= progress.total and not self.complete:
            self.complete = True
            self._line(f"{title}: {human_bytes(progress.total)} in {now - self.began:.1f} s")
        elif now - self.printed >= LINE_SECONDS and progress.total:
            self.printed = now
            rate = progress.done / (now - self.began)
            left = f", {(progress.total - progress.done) / rate:.0f} s left" if rate > 0 else ""
            done, total = human_bytes(progress.done), human_bytes(progress.total)
            self._line(f"{title}: {done} of {total}, {human_bytes(int(rate))}/s{left}")

    def _line(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


@contextmanager
def _bars(stream: TextIO) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = [TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn()]
    columns += [TransferSpeedColumn(), TimeRemainingColumn(compact=True)]
    with Bars(*columns, console=Console(file=stream)) as bars:
        tasks: dict[Stage, TaskID] = {}

        def report(progress: Progress) -> None:
            task, total = tasks.get(progress.stage), progress.total or None
            if task is None:  # begins at what is here already: bytes of an earlier run are no speed
                task = tasks[progress.stage] = bars.add_task(
                    TITLES[progress.stage], total=total, completed=progress.done
                )
            bars.update(task, completed=progress.done, total=total)

        yield report

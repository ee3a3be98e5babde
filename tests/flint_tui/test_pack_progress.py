"""flint_tui/pack_progress.py: progress on and off a terminal."""

from __future__ import annotations

import io
import sys

import pytest

from engine.progress import Progress
from flint_tui import pack_progress
from flint_tui.pack_progress import show_progress

REPORTS = [
    Progress("download", "weights", 0, 4_000_000),
    Progress("download", "weights", 2_000_000, 4_000_000),
    Progress("download", "weights", 4_000_000, 4_000_000),
    Progress("pack", "embed", 0, 1_000_000),
    Progress("pack", "done", 1_000_000, 1_000_000),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(pack_progress.time, "monotonic", lambda: seconds.pop(0) if seconds else 99.0)
    with show_progress() as report:
        for progress in REPORTS:
            report(progress)
    return stream.getvalue()


def test_plain_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(io.StringIO(), monkeypatch, [0.0, 5.0, 8.0, 9.0, 10.0])
    assert text.splitlines() == [
        "downloading weights, 4 MB",
        "downloading: 2 MB of 4 MB, 400 kB/s, 5 s left",
        "downloading: 4 MB in 8.0 s",
        "packing embed, 1 MB",
        "packing: 1 MB in 1.0 s",
    ]


def test_fast_reports_do_not_flood_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(pack_progress.time, "monotonic", lambda: 1.0)
    with show_progress() as report:
        for done in range(0, 1_000_001, 1000):
            report(Progress("pack", "embed", done, 1_000_000))
    assert len(stream.getvalue().splitlines()) == 2


def test_bars_with_bytes_and_rate_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = shown(Terminal(), monkeypatch, [])
    assert "downloading" in text
    assert "4.0/4.0 MB" in text
    assert "\x1b[" in text


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    text = shown(Terminal(), monkeypatch, [])
    assert "4.0/4.0 MB" in text
    assert "\x1b[3" not in text.replace("\x1b[?25", "")

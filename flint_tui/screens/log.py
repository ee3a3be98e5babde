"""What native code and libraries wrote while the screen was not theirs."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.widgets import Log

from flint_tui.screens.dialog import Dialog

REFRESH_S = 0.5


class LogScreen(Dialog[None]):
    title_text = "Log"
    keys = "Esc closes"

    def body(self) -> ComposeResult:
        yield Log(id="log", max_lines=2000)

    def on_mount(self) -> None:
        self._shown = 0
        self.show_new()
        self.set_interval(REFRESH_S, self.show_new)
        self.query_one(Log).focus()

    def show_new(self) -> None:
        guard = self.app.guard
        new = min(guard.count - self._shown, len(guard.lines))
        if new:
            self.query_one(Log).write_lines(list(guard.lines)[-new:])
            self._shown = guard.count
        elif not guard.count and not self._shown:
            self.query_one(Log).write_line("Nothing has been written so far.")
            self._shown = -1 if guard.count else 0

"""Asks for a line, a text, or yes or no."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Input, Static, TextArea

from flint_tui.screens.dialog import Dialog


class AskLine(Dialog[str]):
    """One line; None when left with Esc."""

    keys = "Enter accepts · Esc closes"

    def __init__(self, title: str, value: str = "") -> None:
        super().__init__()
        self.title_text = title
        self.value = value

    def body(self) -> ComposeResult:
        yield Input(self.value, id="line", compact=True)

    def on_mount(self) -> None:
        self.query_one(Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)


class AskText(Dialog[str]):
    """Several lines; None when left with Esc."""

    keys = "Ctrl+S accepts · Esc closes"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+s", "accept", "Accept", show=False, priority=True)]

    def __init__(self, title: str, value: str = "", note: str = "") -> None:
        super().__init__()
        self.title_text = title
        self.value = value
        self.note = note

    def body(self) -> ComposeResult:
        if self.note:
            yield Static(Content(self.note), classes="dialog-note")
        yield TextArea(self.value, id="text", soft_wrap=True, compact=True, tab_behavior="focus")

    def on_mount(self) -> None:
        area = self.query_one(TextArea)
        area.move_cursor(area.document.end)
        area.focus()

    def action_accept(self) -> None:
        self.dismiss(self.query_one(TextArea).text)


class AskYes(Dialog[bool]):
    """A question before something that cannot be undone; True only after "y"."""

    keys = "y yes · n or Esc no"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "yes", "Yes", show=False),
        Binding("n", "leave", "No", show=False),
    ]

    def __init__(self, title: str, question: str) -> None:
        super().__init__()
        self.title_text = title
        self.question = question

    def body(self) -> ComposeResult:
        yield Static(Content(self.question), classes="dialog-note")

    def action_yes(self) -> None:
        self.dismiss(True)

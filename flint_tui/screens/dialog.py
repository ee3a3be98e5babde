"""What all dialogs share: a frame with a title, a line of keys, and Esc to leave without changing anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, TypeVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

if TYPE_CHECKING:
    from flint_tui.app import FlintApp

Answer = TypeVar("Answer")


class Dialog(ModalScreen[Answer]):
    """Sub-classes compose their parts in `body`; `title_text` and `keys` frame them."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "leave", "Close", show=False)]
    title_text = ""
    keys = "Esc closes"
    app: FlintApp  # type: ignore[assignment]

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as frame:
            frame.border_title = Content(self.title_text)
            yield from self.body()
            yield Static(Content(self.keys), classes="dialog-keys")

    def on_mount(self) -> None:
        for field in self.query("Input, TextArea"):
            field.cursor_blink = False  # type: ignore[attr-defined]  # nothing moves while nothing happens

    def body(self) -> ComposeResult:
        raise NotImplementedError

    def action_leave(self) -> None:
        self.dismiss(None)

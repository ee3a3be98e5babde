"""Where prompts are written: Enter sends, Shift+Enter and Ctrl+J break the line, Up and Down walk through history."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message
from textual.strip import Strip
from textual.widgets import TextArea

from flint_tui.text.safety import printable

if TYPE_CHECKING:
    from textual import events


class Composer(TextArea):
    """Grows with its text up to a third of the screen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+j,shift+enter,alt+enter", "newline", "New line", show=False, id="composer.newline"),
        Binding("enter", "submit", "Send", show=False, id="composer.submit"),
        Binding("up", "history(-1)", "Earlier prompt", show=False),
        Binding("down", "history(1)", "Later prompt", show=False),
        Binding("ctrl+underscore,alt+z", "undo", "Undo", show=False),
    ]

    class Submitted(Message):
        """The prompt is to be sent; the composer is empty again."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self, id: str, placeholder: str) -> None:
        super().__init__(
            soft_wrap=True,
            show_line_numbers=False,
            tab_behavior="focus",
            highlight_cursor_line=False,
            compact=True,
            id=id,
            placeholder=placeholder,
        )
        self.past: list[str] = []  # prompts sent before, oldest first
        self._at = 0  # index into `past`; len(past) is the draft
        self._draft = ""

        self.cursor_blink = False  # nothing on the screen moves while nothing happens

    def set_history(self, prompts: list[str]) -> None:
        self.past = [p for i, p in enumerate(prompts) if i == 0 or p != prompts[i - 1]]
        self._at = len(self.past)

    def put(self, text: str) -> None:
        """Replace the text, cursor at its end."""
        self.text = text
        self.move_cursor(self.document.end)

    def take_back(self, prompts: list[str]) -> None:
        """Put unsent prompts in front of what is being written."""
        self.put("\n\n".join([*prompts, self.text] if self.text.strip() else prompts))

    def render_line(self, y: int) -> Strip:
        # Textual wraps the placeholder even where there is no room, and raises.
        return super().render_line(y) if self.content_size.width > 0 else Strip([])

    async def _on_key(self, event: events.Key) -> None:
        if event.key == "enter":
            event.prevent_default()  # TextArea would insert a newline; the bindings decide instead

    async def _on_paste(self, event: events.Paste) -> None:
        # Many pasted lines are one prompt, whatever their line ends; TextArea inserts what is left here.
        event.text = printable(event.text.replace("\r\n", "\n").replace("\r", "\n"))

    def action_newline(self) -> None:
        self.insert("\n")

    def action_submit(self) -> None:
        text = self.text.strip("\n")
        if not text.strip():
            return
        if not self.past or self.past[-1] != text:
            self.past.append(text)
        self._at = len(self.past)
        self._draft = ""
        self.clear()
        self.post_message(self.Submitted(text))

    def action_history(self, step: int) -> None:
        """Up in the first line and down in the last walk through history; elsewhere they move the cursor."""
        row = self.cursor_location[0]
        if (step < 0 and row > 0) or (step > 0 and row < self.document.line_count - 1):
            (self.action_cursor_up if step < 0 else self.action_cursor_down)()
            return
        at = min(max(self._at + step, 0), len(self.past))
        if at == self._at:
            (self.action_cursor_line_start if step < 0 else self.action_cursor_line_end)()
            return
        if self._at == len(self.past):
            self._draft = self.text
        self._at = at
        self.put(self.past[at] if at < len(self.past) else self._draft)

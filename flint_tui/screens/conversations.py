"""The saved conversations: search, open, rename, delete."""

from __future__ import annotations

import time
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from flint_tui.conversations import Conversation
from flint_tui.screens.ask import AskLine, AskYes
from flint_tui.screens.dialog import Dialog


def age(seconds: float) -> str:
    """How long ago, in one short unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return "now"


class ConversationsScreen(Dialog[Conversation]):
    """Answers with the conversation to open."""

    title_text = "Conversations"
    keys = "Enter opens · Ctrl+R renames · Ctrl+D deletes · Esc closes"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "move(1)", show=False, priority=True),
        Binding("up", "move(-1)", show=False, priority=True),
        Binding("pagedown", "move(10)", show=False, priority=True),
        Binding("pageup", "move(-10)", show=False, priority=True),
        Binding("ctrl+r", "rename", show=False, priority=True),
        Binding("ctrl+d", "delete", show=False, priority=True),
    ]

    def __init__(self, now: float | None = None) -> None:
        super().__init__()
        self.now = now
        self.found: list[Conversation] = []

    def body(self) -> ComposeResult:
        yield Input(placeholder="Search titles and messages", id="search", compact=True)
        yield OptionList(id="found", markup=False, compact=True)

    def on_mount(self) -> None:
        self.query_one("#found").can_focus = False
        self.query_one(Input).focus()
        self.look()

    def look(self) -> None:
        """List what the search finds."""
        options = self.query_one(OptionList)
        at = options.highlighted or 0
        self.found = self.app.store.search(self.query_one(Input).value.strip())
        now = self.now if self.now is not None else time.time()
        options.clear_options()
        options.add_options([Option(self._row(conversation, now)) for conversation in self.found])
        if self.found:
            options.highlighted = min(at, len(self.found) - 1)

    def _row(self, conversation: Conversation, now: float) -> Content:
        current = self.app.session.conversation
        mark = "◆ " if current is not None and current.id == conversation.id else "  "
        return Content.assemble(
            (mark, "$accent"),
            (f"{age(now - conversation.updated):>6}  ", "$muted"),
            (f"{conversation.messages:>3}  ", "$muted"),
            conversation.title,
        )

    @property
    def chosen(self) -> Conversation | None:
        at = self.query_one(OptionList).highlighted
        return self.found[at] if at is not None and at < len(self.found) else None

    def on_input_changed(self) -> None:
        self.look()

    def on_input_submitted(self) -> None:
        if self.chosen is not None:
            self.dismiss(self.chosen)

    def on_option_list_option_selected(self) -> None:
        self.on_input_submitted()

    def action_move(self, step: int) -> None:
        options = self.query_one(OptionList)
        if self.found:
            options.highlighted = min(max((options.highlighted or 0) + step, 0), len(self.found) - 1)

    def action_rename(self) -> None:
        conversation = self.chosen
        if conversation is None:
            return

        def rename(title: str | None) -> None:
            if title and title.strip():
                self.app.rename_conversation(conversation, title.strip())
                self.look()

        self.app.push_screen(AskLine("Rename", conversation.title), rename)

    def action_delete(self) -> None:
        conversation = self.chosen
        if conversation is None:
            return

        def delete(yes: bool | None) -> None:
            if yes:
                self.app.delete_conversation(conversation)
                self.look()

        self.app.push_screen(AskYes("Delete", f"Delete “{conversation.title}”? This cannot be undone."), delete)

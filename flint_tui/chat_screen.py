"""The chat screen: what its keys do."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from textual.binding import BindingType

from flint_tui import clipboard
from flint_tui.actions import CHAT_ACTIONS
from flint_tui.chat_view import ChatView
from flint_tui.live import Mode
from flint_tui.widgets.status_line import ModeToggle


class ChatScreen(ChatView):
    """The view, with an action_<id> method for every action of CHAT_ACTIONS."""

    BINDINGS: ClassVar[list[BindingType]] = [action.binding() for action in CHAT_ACTIONS]

    def on_mode_toggle_toggled(self, event: ModeToggle.Toggled) -> None:
        self.action_toggle_mode()

    # -- the reply

    def action_stop(self) -> None:
        """Stop the reply; without one, let go of the chosen message and the selection. Never leaves the app."""
        if self.session.reply is not None:
            self.session.reply.cancel.set()
        elif self.transcript.cursor is not None or self.selections:
            self.transcript.choose(None)
            self.clear_selection()
        else:
            self.composer.focus()

    def action_toggle_mode(self) -> None:
        """Applies from the next reply."""
        mode: Mode = "single" if self.session.options.mode == "speculative" else "speculative"
        if mode == "speculative" and self.facts is not None and self.facts.verify_width < 2:
            self.notify("This backend verifies one token a pass: speculation cannot pay here", severity="warning")
            return
        self.session.options = replace(self.session.options, mode=mode)
        self.show_state()
        self.show_figures()

    def action_regenerate(self) -> None:
        """Answer the last prompt again."""
        session = self.session
        if session.replying or not session.messages:
            return
        if session.messages[-1].role == "assistant":
            session.truncate(len(session.messages) - 1)
        if not session.messages:
            return
        self.show_conversation()
        session.start_reply()
        self.show_reply()

    def action_tint(self) -> None:
        settings = replace(self.app.settings, tint=not self.app.settings.tint)
        self.app.change_settings(settings)
        self.transcript.retint(settings.tint)
        self.notify("Accepted draft tokens are tinted" if settings.tint else "Tint is off", timeout=2)

    # -- moving

    def action_page_up(self) -> None:
        self.transcript.scroll_page_up(animate=False)

    def action_page_down(self) -> None:
        self.transcript.scroll_page_down(animate=False)

    def action_top(self) -> None:
        self.transcript.scroll_home(animate=False)

    def action_bottom(self) -> None:
        self.transcript.scroll_end(animate=False)

    def action_message_up(self) -> None:
        self._choose(-1)

    def action_message_down(self) -> None:
        self._choose(1)

    def _choose(self, step: int) -> None:
        entries = [entry for entry in self.transcript.entries if entry.message is not None]
        if not entries:
            return
        cursor = self.transcript.cursor
        at = entries.index(cursor) + step if cursor in entries else len(entries) - 1
        self.transcript.choose(entries[at] if at < len(entries) else None) if at >= 0 else None

    # -- copying

    def copy(self, text: str) -> None:
        self.app.copied = text
        driver = self.app._driver
        write = driver.write if driver is not None and not self.app.is_headless else None
        self.notify(clipboard.copy(text, write), markup=False)

    def action_copy_reply(self) -> None:
        messages = self.session.messages
        cursor = self.transcript.cursor
        if cursor is not None and cursor.message is not None:
            self.copy(messages[cursor.message].text)
        elif replies := [message for message in messages if message.role == "assistant"]:
            self.copy(replies[-1].text)
        else:
            self.notify("There is no reply to copy yet", severity="warning")

    def action_copy_code(self) -> None:
        for entry in reversed(self.transcript.entries):
            if entry.role == "assistant" and (blocks := entry.document.code_blocks()):
                self.copy(blocks[-1])
                return
        self.notify("There is no code block to copy", severity="warning")

    def action_copy_all(self) -> None:
        from flint_tui.conversations import to_markdown

        if self.session.conversation is None:
            self.notify("There is nothing to copy yet", severity="warning")
        else:
            self.copy(to_markdown(self.session.conversation, self.session.messages))

    # -- view

    def action_panels(self) -> None:
        self.app.change_settings(replace(self.app.settings, panels=not self.app.settings.panels))
        self.set_class(not self.app.settings.panels, "-no-panels")
        self.call_after_refresh(self.show_figures)

"""The chat screen: what its keys do."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from textual.binding import BindingType

from flint_tui import clipboard
from flint_tui.actions import CHAT_ACTIONS
from flint_tui.chat_view import ChatView
from flint_tui.conversations import Conversation, to_markdown
from flint_tui.engine_door import TurnOptions
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
        elif self.editing is not None:
            self.stop_editing()
            self.composer.clear()
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
        if self.session.conversation is None:
            self.notify("There is nothing to copy yet", severity="warning")
        else:
            self.copy(to_markdown(self.session.conversation, self.session.messages))

    # -- dialogs

    def action_sampling(self) -> None:
        from flint_tui.screens.sampling import SamplingScreen

        def change(options: TurnOptions | None) -> None:
            if options is not None:
                self.session.options = replace(options, mode=self.session.options.mode)

        self.app.push_screen(SamplingScreen(self.session.options), change)

    def action_system_prompt(self) -> None:
        from flint_tui.screens.ask import AskText

        def change(text: str | None) -> None:
            if text is not None:
                self.session.set_system(text.strip())

        note = "Applies from the next reply, to this conversation and to new ones."
        self.app.push_screen(AskText("System prompt", self.session.system, note), change)

    def action_conversations(self) -> None:
        from flint_tui.screens.conversations import ConversationsScreen

        def open_it(conversation: Conversation | None) -> None:
            if conversation is not None and self.may_leave():
                self.app.open_conversation(conversation)

        self.app.push_screen(ConversationsScreen(), open_it)

    def action_models(self) -> None:
        from flint_tui.screens.models import ModelsScreen

        def load(identifier: str | None) -> None:
            if identifier is not None and self.may_leave():
                self.app.load_model(identifier)

        self.app.push_screen(ModelsScreen(), load)

    def action_bench(self) -> None:
        from flint_tui.screens.bench import BenchScreen

        self.app.push_screen(BenchScreen())

    def action_log(self) -> None:
        from flint_tui.screens.log import LogScreen

        self.app.push_screen(LogScreen())

    # -- the conversation

    def may_leave(self) -> bool:
        """Whether nothing is being decoded; otherwise says so."""
        if self.session.replying:
            self.notify("A reply is running: Esc stops it", severity="warning")
        return not self.session.replying

    def action_new(self) -> None:
        if self.may_leave():
            self.session.new()
            self.show_conversation()
            self.show_figures()
            self.composer.focus()

    def action_fork(self) -> None:
        """Go on in a copy that ends at the chosen message, or at the last."""
        if not self.may_leave() or self.session.conversation is None:
            return
        cursor = self.transcript.cursor
        count = cursor.message + 1 if cursor is not None and cursor.message is not None else len(self.session.messages)
        fork = self.session.fork(count)
        self.show_conversation()
        if fork is not None:
            self.notify(f"Forked after message {count}: {fork.title}", markup=False)

    def action_rename(self) -> None:
        from flint_tui.screens.ask import AskLine

        conversation = self.session.conversation
        if conversation is None:
            self.notify("An empty conversation has no name yet", severity="warning")
            return

        def rename(title: str | None) -> None:
            if title and title.strip():
                self.app.rename_conversation(conversation, title.strip())

        self.app.push_screen(AskLine("Rename", conversation.title), rename)

    def action_delete(self) -> None:
        from flint_tui.screens.ask import AskYes

        conversation = self.session.conversation
        if conversation is None or not self.may_leave():
            return

        def delete(yes: bool | None) -> None:
            if yes:
                self.app.delete_conversation(conversation)

        self.app.push_screen(AskYes("Delete", f"Delete “{conversation.title}”? This cannot be undone."), delete)

    def action_export(self) -> None:
        from flint_tui.export import default_name, export
        from flint_tui.screens.ask import AskLine

        conversation, messages = self.session.conversation, list(self.session.messages)
        if conversation is None:
            self.notify("There is nothing to export yet", severity="warning")
            return

        def write(path: str | None) -> None:
            if path:
                self.notify(export(conversation, messages, path), markup=False)

        self.app.push_screen(AskLine("Export (.md or .json)", default_name(conversation)), write)

    # -- editing

    def action_edit(self) -> None:
        """Take the chosen prompt, or the last one, back into the composer."""
        if not self.may_leave():
            return
        prompts = [i for i, message in enumerate(self.session.messages) if message.role == "user"]
        cursor = self.transcript.cursor
        wanted = cursor.message if cursor is not None and cursor.message is not None else len(self.session.messages)
        index = max((i for i in prompts if i <= wanted), default=None)
        if index is None:
            self.notify("There is no prompt to edit yet", severity="warning")
            return
        self.editing = index
        self.composer.put(self.session.messages[index].text)
        self.composer.focus()
        self.show_queue()

    def action_editor(self) -> None:
        """Write the prompt in $VISUAL or $EDITOR."""
        from flint_tui.editor import edit_text

        text, problem = edit_text(self.app, self.composer.text)
        if problem:
            self.notify(problem, severity="error", markup=False)
        elif text is not None:
            self.composer.put(text)

    # -- view

    def action_panels(self) -> None:
        self.app.change_settings(replace(self.app.settings, panels=not self.app.settings.panels))
        self.set_class(not self.app.settings.panels, "-no-panels")
        self.call_after_refresh(self.show_figures)

"""Every key of the app, with the user's own bindings."""

from __future__ import annotations

from itertools import groupby

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from flint_tui.actions import ACTIONS, FIXED_KEYS, key_name
from flint_tui.screens.dialog import Dialog
from flint_tui.settings import keys_path

GROUPS = ("Compose", "Reply", "Conversation", "Model", "Copy", "Move", "View", "App")


class HelpScreen(Dialog[None]):
    title_text = "Keys"
    keys = "PgUp PgDn scroll · Esc closes"

    def body(self) -> ComposeResult:
        with VerticalScroll(id="help-scroll", can_focus=True):
            yield Static(self.content())

    def on_mount(self) -> None:
        self.query_one("#help-scroll").focus()

    def content(self) -> Content:
        keymap = self.app.keys
        rows = [(a.group, key_name(keymap.get(a.id, a.key)), a.title) for a in ACTIONS]
        rows += [(group, key_name(keys), title) for group, keys, title in FIXED_KEYS]
        rows.sort(key=lambda row: GROUPS.index(row[0]))
        lines: list[Content] = []
        for group, members in groupby(rows, key=lambda row: row[0]):
            lines += [Content(""), Content.styled(group, "bold $accent")]
            for _, keys, title in members:
                lines.append(Content.assemble((f"  {keys:<22} ", "$foreground"), (title, "$muted")))
        lines += [Content(""), Content.styled(f"Change keys in {keys_path()}", "$muted")]
        lines.append(Content.styled('  [keys]\n  toggle_mode = "ctrl+k"', "$muted"))
        return Content("\n").join(lines[1:])

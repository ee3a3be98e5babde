"""Every key of the app, with the user's own bindings."""

from __future__ import annotations

from itertools import groupby, zip_longest
from textwrap import wrap

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from flint_tui.actions import ACTIONS, FIXED_KEYS, key_name
from flint_tui.screens.dialog import Dialog
from flint_tui.settings import keys_path

GROUPS = ("Compose", "Reply", "Conversation", "Model", "Copy", "Move", "View", "App")
TITLES_AT = 25  # cells left of what a key does


class HelpScreen(Dialog[None]):
    title_text = "Keys"
    keys = "PgUp PgDn scroll · Esc closes"

    def body(self) -> ComposeResult:
        with VerticalScroll(id="help-scroll", can_focus=True):
            yield Static(id="help-text")

    def on_mount(self) -> None:
        self.query_one("#help-scroll").focus()

    def on_resize(self) -> None:
        """The words are wrapped beside their keys, which takes the width."""
        self.call_after_refresh(lambda: self.query_one("#help-text", Static).update(self.content()))

    def content(self) -> Content:
        room = max(10, self.query_one("#help-scroll").scrollable_content_region.width - TITLES_AT)
        keymap = self.app.keys
        rows = [(a.group, key_name(keymap.get(a.id, a.key)), a.title) for a in ACTIONS]
        rows += [(group, key_name(keys), title) for group, keys, title in FIXED_KEYS]
        rows.sort(key=lambda row: GROUPS.index(row[0]))
        lines: list[Content] = []
        for group, members in groupby(rows, key=lambda row: row[0]):
            lines += [Content(""), Content.styled(group, "bold $accent")]
            for _, keys, title in members:
                for key, part in zip_longest([keys], wrap(title, room), fillvalue=""):
                    lines.append(Content.assemble((f"  {key:<22} ", "$foreground"), (part, "$muted")))
        lines += [Content(""), Content.styled(f"Change keys in {keys_path()}", "$muted")]
        lines.append(Content.styled('  [keys]\n  toggle_mode = "ctrl+k"', "$muted"))
        return Content("\n").join(lines[1:])

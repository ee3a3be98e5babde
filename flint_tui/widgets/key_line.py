"""The last line: the keys one needs most. A click does what the key does.

Textual's Footer builds seven widgets and composes them again whenever the focus moves: a fifth of the time to the first
paint. This is one line of text.
"""

from __future__ import annotations

from collections.abc import Iterable

from textual.content import Content
from textual.style import Style

from flint_tui.widgets.status_line import StatusLabel

_NAMES = {"escape": "esc", "left": "←", "right": "→", "enter": "⏎"}


def short_key(key: str) -> str:
    """The first of an action's keys, as short as terminals write it: "ctrl+t" -> "^t"."""
    key = key.split(",")[0].strip()
    return _NAMES.get(key, key.replace("ctrl+", "^").replace("alt+", "⌥"))


class KeyLine(StatusLabel):
    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.auto_links = False  # keys are no links: they keep their colours

    def show_keys(self, keys: Iterable[tuple[str, str, str]]) -> None:
        """keys: (key, word, Textual action that a click runs)."""
        parts = []
        for key, word, action in keys:
            part = Content.assemble((short_key(key), "bold $accent"), (f" {word}", "$muted"))
            parts.append(part.stylize(Style.from_meta({"@click": action})))
        self.show(Content("  ").join(parts))

"""What stands in an empty conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.content import Content

from flint_tui.actions import ACTIONS, key_name
from flint_tui.live import EngineFacts
from flint_tui.widgets.status_line import StatusLabel

if TYPE_CHECKING:
    from flint_tui.app import FlintApp

_MARK = ("   ▟▙   ", "  ▟██▙  ", " ▟████▙ ", " ▜██▛▀  ")


_TIPS = (
    ("toggle_mode", "single pass, speculative"),
    ("conversations", "earlier conversations"),
    ("command_palette", "every action by name"),
)


class Welcome(StatusLabel):
    def __init__(self, id: str) -> None:
        super().__init__(id)

    def show_engine(self, facts: EngineFacts | None, state: str) -> None:
        if facts is None:
            second = Content.styled(state or "loading", "$muted")
        else:
            second = Content.assemble(
                (facts.model, "$foreground"), ("  on  ", "$muted"), (facts.backend, "$foreground")
            )
        lines = [
            *(Content.styled(row, "$accent") for row in _MARK),
            Content(""),
            Content.styled("f l i n t", "bold"),
            second,
            Content(""),
            *(Content.assemble((self._key(id), "$accent"), (f"  {what:<24}", "$muted")) for id, what in _TIPS),
        ]
        self.show(Content("\n").join(lines))

    def _key(self, action: str) -> str:
        """The key of an action, as the user has set it."""
        app: FlintApp = self.app  # type: ignore[assignment]
        default = next(a.key for a in ACTIONS if a.id == action)
        return key_name(app.keys.get(action, default))

"""What stands in an empty conversation."""

from __future__ import annotations

from textual.content import Content

from flint_tui.live import EngineFacts
from flint_tui.widgets.status_line import StatusLabel

_MARK = ("   ▟▙   ", "  ▟██▙  ", " ▟████▙ ", " ▜██▛▀  ")


_TIPS = (
    ("Ctrl+T", "single pass, speculative"),
    ("Ctrl+O", "earlier conversations"),
    ("Ctrl+P", "every action by name"),
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
            *(Content.assemble((key, "$accent"), (f"  {what:<24}", "$muted")) for key, what in _TIPS),
        ]
        self.show(Content("\n").join(lines))

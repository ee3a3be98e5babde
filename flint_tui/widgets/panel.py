"""What all live panels share: a fixed size, and a repaint only when the text has changed."""

from __future__ import annotations

from textual.content import Content
from textual.widget import Widget

from flint_tui.live import EngineFacts, Figures, Mode
from flint_tui.widgets.glyphs import sides

PANEL_WIDTH = 32  # cells inside the sidebar


class Panel(Widget):
    """A block of the sidebar. Sub-classes turn figures into lines; `height` lines always."""

    lines: int = 1
    title = ""

    def __init__(self) -> None:
        super().__init__()
        self.styles.height = self.lines + 1
        self._content = Content("")

    def content(self, facts: EngineFacts, figures: Figures, last: dict[Mode, Figures]) -> list[Content]:
        raise NotImplementedError

    def show(self, facts: EngineFacts, figures: Figures, last: dict[Mode, Figures]) -> None:
        """Repaint if these figures read differently."""
        content = Content("\n").join(self.content(facts, figures, last))
        if content.plain != self._content.plain or content.spans != self._content.spans:
            self._content = content
            self.refresh()

    def render(self) -> Content:
        return self._content

    def heading(self, right: Content | str = "") -> Content:
        return sides(Content.styled(self.title, "bold $muted"), right, PANEL_WIDTH)

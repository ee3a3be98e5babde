"""What all live panels share: a fixed size, and a repaint of the rows whose text has changed."""

from __future__ import annotations

from itertools import zip_longest

from rich.segment import Segment
from textual.content import Content
from textual.geometry import Region
from textual.strip import Strip
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
        self._rows: list[Content] = []
        self._strips: dict[int, Strip] = {}

    def content(self, facts: EngineFacts, figures: Figures, last: dict[Mode, Figures]) -> list[Content]:
        raise NotImplementedError

    def show(self, facts: EngineFacts, figures: Figures, last: dict[Mode, Figures]) -> None:
        """Repaint the rows that read differently with these figures."""
        before, self._rows = self._rows, self.content(facts, figures, last)
        changed = [
            y
            for y, (row, old) in enumerate(zip_longest(self._rows, before))
            if row is None or old is None or row.plain != old.plain or row.spans != old.spans
        ]
        for y in changed:
            self._strips.pop(y, None)
        if changed:
            self.refresh(Region(0, changed[0], self.size.width, changed[-1] + 1 - changed[0]))

    def render(self) -> Content:
        return Content("\n").join(self._rows)

    def render_lines(self, crop: Region) -> list[Strip]:
        """Row by row, those that have not changed from before: a panel has no border, padding or tint."""
        if self.text_selection is not None:
            return super().render_lines(crop)
        return [self._row(y).crop(*crop.column_span) for y in crop.line_range]

    def _row(self, y: int) -> Strip:
        width = self.size.width
        strip = self._strips.get(y)
        if strip is None or strip.cell_length != width:
            row = self._rows[y] if y < len(self._rows) else Content("")
            base = self.visual_style
            segments = [Segment(text, style.rich_style) for text, style in row.render(base, "", self._get_style)]
            strip = Strip(segments).adjust_cell_length(width, base.rich_style)
            assert base.background is not None
            for line_filter in self.get_line_filters():
                strip = strip.apply_filter(line_filter, base.background)
            self._strips[y] = strip
        return strip

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._strips.clear()

    def heading(self, right: Content | str = "") -> Content:
        return sides(Content.styled(self.title, "bold $muted"), right, PANEL_WIDTH)

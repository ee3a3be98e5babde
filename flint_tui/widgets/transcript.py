"""The conversation, painted line by line.

One widget paints everything: only the lines on screen exist as strips, and a growing reply costs its open block. With
a Markdown widget a message, every append lays out the whole conversation again; here message 2,000 costs what
message 2 does.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, pairwise
from math import ceil
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message as TextualMessage
from textual.scroll_view import ScrollView
from textual.scrollbar import ScrollBar
from textual.strip import Strip
from textual.widget import Widget

from flint_tui.give_way import give_way
from flint_tui.text.blocks import Line, Span
from flint_tui.widgets.entry import Entry
from flint_tui.widgets.roles import role_style

if TYPE_CHECKING:
    from textual import events
    from textual.selection import Selection

GUTTER = 3  # cells left of the text: a bar and room to breathe
MARGIN = 2  # cells right of it
WIDEST = 108  # a longer line is hard to read


class Transcript(ScrollView, can_focus=True):
    """Shows entries; follows the end while the end is in view, and stays put once the reader has scrolled away."""

    ALLOW_SELECT = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "scroll_down", "Down", show=False),
        Binding("up,k", "scroll_up", "Up", show=False),
        Binding("pagedown,ctrl+d,space", "page_down", "Page down", show=False),
        Binding("pageup,ctrl+u", "page_up", "Page up", show=False),
        Binding("home,g", "scroll_home", "Top", show=False),
        Binding("end,G", "scroll_end", "Bottom", show=False),
    ]

    class Selected(TextualMessage):
        """A message was chosen with the mouse."""

        def __init__(self, entry: Entry) -> None:
            super().__init__()
            self.entry = entry

    def __init__(self, id: str) -> None:
        super().__init__(id=id)
        self.entries: list[Entry] = []
        self.cursor: Entry | None = None  # the chosen message, if any
        self.following = True
        self._tops: list[int] = [0]  # first line of each entry, and the total
        self._styles: dict[tuple[str, ...], Style] = {}
        self._resize_pending = False
        self._measuring = False  # the text has grown, the view may follow

    # -- content

    def replace_all(self, entries: list[Entry]) -> None:
        """Show another conversation, from its end."""
        self.entries = entries
        self.cursor = None
        self.following = True
        self._measure(0)
        self.refresh()

    def add(self, entry: Entry) -> None:
        """Append an entry and go to it."""
        self.entries.append(entry)
        self.following = True
        self._measure(len(self.entries) - 1)
        self.refresh()

    def drop(self, entry: Entry) -> None:
        index = self.entries.index(entry)
        del self.entries[index]
        self._measure(index)
        self.refresh()

    def changed(self, entry: Entry) -> None:
        """The last entry's document or footer has changed: repaint what is in view of it."""
        index = len(self.entries) - 1
        if self.entries[index] is not entry:
            index = self.entries.index(entry)
        view = self.scroll_offset.y
        self._measure(index)
        if self.scroll_offset.y != view:
            return  # scrolled: everything is painted anyway
        first = max(0, self._tops[index] + entry.first_changed - view)
        if first < self.size.height:
            self._refresh_lines(first)

    def retint(self, tint: bool) -> None:
        for entry in self.entries:
            entry.document.tint = tint
        self._measure(0)
        self.refresh()

    def choose(self, entry: Entry | None) -> None:
        """Mark a message and bring it into view."""
        self.cursor = entry
        if entry is not None:
            index = self.entries.index(entry)
            top, bottom = self._tops[index], self._tops[index + 1]
            view = self.scroll_offset.y
            if top < view or bottom > view + self.size.height:
                self.scroll_to(y=max(0, min(top, bottom - self.size.height)), animate=False)
        self.refresh()

    @property
    def line_count(self) -> int:
        return self._tops[-1]

    # -- geometry

    @property
    def text_width(self) -> int:
        return max(16, min(WIDEST, self.scrollable_content_region.width - GUTTER - MARGIN))

    def _measure(self, first: int) -> None:
        """Heights from entry `first` on; then keep the end in view if it was."""
        self._measuring = True
        width = self.text_width
        del self._tops[first + 1 :]
        heights = (entry.height(width) for entry in self.entries[first:])
        self._tops += list(accumulate(heights, initial=self._tops[first]))[1:]
        total = self._tops[-1] + 1
        if total != self.virtual_size.height or self.virtual_size.width != self.size.width:
            following = self.following
            self._resize_contents(Size(self.size.width, total))
            self.following = following  # fewer lines clamp the position, which is not the reader's doing
        if self.following:
            # force: whether there is a scrollbar is known only after the next layout
            self.scroll_end(animate=False, immediate=True, force=True)
            self.following = True
        self._measuring = False
        self._tell_scrollbar()

    def _resize_contents(self, size: Size) -> None:
        """Set virtual_size. Textual lays the whole screen out again when it changes (17 ms), which is needed only when
        the scrollbar comes or goes: otherwise the scrollbar alone is told."""
        if self.show_vertical_scrollbar == (size.height > self.size.height) and size.width == self.virtual_size.width:
            self.set_reactive(Widget.virtual_size, size)  # type: ignore[arg-type]
            self.scroll_y = self.validate_scroll_y(self.scroll_y)
        else:
            self.virtual_size = size

    def _refresh_lines(self, first: int = 0) -> None:
        """Paint the text in view again, from one of its lines on; not the scrollbar."""
        self.refresh(Region(0, first, self.scrollable_content_region.width, self.size.height - first))

    def _tell_scrollbar(self) -> None:
        """It is painted again only if its thumb moves by an eighth of a cell; a growing reply moves it seldom."""
        if self.show_vertical_scrollbar:
            bar = self.vertical_scrollbar
            before = _thumb(bar)
            bar.set_reactive(ScrollBar.window_virtual_size, self.virtual_size.height)
            bar.set_reactive(ScrollBar.position, bar.validate_position(self.scroll_y))
            if _thumb(bar) != before:
                bar.refresh()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        if not self._measuring:
            self._tell_scrollbar()
        if round(old_value) != round(new_value):
            self._refresh_lines()
        # Text that grows never moves the view; only the reader lets go of the end, and only reaching it holds on again.
        if new_value >= self.max_scroll_y:
            self.following = True
        elif new_value < old_value:
            self.following = False

    def watch_show_vertical_scrollbar(self, shown: bool) -> None:
        if shown:  # the view may have moved before there was a scrollbar
            self.vertical_scrollbar.position = self.scroll_y

    def on_resize(self, event: events.Resize) -> None:
        # A resize storm wraps the text once, not once an event.
        if not self._resize_pending:
            self._resize_pending = True
            self.call_after_refresh(self._wrap_again)

    def _wrap_again(self) -> None:
        self._resize_pending = False
        anchor = None
        if not self.following and self.entries:
            index = min(bisect_right(self._tops, self.scroll_offset.y) - 1, len(self.entries) - 1)
            height = max(1, self._tops[index + 1] - self._tops[index])
            anchor = index, (self.scroll_offset.y - self._tops[index]) / height
        self._measure(0)
        if anchor is not None:
            index, share = anchor
            height = self._tops[index + 1] - self._tops[index]
            self.scroll_to(y=self._tops[index] + round(share * height), animate=False)
        self.refresh()

    def entry_at(self, y: int) -> tuple[Entry, int] | None:
        """The entry on this line of the whole transcript, and the line within it."""
        if not 0 <= y < self._tops[-1]:
            return None
        index = bisect_right(self._tops, y) - 1
        return self.entries[index], y - self._tops[index]

    # -- painting

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._styles.clear()
        for entry in self.entries:
            entry.strips.clear()

    def render_line(self, y: int) -> Strip:
        """A line of the view that knows which text it shows: what Textual asks for to select text with the mouse."""
        return self._strip(y + self.scroll_offset.y).apply_offsets(0, y + self.scroll_offset.y)

    def render_lines(self, crop: Region) -> list[Strip]:
        """Without Textual's way around a widget's lines: there is no border, padding or tint, filters are in the styles
        already, and the strips that are kept keep their escape sequences."""
        top = self.scroll_offset.y
        left, right = crop.column_span
        strips = []
        for y in crop.line_range:
            give_way()
            strip = self._strip(y + top)
            if right > strip.cell_length:  # the scrollbar's room
                strip = strip.extend_cell_length(right, self._style())
            strips.append(strip if (left, right) == (0, strip.cell_length) else strip.crop(left, right))
        return strips

    def _strip(self, y: int) -> Strip:
        """A line of the whole transcript."""
        width = self.size.width
        found = self.entry_at(y)
        if found is None:
            return Strip.blank(width, self._style())
        entry, index = found
        line = entry.line(index)
        selection = self.text_selection
        pen = entry.running and entry.is_last_body_line(index)
        state = (line, width, pen, entry is self.cursor)
        cached = entry.strips.get(index)
        if selection is None and cached is not None and cached[0] == state:
            strip = cached[1]
            assert isinstance(strip, Strip)
        else:
            strip = self._paint(entry, line, y, width, pen, selection)
            if selection is None:
                if len(entry.strips) > 512:
                    entry.strips.clear()
                entry.strips[index] = (state, strip)
        return strip

    def _paint(
        self, entry: Entry, line: Line | None, y: int, width: int, pen: bool, selection: Selection | None
    ) -> Strip:
        if line is None:
            return Strip.blank(width, self._style())
        base = (entry.role,)
        bar = "▌" if entry.role in ("user", "error") or entry is self.cursor else " "
        bar_role = "chosen" if entry is self.cursor else "bar" if entry.role == "user" else entry.role
        code = line.block.kind == "code" and entry.role == "assistant"
        inner = (*base, "block") if code else base
        if bar == " " and not (code or pen or line.prefix or selection) and not _spans(line):
            text = " " * GUTTER + line.block.text[line.start : line.end]  # most lines, in one piece
            return Strip([Segment(text, self._style(*base))]).adjust_cell_length(width, self._style(*base))
        segments = [Segment(bar, self._style(*base, bar_role)), Segment(" " * (GUTTER - 1), self._style(*base))]
        if line.prefix:
            segments.append(Segment(line.prefix, self._style(*base, "bullet")))
        if code:
            segments.append(Segment(" ", self._style(*inner)))
        lead = sum(len(segment.text) for segment in segments)
        segments += self._text(line, inner)
        if pen:
            segments.append(Segment("▍", self._style(*base, "pen")))
        used = sum(cell_len(segment.text) for segment in segments)
        room = min(width, GUTTER + self.text_width) if code else width
        if used < room:
            segments.append(Segment(" " * (room - used), self._style(*inner)))
        if room < width:
            segments.append(Segment(" " * (width - max(used, room)), self._style(*base)))
        strip = Strip(segments).adjust_cell_length(width, self._style(*base))
        return strip if selection is None else self._highlight(strip, selection.get_span(y), lead)

    def _text(self, line: Line, base: tuple[str, ...]) -> list[Segment]:
        """The line's text, cut where roles change."""
        text, start, end = line.block.text, line.start, line.end
        spans = _spans(line)
        if not spans:
            return [Segment(text[start:end], self._style(*base))] if end > start else []
        cuts = sorted({start, end, *(max(s.start, start) for s in spans), *(min(s.end, end) for s in spans)})
        segments = []
        for a, b in pairwise(cuts):
            roles = tuple(s.role for s in spans if s.start <= a and s.end >= b)
            segments.append(Segment(text[a:b], self._style(*base, *roles)))
        return segments

    def _style(self, *roles: str) -> Style:
        style = self._styles.get(roles)
        if style is None:
            visual = self.visual_style
            for role in roles:
                visual += role_style(role, self.app.theme_variables, self.app.no_color)
            style = self._filtered(Strip([Segment(" ", visual.rich_style)]))._segments[0].style
            assert style is not None
            self._styles[roles] = style
        return style

    def _filtered(self, strip: Strip) -> Strip:
        background = self.visual_style.background
        assert background is not None
        for line_filter in self.get_line_filters():
            strip = strip.apply_filter(line_filter, background)
        return strip

    def _highlight(self, strip: Strip, span: tuple[int, int] | None, lead: int) -> Strip:
        """Show the selected part; offsets count characters."""
        if span is None:
            return strip
        start, end = max(span[0], lead), span[1]
        style = self.screen.get_component_rich_style("screen--selection")
        segments: list[Segment] = []
        at = 0
        for text, own, _ in strip:
            for character in text:
                chosen = at >= start and (end == -1 or at < end)
                segments.append(Segment(character, own + style if chosen and own else own))
                at += 1
        return self._filtered(Strip(segments).simplify())

    # -- copying

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The selected text as it was written: soft line breaks are not copied, nor is anything but the message."""
        first = selection.start.y if selection.start is not None else 0
        last = selection.end.y if selection.end is not None else self.line_count - 1
        parts: list[str] = []
        previous: Line | None = None
        for y in range(max(0, first), min(last, self.line_count - 1) + 1):
            found = self.entry_at(y)
            line = found[0].line(found[1]) if found else None
            if line is None:
                parts.append("\n" if parts else "")
                previous = None
                continue
            lead = GUTTER + len(line.prefix) + int(line.block.kind == "code")
            begin, end = line.start, line.end
            if selection.start is not None and y == first:
                begin = min(end, line.start + max(0, selection.start.x - lead))
            if selection.end is not None and y == last:
                end = max(begin, min(end, line.start + max(0, selection.end.x - lead)))
            if previous is not None:
                joined = line.soft and previous.block.text[: previous.end] == line.block.text[: previous.end]
                parts.append(line.block.text[previous.end : line.start] if joined else "\n")
            parts.append(line.block.text[begin:end])
            previous = line
        text = "".join(parts).strip("\n")
        return (text, "\n") if text else None

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        found = self.entry_at(event.y + self.scroll_offset.y)
        if found and found[0].message is not None and event.chain == 2:
            self.post_message(self.Selected(found[0]))


def _spans(line: Line) -> list[Span]:
    return [span for span in line.block.spans if span.start < line.end and span.end > line.start]


def _thumb(bar: ScrollBar) -> tuple[int, int]:
    """Where the thumb begins and ends, in eighths of a cell."""
    size, hidden = bar.size.height, bar.window_virtual_size - bar.window_size
    if hidden <= 0 or not size:
        return (0, 0)
    length = max(1.0, bar.window_size * size / bar.window_virtual_size)
    start = int((size - length) * bar.position / hidden * 8)
    return start, start + ceil(length * 8)

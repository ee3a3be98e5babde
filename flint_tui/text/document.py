"""A message that may still be growing, as screen lines.

Appending costs the open block at the end, never the message: CommonMark cannot change a block above the last one, so
those are parsed, highlighted and wrapped once. An open block longer than PLAIN_LIMIT is shown as plain text, wrapped
from its last line on, until it closes.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from flint_tui.give_way import give_way
from flint_tui.text import markdown
from flint_tui.text.blocks import Block, Line, Span, layout

PLAIN_LIMIT = 2048  # characters of an open block before it is shown as plain text
PLAIN_PIECE = 4096  # characters of plain text that are wrapped together
Marks = Sequence[tuple[int, int]]
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})([^\n`]*)\n")


class Document:
    """One message body. `plain`: exactly as written (what a user typed), without Markdown."""

    def __init__(
        self, source: str = "", *, plain: bool = False, closed: bool = True, tint: bool = False, marks: Marks = ()
    ) -> None:
        self.plain = plain
        self.source = ""
        self._marks = list(marks)  # source ranges of accepted draft tokens, ascending
        self._tint = tint
        self._width = 0
        self._reset()
        if source:
            self.append(source)
        if closed:
            self.close()

    def _reset(self) -> None:
        self._closed = False
        self._blocks: list[Block] = []  # that cannot change any more
        self._lines: list[Line] = []  # their screen lines, at _width
        self._open: list[Block] = []  # what may still change
        self._open_lines: list[Line] = []
        self._tail = 0  # source offset where the open part starts
        self._plain_tail = False  # the open part is shown as plain text
        self.stable = 0  # screen lines, from the first, that the last `append` or `close` left as they were
        self._searched = 0  # source offset up to which a plain tail was searched for its end

    # -- growing

    def append(self, text: str, marks: Marks = ()) -> None:
        """Add text; `marks` are ranges of accepted draft tokens in source offsets."""
        self._marks += marks
        self.stable = len(self._lines)
        self.source += text
        if self.plain or (self._plain_tail and not self._may_have_ended()):
            self._grow_plain()
        else:
            self._parse(closing=False)

    def close(self) -> None:
        """The message is complete: parse what was still open."""
        self._closed = True
        self.stable = len(self._lines)
        if not self.plain:
            self._parse(closing=True)

    @property
    def tint(self) -> bool:
        """Whether accepted draft tokens carry the role "accepted"."""
        return self._tint

    @tint.setter
    def tint(self, tint: bool) -> None:
        if tint != self._tint:
            self._tint = tint
            if self._marks:
                closed = self._closed
                self._reset()
                self._closed = closed
                self._parse(closing=closed)

    # -- showing

    def height(self, width: int) -> int:
        """Screen lines at this width in cells."""
        if width != self._width:
            self._width = width
            self._lines = self._layout(self._blocks)
            self._open_lines = self._layout(self._open)
        return len(self._lines) + len(self._open_lines)

    @property
    def width(self) -> int:
        """The width that `height` was last asked for."""
        return self._width

    def line(self, index: int) -> Line:
        """One screen line, at the width that `height` was last asked for."""
        closed = len(self._lines)
        return self._lines[index] if index < closed else self._open_lines[index - closed]

    def lines(self, width: int) -> list[Line]:
        self.height(width)
        return self._lines + self._open_lines

    def code_blocks(self) -> list[str]:
        tokens = markdown.parser().parse(self.source)
        return [token.content for token in tokens if token.type in ("fence", "code_block")]

    # -- inside

    def _layout(self, blocks: list[Block]) -> list[Line]:
        return [line for block in blocks for line in layout(block, self._width)] if self._width else []

    def _parse(self, closing: bool) -> None:
        """Parse from the start of the open part; everything but its last block is closed for good."""
        tail = self.source[self._tail :]
        tokens = markdown.parser().parse(tail)
        line_map = markdown.LineMap(tail)
        border = len(tail) if closing else line_map.offset(markdown.last_part(tokens))
        if border == 0 and len(tail) > PLAIN_LIMIT:
            if not self._plain_tail:
                self._plain_tail = True
                self._searched = self._tail
                self._open = self._open[:1]
                self._restart_plain()
            self._grow_plain()
            return
        self._plain_tail = False
        give_way()
        blocks = markdown.to_blocks(tokens, line_map, self._tail)
        if blocks:
            # The part that was open keeps its distance to the block above: parsed alone, a list item would not know it.
            space, gap = (self._open[0].space, self._open[0].gap) if self._open else (int(bool(self._blocks)), "")
            blocks[0] = replace(blocks[0], space=space, gap=gap)
        blocks = [self._tinted(block) for block in blocks]
        border += self._tail
        split = next((i for i, block in enumerate(blocks) if block.source[0] >= border), len(blocks))
        self._tail = border
        give_way()
        self._blocks += blocks[:split]
        self._lines += self._layout(blocks[:split])
        self._open = blocks[split:]
        self._open_lines = self._layout(self._open)

    def _restart_plain(self) -> None:
        start, kind, label = self._tail, "text", ""
        if fence := _FENCE.match(self.source, start):
            start, kind, label = fence.end(), "code", fence.group(2).strip()
        space = self._open[0].space if self._open else int(bool(self._blocks))
        self._open = [Block("", kind=kind, space=space, source=(start, start), label=label)]
        self._open_lines = []

    def _grow_plain(self) -> None:
        """Show the open part as plain text in pieces; only the last piece is wrapped again."""
        if not self._open:
            self._open = [Block("")]
        self.stable = len(self._lines) + max(0, len(self._open_lines) - 1)  # wrapping is greedy
        while True:
            piece = self._open.pop()
            del self._open_lines[len(self._open_lines) - self._piece_lines(piece) :]
            start = piece.source[0]
            text = self.source[start:]
            full = len(text) > PLAIN_PIECE
            if full:
                cut = text.rfind("\n", 0, PLAIN_PIECE)
                cut = cut if cut >= 0 else max(text.rfind(" ", 0, PLAIN_PIECE), PLAIN_PIECE // 2)
                text = text[:cut]
            spans = tuple(Span(a - start, b - start, "accepted") for a, b in self._marks_in(start, start + len(text)))
            piece = replace(piece, text=text, spans=spans, source=(start, start + len(text)))
            self._open.append(piece)
            self._open_lines += self._layout([piece])
            if not full:
                return
            start = piece.source[1] + int(self.source[piece.source[1]] in "\n ")
            self._open.append(Block("", kind=piece.kind, source=(start, start)))
            self._open_lines += self._layout(self._open[-1:])

    def _piece_lines(self, piece: Block) -> int:
        return len(layout(piece, self._width)) if self._width and self._open_lines else 0

    def _may_have_ended(self) -> bool:
        """Whether text since the last look could end the plain block: its closing fence, or a blank line."""
        begin, end = self._searched, self.source.rfind("\n") + 1
        if end <= begin:
            return False
        self._searched = end
        if fence := _FENCE.match(self.source, self._tail):
            marker = fence.group(1)
            closing = rf"^ {{0,3}}{re.escape(marker[0])}{{{len(marker)},}}[ \t]*$"
            return re.search(closing, self.source[max(begin, fence.end()) : end], re.MULTILINE) is not None
        return "\n\n" in self.source[max(begin - 1, self._tail) : end]

    def _marks_in(self, start: int, end: int) -> list[tuple[int, int]]:
        if not self._tint or not self._marks:
            return []
        found = []
        for a, b in self._marks[max(0, bisect_right(self._marks, (start, start)) - 1) :]:
            if a >= end:
                break
            if b > start:
                found.append((max(a, start), min(b, end)))
        return found

    def _tinted(self, block: Block) -> Block:
        """Carry source marks over to the shown text, which is the source without its markup characters, in order."""
        marks = self._marks_in(*block.source)
        if not marks or block.kind in ("rule", "table"):
            return block
        where = _align(block.text, self.source, *block.source)
        spans = list(block.spans)
        index = 0
        for a, b in marks:
            while index < len(where) and where[index] < a:
                index += 1
            begin = index
            while index < len(where) and where[index] < b:
                index += 1
            if index > begin:
                spans.append(Span(begin, index, "accepted"))
        return replace(block, spans=tuple(spans))


def _align(text: str, source: str, start: int, end: int) -> list[int]:
    """For each character of `text`, the source offset it came from (non-decreasing)."""
    where = []
    at = start
    for character in text:
        found = source.find(character, at, min(end, at + 64))
        if found >= 0:
            at = found + 1
        where.append(max(start, at - 1))
    return where

"""What a message is made of once parsed: blocks of styled text that know how to break themselves into screen lines.

A role ("strong", "code.keyword", ...) names a style; the widget that paints decides what it looks like.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from rich.cells import cell_len

from flint_tui.text.wrap import wrap

Kind = Literal["text", "code", "rule", "table"]


class Span(NamedTuple):
    """text[start:end] of a block has this role. Later spans win where they overlap."""

    start: int
    end: int
    role: str


@dataclass(frozen=True, slots=True)
class Block:
    """One paragraph, heading, list line, code block, rule or table row group.

    text: what is shown, with hard line breaks. first / rest: prefix of the first line and of the others (bullets,
    quote bars, indents). space: blank lines above, which begin with `gap`. source: the range of the message that it
    came from. label: a code block's language.
    """

    text: str
    spans: tuple[Span, ...] = ()
    kind: Kind = "text"
    first: str = ""
    rest: str = ""
    space: int = 0
    gap: str = ""
    source: tuple[int, int] = (0, 0)
    label: str = ""


class Line(NamedTuple):
    """One screen line: block.text[start:end] after `prefix`. soft: no newline stands between it and the line above."""

    block: Block
    start: int
    end: int
    prefix: str
    soft: bool


BLANK = Block("")


def layout(block: Block, width: int) -> list[Line]:
    """The screen lines of a block at this width in cells, the space above it included."""
    lines = [Line(BLANK, 0, 0, block.gap, False)] * block.space
    if block.kind == "rule":
        return [
            *lines,
            Line(Block("─" * max(1, width - cell_len(block.first)), (), "rule"), 0, width, block.first, False),
        ]
    if block.kind == "table":
        return [*lines, *(Line(block, a, b, block.rest, False) for a, b in _clipped(block.text))]
    room = max(8, width - cell_len(block.rest) - (2 if block.kind == "code" else 0))
    prefix = block.first
    for begin, end in wrap(block.text, room):
        soft = begin > 0 and block.text[begin - 1] != "\n"
        lines.append(Line(block, begin, end, prefix, soft))
        prefix = block.rest
    return lines


def _clipped(text: str) -> list[tuple[int, int]]:
    slices = []
    start = 0
    for row in text.split("\n"):
        slices.append((start, start + len(row)))
        start += len(row) + 1
    return slices

"""Breaks text into screen lines by cell width, as slices: nothing is copied, so copying text back is exact."""

from __future__ import annotations

import re

from rich.cells import cell_len

# Wide scripts break between any two characters, except that closing punctuation never starts a line.
_WIDE = (
    "\u1100-\u115f\u2e80-\u303e\u3041-\u33ff\u3400-\u4dbf\u4e00-\u9fff"
    "\ua000-\ua4cf\uac00-\ud7a3\uf900-\ufaff\uff01-\uff60"
)
_CLOSING = "、。，．）」』】〉》〕！？：；…ー,.!?:;)"
_PIECES = re.compile(rf"[{_WIDE}][{_CLOSING}]*|[^\s{_WIDE}]+|\s+")


def wrap(text: str, width: int, start: int = 0) -> list[tuple[int, int]]:
    """Slices (begin, end) of `text` from `start`, one a screen line of at most `width` cells.

    Newlines end a line; spaces at a soft break belong to no slice. Text ending in a newline has an empty last line.
    """
    lines: list[tuple[int, int]] = []
    while True:
        newline = text.find("\n", start)
        end = len(text) if newline < 0 else newline
        if end - start <= width and text[start:end].isascii():
            lines.append((start, end))
        else:
            _wrap_line(text, start, end, width, lines)
        if newline < 0:
            return lines
        start = newline + 1


def _wrap_line(text: str, start: int, end: int, width: int, lines: list[tuple[int, int]]) -> None:
    """One logical line: fill greedily with pieces; a piece wider than a line is cut."""
    begin = stop = start  # the slice being filled, without trailing spaces
    filled = 0  # cells up to the next piece, trailing spaces included
    for piece in _PIECES.finditer(text, start, end):
        string = piece.group()
        cells = len(string) if string.isascii() else cell_len(string)
        if filled + cells <= width:
            filled += cells
            if not string.isspace():
                stop = piece.end()
            continue
        if string.isspace():
            filled = width + 1  # the break falls into the spaces: the next piece, wide or not, starts a line
            continue
        if stop > begin:
            lines.append((begin, stop))
        begin, filled = piece.start(), cells
        if cells > width:
            begin, filled = _cut(text, piece.start(), piece.end(), width, lines)
        stop = piece.end()
    lines.append((begin, stop) if stop > begin or not lines or lines[-1][1] <= start else (begin, end))


def _cut(text: str, start: int, end: int, width: int, lines: list[tuple[int, int]]) -> tuple[int, int]:
    """Cut an over-long piece into full lines; returns where the remainder begins and its cells."""
    if text[start:end].isascii():
        while end - start > width:
            lines.append((start, start + width))
            start += width
        return start, end - start
    filled = 0
    begin = start
    for index in range(start, end):
        cells = cell_len(text[index])
        if filled + cells > width and index > begin and cells:
            lines.append((begin, index))
            begin, filled = index, 0
        filled += cells
    return begin, filled

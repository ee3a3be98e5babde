"""Numbers, bars and sparklines as text of a fixed width."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content

_DIGITS = {
    "0": ("█▀█", "█ █", "█▄█"),
    "1": ("▀█ ", " █ ", "▄█▄"),
    "2": ("▀▀█", "█▀▀", "█▄▄"),
    "3": ("▀▀█", " ▀█", "▄▄█"),
    "4": ("█ █", "▀▀█", "  █"),
    "5": ("█▀▀", "▀▀█", "▄▄█"),
    "6": ("█▀▀", "█▀█", "█▄█"),
    "7": ("▀▀█", "  █", "  █"),
    "8": ("█▀█", "█▀█", "█▄█"),
    "9": ("█▀█", "▀▀█", "▄▄█"),
    ".": (" ", " ", "▄"),
    "-": ("   ", "▀▀▀", "   "),
    " ": ("   ", "   ", "   "),
}
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = " ▁▂▃▄▅▆▇█"
DASH = "–"


def big(text: str) -> list[str]:
    """Three rows of digits, three cells each and a cell between them."""
    return [" ".join(_DIGITS[character][row] for character in text) for row in range(3)]


def number(value: float | None, digits: int = 3) -> str:
    """`value` with about three significant digits and thousands separators; a dash for None."""
    if value is None:
        return DASH
    if value >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{max(0, digits - 1 - (value >= 10) * 1)}f}" if value >= 1 else f"{value:.{digits - 1}f}"


def seconds(value: float | None) -> str:
    if value is None:
        return DASH
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def size(value: float | None) -> str:
    """Bytes in decimal units, as bandwidths are."""
    if value is None:
        return DASH
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{number(value / scale)} {unit}"
    return f"{value:.0f} B"


def bar(share: float, width: int, style: str = "$accent", rest: str = "$faint") -> Content:
    """A bar of `width` cells, in eighths of a cell."""
    filled = round(min(max(share, 0.0), 1.0) * width * 8)
    full, part = divmod(filled, 8)
    text = "█" * full + (_EIGHTHS[part] if part else "")
    return Content.assemble((text, style), ("─" * (width - len(text)), rest))


def line_bar(share: float, width: int, style: str = "$accent", rest: str = "$faint") -> Content:
    """A thin bar of `width` cells, in halves of a cell."""
    halves = round(min(max(share, 0.0), 1.0) * width * 2)
    text = "━" * (halves // 2) + ("╸" if halves % 2 else "")
    return Content.assemble((text, style), ("─" * (width - len(text)), rest))


def sparkline(values: Sequence[float], width: int, rows: int = 2) -> list[str]:
    """The last `width` values, right-aligned; the highest fills `rows` rows."""
    shown = list(values)[-width:]
    top = max(shown, default=0.0)
    lines = [""] * rows
    for value in [0.0] * (width - len(shown)) + shown:
        level = round(value / top * rows * 8) if top > 0 else 0
        level = max(level, 1) if value > 0 else 0
        for row in range(rows):
            lines[rows - 1 - row] += _LEVELS[min(max(level - row * 8, 0), 8)]
    return lines


def sides(left: Content | str, right: Content | str, width: int) -> Content:
    """`left` and `right` at the two ends of a line."""
    left, right = Content(left) if isinstance(left, str) else left, Content(right) if isinstance(right, str) else right
    return Content.assemble(left, " " * max(1, width - left.cell_length - right.cell_length), right)

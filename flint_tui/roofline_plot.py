"""Draws a roofline: for a terminal, and as an SVG picture."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from engine.machine.roofline import Ceiling, Roofline, attainable

COLOURS = ("#8fb3d9", "#86b98a", "#e0b25c", "#ff9142")  # bf16, int8, int4, as packed
ROOF, TEXT, MUTED, GRID, BACKGROUND = "#8592a1", "#d5dae1", "#8592a1", "#2a333e", "#101419"
WIDTH, HEIGHT = 960, 560
LEFT, RIGHT, TOP, BOTTOM = 90, 930, 96, 490  # the plot's edges
FONT = "Inter, 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', 'Liberation Sans', 'DejaVu Sans Mono', sans-serif"


def label(ceiling: Ceiling) -> str:
    return f"{ceiling.precision} {ceiling.tok_s:,.0f} tok/s"


def span(roofline: Roofline) -> tuple[float, float]:
    """FLOP per byte at the left and right edge: whole decades around the points and the ridge."""
    points = [ceiling.flop_per_byte for ceiling in roofline.ceilings]
    right = max([*points, 4 * (roofline.machine.ridge or 10 * max(points))])
    return 10 ** math.floor(math.log10(min(points) / 2)), 10 ** math.ceil(math.log10(right))


def roof(roofline: Roofline, flop_per_byte: float) -> float:
    """TFLOP/s under the roof."""
    machine = roofline.machine
    return attainable(flop_per_byte, (machine.tflops or math.inf) * 1e12, machine.gb_s * 1e9) / 1e12


def terminal_plot(roofline: Roofline, width: int, height: int, colour: bool) -> str:
    """The plot as lines of text, with colours as escape sequences or without any."""
    import plotext

    machine = roofline.machine
    left, right = span(roofline)
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(width, height)
    steps = [left * (right / left) ** (i / 200) for i in range(201)]
    name = f"{machine.gb_s:,.0f} GB/s" + (f", {machine.tflops:,.3g} TFLOP/s" if machine.tflops else "")
    plotext.plot(steps, [roof(roofline, x) for x in steps], marker="braille", color=_rgb(ROOF), label=name)
    for ceiling, shade in zip(roofline.ceilings, COLOURS, strict=False):
        x = ceiling.flop_per_byte
        plotext.scatter([x], [roof(roofline, x)], marker="●", color=_rgb(shade), label=label(ceiling))
    if machine.ridge:
        plotext.vline(machine.ridge, _rgb(GRID))
    plotext.xscale("log")
    plotext.yscale("log")
    ticks = list(_decades(roof(roofline, left), roof(roofline, right)))
    plotext.yticks(ticks, [_number(tick) for tick in ticks])
    ticks = list(_decades(left, right))
    plotext.xticks(ticks, [_number(tick) for tick in ticks])
    plotext.xlabel("FLOP per byte")
    plotext.ylabel("TFLOP/s")
    text = plotext.build().rstrip("\n")
    return text if colour else plotext.uncolorize(text)


def svg(roofline: Roofline) -> str:
    """The plot as a picture of WIDTH x HEIGHT."""
    machine, (left, right) = roofline.machine, span(roofline)
    low = 10 ** math.floor(math.log10(roof(roofline, left)))
    high = 2 * roof(roofline, right)

    def at(flop_per_byte: float, tflops: float) -> tuple[float, float]:
        x = LEFT + (RIGHT - LEFT) * math.log(flop_per_byte / left) / math.log(right / left)
        y = BOTTOM - (BOTTOM - TOP) * math.log(tflops / low) / math.log(high / low)
        return round(x, 1), round(y, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="{escape(FONT)}" font-size="14" fill="{TEXT}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{BACKGROUND}"/>',
        _text(LEFT, 38, f"{roofline.workload.name} on {machine.name}", size=20, weight=600),
        _text(LEFT, 62, _subtitle(roofline), colour=MUTED),
    ]
    for x in _decades(left, right):
        place = at(x, low)[0]
        parts += [
            _line(place, TOP, place, BOTTOM),
            _text(place, BOTTOM + 22, _number(x), anchor="middle", colour=MUTED),
        ]
    for y in _decades(low, high):
        place = at(left, y)[1]
        parts += [_line(LEFT, place, RIGHT, place), _text(LEFT - 10, place + 5, _number(y), anchor="end", colour=MUTED)]
    middle = (TOP + BOTTOM) / 2
    parts += [
        _text(
            (LEFT + RIGHT) / 2,
            BOTTOM + 48,
            "FLOP per byte (one sequence, empty KV cache)",
            anchor="middle",
            colour=MUTED,
        ),
        f'<g transform="rotate(-90 28 {middle})">{_text(28, middle, "TFLOP/s", anchor="middle", colour=MUTED)}</g>',
    ]
    corners = [left, *([machine.ridge] if machine.ridge else []), right]
    outline = " ".join(f"{x},{y}" for x, y in (at(corner, roof(roofline, corner)) for corner in corners))
    parts.append(f'<polyline points="{outline}" fill="none" stroke="{ROOF}" stroke-width="2.5"/>')
    if machine.ridge:
        x, y = at(machine.ridge, roof(roofline, machine.ridge))
        parts.append(f'<path d="M{x} {y}V{BOTTOM}" stroke="{ROOF}" stroke-dasharray="4 5"/>')
        parts.append(_text(x + 8, BOTTOM - 10, f"ridge {_number(machine.ridge)}", colour=MUTED))
    for index, (ceiling, shade) in enumerate(zip(roofline.ceilings, COLOURS, strict=False)):
        x, y = at(ceiling.flop_per_byte, roof(roofline, ceiling.flop_per_byte))
        parts.append(f'<circle cx="{x}" cy="{y}" r="6" fill="{shade}"/>')
        above = index == 3  # the packed form lies close to a plain precision: its label goes to the other side
        parts.append(
            _text(x - 12, y - 8, label(ceiling), anchor="end", colour=shade)
            if above
            else _text(x + 12, y + 16, label(ceiling), colour=shade)
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _subtitle(roofline: Roofline) -> str:
    machine = roofline.machine
    figures = [f"{machine.gb_s:,.4g} GB/s ({machine.gb_s_source})"]
    if machine.tflops:
        figures.append(f"{machine.tflops:,.3g} TFLOP/s ({machine.tflops_source})")
    return " · ".join(figures)


def _decades(low: float, high: float) -> Iterator[float]:
    """Powers of ten from low to high."""
    for exponent in range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1):
        yield 10.0**exponent


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.4g}"


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1} {y1}L{x2} {y2}" stroke="{GRID}"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", colour: str = TEXT, size: int = 14, weight: int = 400
) -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}" font-size="{size}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )

"""The roofline of decoding on this machine: a token cannot be faster than its bytes can be read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from textual.app import RenderResult
from textual_plotext import PlotextPlot

COLOURS = ((133, 146, 161), (143, 179, 217), (255, 145, 66))  # roof, single pass, speculative


class RoofPoint(NamedTuple):
    """A measurement: bytes moved per token, tokens per second."""

    label: str
    bytes_per_token: float
    tok_s: float


class RoofPlot(PlotextPlot):
    """Tokens per second over bytes per token, both logarithmic; the roof is peak bandwidth / bytes per token."""

    _spans: tuple[tuple[float, float], tuple[float, float]] | None = None  # of both axes, in their units

    def show(self, points: Sequence[RoofPoint], peak_gb_s: float | None, peak_source: str) -> None:
        from engine.machine.roofline import token_rate

        plot = self.plt
        plot.clear_data()
        plot.clear_figure()
        self._spans = None
        if peak_gb_s and points:
            low = min(point.bytes_per_token for point in points) / 4
            high = max(point.bytes_per_token for point in points) * 4
            steps = [low * (high / low) ** (i / 60) for i in range(61)]
            roof = f"roof: {peak_gb_s:,.1f} GB/s"
            roof_colour, *colours = COLOURS
            plot.plot(
                [x / 1e6 for x in steps],
                [token_rate(peak_gb_s * 1e9, x) for x in steps],
                label=roof,
                marker="braille",
                color=roof_colour,
            )
            for point, colour in zip(points, colours, strict=False):
                plot.scatter([point.bytes_per_token / 1e6], [point.tok_s], label=point.label, marker="●", color=colour)
            self._spans = (low / 1e6, high / 1e6), (token_rate(peak_gb_s * 1e9, high), token_rate(peak_gb_s * 1e9, low))
            plot.xscale("log")
            plot.yscale("log")
            plot.xlabel("MB moved per token")
            plot.ylabel("tokens per second")
        self.border_title = f"Roofline · peak: {peak_source}" if peak_source else "Roofline"
        self.refresh()

    def render(self) -> RenderResult:
        if self._spans:
            width, height = self.size
            across, up = self._spans
            for put, span, room in ((self.plt.xticks, across, width // 8), (self.plt.yticks, up, height // 3)):
                ticks = _ticks(*span, at_most=max(1, room))
                put(ticks, [f"{tick:g}" for tick in ticks])
        return super().render()


def _ticks(low: float, high: float, at_most: int) -> list[float]:
    """1, 2 and 5 times the powers of ten between low and high, thinned out evenly to what there is room for."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [tick for power in powers for digit in (1, 2, 5) if low <= (tick := digit * 10.0**power) <= high]
    return ticks[:: math.ceil(len(ticks) / at_most) or 1]

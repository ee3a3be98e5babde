"""Memory-bandwidth utilisation: how close decoding comes to the hardware's limit, and what that limit is."""

from __future__ import annotations

from textual.content import Content

from flint_tui.live import EngineFacts, Figures, Mode
from flint_tui.text.wrap import wrap
from flint_tui.widgets.glyphs import DASH, line_bar, number, sides
from flint_tui.widgets.panel import PANEL_WIDTH, Panel


class BandwidthPanel(Panel):
    lines = 5
    title = "MEMORY BANDWIDTH"

    def content(self, facts: EngineFacts, figures: Figures, last: dict[Mode, Figures]) -> list[Content]:
        achieved = figures.shown.bandwidth_gb_s
        share = figures.shown.mbu(facts.peak_gb_s) if facts.peak_gb_s else None
        percent = f"{share * 100:.0f} %" if share is not None else DASH
        peak = f"{number(facts.peak_gb_s)} GB/s" if facts.peak_gb_s else "peak unknown"
        return [
            self.heading(Content.assemble((percent, "bold"), (" MBU", "$muted"))),
            line_bar(share or 0.0, PANEL_WIDTH),
            sides(
                Content.assemble((number(achieved), "bold" if achieved else "$muted"), (" GB/s achieved", "$muted")),
                Content.styled(f"of {peak}", "$muted"),
                PANEL_WIDTH,
            ),
            *(Content.styled(line, "$muted") for line in _source(facts.peak_source)),
        ]


def _source(source: str) -> list[str]:
    """What the peak is, in two lines."""
    text = f"peak: {source}" if source else ""
    lines = [text[begin:end] for begin, end in wrap(text, PANEL_WIDTH)]
    return [*lines, ""][:2]

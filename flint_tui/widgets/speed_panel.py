"""Tokens per second, large, with its last seconds."""

from __future__ import annotations

from textual.content import Content

from flint_tui.live import EngineFacts, Figures, Mode
from flint_tui.widgets.glyphs import big, number, seconds, sides, sparkline
from flint_tui.widgets.panel import PANEL_WIDTH, Panel


class SpeedPanel(Panel):
    """The last second while a reply runs; the whole reply afterwards."""

    lines = 7
    title = "DECODE"

    def content(self, facts: EngineFacts, figures: Figures, last: dict[Mode, Figures]) -> list[Content]:
        rate = figures.shown.tok_s
        text = "-" if rate is None else f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}"
        style = "bold $accent" if figures.phase == "decode" else "bold $foreground" if rate else "$faint"
        per_token = f"{seconds_per_token(rate)}" if rate else ""
        what = {
            "idle": "whole reply" if rate else "",
            "prefill": "reading the prompt" if facts.model else "waiting for the model",
            "decode": "last second",
        }[figures.phase]
        return [
            self.heading(Content.styled("tok/s", "$muted")),
            *(Content.styled(row, style) for row in big(text)),
            *(Content.styled(row, "$accent 70%") for row in sparkline(figures.history, PANEL_WIDTH)),
            sides(Content.styled(what, "$muted"), Content.styled(per_token, "$muted"), PANEL_WIDTH),
        ]


def seconds_per_token(rate: float) -> str:
    ms = 1e3 / rate
    return f"{number(ms)} ms/token" if ms < 1e3 else f"{seconds(1 / rate)}/token"

"""Bytes that one token moves: the weights, and the KV cache that grows with the context."""

from __future__ import annotations

from textual.content import Content

from flint_tui.live import EngineFacts, Figures, Mode
from flint_tui.widgets.glyphs import line_bar, sides, size
from flint_tui.widgets.panel import PANEL_WIDTH, Panel


class TrafficPanel(Panel):
    lines = 3
    title = "BYTES PER TOKEN"

    def content(self, facts: EngineFacts, figures: Figures, last: dict[Mode, Figures]) -> list[Content]:
        reading = figures.shown
        total = reading.bytes_per_token
        weights = cache = None
        if total is not None and facts.weight_bytes and reading.tokens:
            weights = min(total, facts.weight_bytes * reading.steps / reading.tokens)
            cache = total - weights
        share = weights / total if weights and total else 0.0
        line = sides(
            Content.assemble(("weights ", "$muted"), size(weights)),
            Content.assemble(("KV ", "$muted"), size(cache)),
            PANEL_WIDTH,
        )
        gauge = line_bar(share, PANEL_WIDTH, "$primary", "$accent") if total else line_bar(0, PANEL_WIDTH)
        return [self.heading(Content.styled(size(total), "bold" if total else "$muted")), gauge, line]

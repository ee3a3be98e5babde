"""Speculative decoding: how many tokens a verify step yields, and how often each draft position is accepted."""

from __future__ import annotations

from textual.content import Content

from flint_tui.live import EngineFacts, Figures, Mode
from flint_tui.widgets.glyphs import DASH, line_bar, sides
from flint_tui.widgets.panel import PANEL_WIDTH, Panel

POSITIONS = 4


class AcceptancePanel(Panel):
    """The figures of the running reply, or of the last speculative one."""

    lines = POSITIONS + 2
    title = "ACCEPTANCE LENGTH"

    def content(self, facts: EngineFacts, figures: Figures, last: dict[Mode, Figures]) -> list[Content]:
        if figures.mode != "speculative" and figures.phase == "idle" and "speculative" in last:
            figures = last["speculative"]
        reading = figures.shown
        length = reading.acceptance_length
        shares = reading.accepted_per_position[:POSITIONS]
        rows = []
        for position in range(POSITIONS):
            if position < len(shares):
                row = [
                    (f"{position + 1} ", "$muted"),
                    line_bar(shares[position], 24, "$accepted"),
                    f"{shares[position]:>5.0%}",
                ]
            else:
                row = [(f"{position + 1} ", "$faint"), line_bar(0, 24), (f"{DASH:>5}", "$faint")]
            rows.append(Content.assemble(*row))
        if reading.drafted:
            positions = len(reading.accepted_per_position)
            more = f", {positions} positions" if positions > POSITIONS else ""
            summary = f"{reading.accepted:,} of {reading.drafted:,} accepted{more}"
        elif figures.mode == "single":
            summary = "single pass drafts nothing"
        else:
            summary = "nothing drafted yet"
        value = (
            Content.styled(DASH, "$muted") if length is None else Content.assemble((f"{length:.2f}", "bold $accepted"))
        )
        right = Content.assemble(value, (" tok/step", "$muted"))
        return [
            sides(Content.styled(self.title, "bold $muted"), right, PANEL_WIDTH),
            *rows,
            Content.styled(summary, "$muted"),
        ]

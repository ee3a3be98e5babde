"""Both decoding modes side by side: the last figures of each, so that the difference is seen."""

from __future__ import annotations

from textual.content import Content

from flint_tui.live import EngineFacts, Figures, Mode
from flint_tui.widgets.glyphs import DASH, number
from flint_tui.widgets.panel import Panel

NAMES: dict[Mode, str] = {"single": "single pass", "speculative": "speculative"}


class ModesPanel(Panel):
    lines = 3
    title = "LAST REPLIES"

    def content(self, facts: EngineFacts, figures: Figures, last: dict[Mode, Figures]) -> list[Content]:
        rates = {mode: last[mode].total.tok_s if mode in last else None for mode in NAMES}
        single, speculative = rates["single"], rates["speculative"]
        ratio = f"×{speculative / single:.2f}" if single and speculative else ""
        rows = [self.heading(Content.styled("tok/s", "$muted"))]
        for mode, name in NAMES.items():
            style = "$single" if mode == "single" else "$accepted"
            mark = "◆ " if mode == figures.mode and rates[mode] else "◇ "
            value = number(rates[mode]) if rates[mode] else DASH
            note = ratio if mode == "speculative" else ""
            rows.append(
                Content.assemble(
                    (mark, style), (f"{name:<12}", "$muted"), (f"{note:>8}", style), (f"{value:>10}", "bold")
                )
            )
        return rows

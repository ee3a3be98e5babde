"""The panels in one line, for terminals too narrow for the sidebar."""

from __future__ import annotations

from textual.content import Content

from flint_tui.live import EngineFacts, Figures
from flint_tui.widgets.glyphs import number, seconds, sparkline
from flint_tui.widgets.status_line import StatusLabel


class LiveStrip(StatusLabel):
    def show_figures(self, facts: EngineFacts, figures: Figures, width: int) -> None:
        reading = figures.shown
        if figures.phase == "prefill" and figures.prefill_total:
            self.show(
                Content.styled(
                    f"reading the prompt  {figures.prefill_done:,} of {figures.prefill_total:,} tokens", "$muted"
                )
            )
            return
        if reading.tok_s is None:
            self.show(Content.styled("", "$muted"))
            return
        style = "bold $accent" if figures.phase == "decode" else "bold"
        parts: list[Content | tuple[str, str]] = [(number(reading.tok_s), style), (" tok/s ", "$muted")]
        if width >= 72:
            parts.append((sparkline(figures.history, 12, rows=1)[0] + "  ", "$accent 70%"))
        share = reading.mbu(facts.peak_gb_s) if facts.peak_gb_s else None
        if share is not None:
            parts += [(f"{share:.0%}", "bold"), (" MBU ", "$muted")]
            if width >= 72:
                parts.append((f"{number(reading.bandwidth_gb_s)} of {number(facts.peak_gb_s)} GB/s  ", "$muted"))
        if reading.acceptance_length is not None:
            parts += [(f"{reading.acceptance_length:.2f}", "bold $accepted"), (" tok/step ", "$muted")]
        parts += [(seconds(figures.ttft_s), "bold"), (" first token", "$muted")]
        self.show(Content.assemble(*parts))

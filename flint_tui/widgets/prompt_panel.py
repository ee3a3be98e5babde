"""Prefill: how fast the prompt was read, and when the first token came."""

from __future__ import annotations

from textual.content import Content

from flint_tui.live import EngineFacts, Figures, Mode
from flint_tui.widgets.glyphs import line_bar, number, seconds, sides
from flint_tui.widgets.panel import PANEL_WIDTH, Panel


class PromptPanel(Panel):
    lines = 2
    title = "PREFILL"

    def content(self, facts: EngineFacts, figures: Figures, last: dict[Mode, Figures]) -> list[Content]:
        rate = figures.prefill_tok_s
        if figures.phase == "prefill" and figures.prefill_total:
            done, total = figures.prefill_done, figures.prefill_total
            line = line_bar(done / total, PANEL_WIDTH)
            right = Content.assemble((f"{done:,}", "bold"), (f" of {total:,} tokens", "$muted"))
        else:
            read = figures.prompt_tokens - figures.cached_tokens
            tokens = f"{read:,} tokens" if figures.prompt_tokens else ""
            if figures.cached_tokens:
                tokens = f"{read:,} + {figures.cached_tokens:,} cached"
            first = Content.assemble(("first ", "$muted"), (seconds(figures.ttft_s), "bold"))
            line = sides(Content.styled(tokens, "$muted"), first if figures.ttft_s else "", PANEL_WIDTH)
            right = Content.assemble((number(rate), "bold" if rate else "$muted"), (" tok/s", "$muted"))
        return [self.heading(right), line]

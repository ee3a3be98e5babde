"""Prefill: how fast the prompt was read, and when the first token came."""

from __future__ import annotations

from textual.content import Content

from flint_tui.live import EngineFacts, Figures, Mode
from flint_tui.widgets.glyphs import line_bar, number, seconds, sides
from flint_tui.widgets.panel import PANEL_WIDTH, Panel


class PromptPanel(Panel):
    lines = 3
    title = "PREFILL"

    def content(self, facts: EngineFacts, figures: Figures, last: dict[Mode, Figures]) -> list[Content]:
        rate = figures.prefill_tok_s
        if figures.phase == "prefill" and figures.prefill_total:
            done, total = figures.prefill_done, figures.prefill_total
            first = line_bar(done / total, PANEL_WIDTH)
            second = Content.styled(f"{done:,} of {total:,} tokens", "$muted")
        else:
            tokens = f"{figures.prompt_tokens:,} tokens" if figures.prompt_tokens else ""
            cached = f"{figures.cached_tokens:,} cached" if figures.cached_tokens else ""
            first = sides(Content.styled(tokens, "$muted"), Content.styled(cached, "$muted"), PANEL_WIDTH)
            second = sides(
                Content.styled("first token", "$muted"), Content.styled(seconds(figures.ttft_s), "bold"), PANEL_WIDTH
            )
        right = Content.assemble((number(rate), "bold" if rate else "$muted"), (" tok/s", "$muted"))
        return [self.heading(right), first, second]

"""The first line: which model on which backend, how full the context is, and which mode is on."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.message import Message
from textual.widget import Widget

from flint_tui.live import EngineFacts, Figures, Mode
from flint_tui.widgets.glyphs import DASH, line_bar

WIDE_CONTEXT = 30  # cells for the bar and its word


class StatusLabel(Widget):
    """Text of a fixed place, repainted when it changes."""

    def __init__(self, id: str) -> None:
        super().__init__(id=id)
        self._content = Content("")

    def show(self, content: Content) -> None:
        if content.plain != self._content.plain or content.spans != self._content.spans:
            self._content = content
            self.refresh()

    def render(self) -> Content:
        return self._content


class ModeToggle(StatusLabel):
    """single ◇ speculative: a click switches, and so does the key."""

    class Toggled(Message):
        """The other mode was chosen."""

    def __init__(self) -> None:
        super().__init__("mode")

    def show_mode(self, mode: Mode, pending: bool) -> None:
        """pending: a reply of the other mode is still running."""
        on = "bold $accent" if mode == "speculative" else "bold $single"
        diamond = ("◆" if mode == "speculative" else "◇", on)
        if pending:
            self.show(Content.assemble(("next ", "$muted"), diamond, " ", (mode, on)))
            return
        single, speculative = (on, "$muted") if mode == "single" else ("$muted", on)
        self.show(Content.assemble(("single", single), " ", diamond, " ", ("speculative", speculative)))

    def on_click(self) -> None:
        self.post_message(self.Toggled())


class StatusLine(Horizontal):
    def compose(self) -> ComposeResult:
        yield StatusLabel("brand")
        yield StatusLabel("context")
        yield ModeToggle()

    def on_mount(self) -> None:
        self.query_one("#brand", StatusLabel).show(Content.assemble(("▲ ", "$accent"), ("flint", "bold")))

    def show_engine(self, facts: EngineFacts | None, state: str) -> None:
        """The open model, or what is happening instead (loading, failed)."""
        parts: list[tuple[str, str]] = [("▲ ", "$accent"), ("flint", "bold")]
        if facts is not None:
            parts += [
                ("  ", ""),
                (facts.model, "$foreground"),
                (f" {_short(facts.variant)}", "$muted"),
                ("  ", ""),
                (facts.backend, "$muted"),
            ]
        if state:
            parts += [("  ", ""), (state, "$warning")]
        self.query_one("#brand", StatusLabel).show(Content.assemble(*parts))

    def show_context(self, facts: EngineFacts | None, figures: Figures, known: bool = True) -> None:
        """known: False for a conversation that this model has not read yet."""
        label = self.query_one("#context", StatusLabel)
        if facts is None:
            label.show(Content(""))
            return
        used, size = figures.context_used, facts.context_size
        share = used / size if size else 0.0
        style = "$error" if share > 0.95 else "$warning" if share > 0.8 else "$primary"
        numbers = Content.assemble((f"{used:,}" if known else DASH, ""), (f" / {size:,}", "$muted"))
        if label.size.width >= WIDE_CONTEXT:
            numbers = Content.assemble(("context ", "$muted"), line_bar(share, 8, style), " ", numbers)
        label.show(numbers)


def _short(variant: str) -> str:
    """int4-g32-asym-head8 -> int4-g32; the model switcher shows all of it."""
    return "-".join(variant.split("-")[:2])

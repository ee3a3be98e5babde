"""One message as the transcript shows it: its document, and the quiet line of figures below it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flint_tui.text.blocks import BLANK, Block, Line, Span
from flint_tui.text.document import Document

EntryRole = Literal["user", "assistant", "note", "error"]


def role_line(text: str, role: str) -> Line:
    """A line of interface text in one role."""
    return Line(Block(text, (Span(0, len(text), role),)), 0, len(text), "", False)


@dataclass(eq=False)
class Entry:
    """role: how it looks. footer: one line of interface text. running: the reply that is being written."""

    role: EntryRole
    document: Document
    footer: str = ""
    running: bool = False
    message: int | None = None  # index into the conversation, None for notes
    strips: dict[int, tuple[object, object]] = field(default_factory=dict)  # local line -> (line and state, Strip)

    def height(self, width: int) -> int:
        """Screen lines: one blank above, the body, the footer."""
        return 1 + self.document.height(width) + (2 if self.footer else 0)

    def line(self, index: int) -> Line | None:
        """None for the blank line above; the width is the one `height` was last asked for."""
        if index == 0:
            return None
        body = index - 1
        height = self.document.height(self.document.width)
        if body < height:
            return self.document.line(body)
        return role_line(self.footer, "footer") if body == height + 1 else Line(BLANK, 0, 0, "", False)

    @property
    def first_changed(self) -> int:
        """The first line that may look different since the document's last `append` (its pen was on the one before)."""
        return max(0, self.document.stable)

    def is_last_body_line(self, index: int) -> bool:
        return index == self.document.height(self.document.width)

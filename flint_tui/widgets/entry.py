"""One message as the transcript shows it: its document, and the quiet line of figures below it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flint_tui.session import SEPARATOR
from flint_tui.text.blocks import BLANK, Block, Line, Span
from flint_tui.text.document import Document

EntryRole = Literal["user", "assistant", "note", "error"]


def role_line(text: str, role: str) -> Line:
    """A line of interface text in one role."""
    return Line(Block(text, (Span(0, len(text), role),)), 0, len(text), "", False)


@dataclass(eq=False)
class Entry:
    """role: how it looks. footer: interface text, in parts. running: the reply that is being written."""

    role: EntryRole
    document: Document
    footer: str = ""
    running: bool = False
    message: int | None = None  # index into the conversation, None for notes
    strips: dict[int, tuple[object, object]] = field(default_factory=dict)  # local line -> (line and state, Strip)

    def height(self, width: int) -> int:
        """Screen lines: one blank above, the body, a blank and the footer."""
        body = self.document.height(width)
        return 1 + body + (1 + len(self._footer_rows()) if self.footer else 0)

    def _footer_rows(self) -> list[str]:
        """The footer, broken between its parts where it is too long; what does not fit is an ellipsis."""
        width = self.document.width
        most = 2 if width >= 40 else 1
        rows: list[str] = []
        for part in self.footer.split(SEPARATOR):
            if rows and len(rows[-1]) + len(SEPARATOR) + len(part) <= width:
                rows[-1] += SEPARATOR + part
            else:
                rows.append(part)
        if len(rows) > most:
            rows[most - 1 :] = [rows[most - 1] + SEPARATOR + "…"]
        return [row if len(row) <= width else row[: width - 1] + "…" for row in rows]

    def line(self, index: int) -> Line | None:
        """None for the blank line above; the width is the one `height` was last asked for."""
        if index == 0:
            return None
        body = index - 1
        height = self.document.height(self.document.width)
        if body < height:
            return self.document.line(body)
        return (
            role_line(self._footer_rows()[body - height - 1], "footer")
            if body > height
            else Line(BLANK, 0, 0, "", False)
        )

    @property
    def first_changed(self) -> int:
        """The first line that may look different since the document's last `append` (its pen was on the one before)."""
        return max(0, self.document.stable)

    def is_last_body_line(self, index: int) -> bool:
        return index == self.document.height(self.document.width)

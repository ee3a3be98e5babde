"""Prompts typed ahead: what waits for the running reply to end."""

from __future__ import annotations

from textual.content import Content

from flint_tui.widgets.status_line import StatusLabel


class QueueLine(StatusLabel):
    def show_queue(self, prompts: list[str], width: int) -> None:
        self.display = bool(prompts)
        if prompts:
            first = " ".join(prompts[0].split())
            room = max(8, width - 40)
            first = first if len(first) <= room else first[: room - 1] + "…"
            more = f" and {len(prompts) - 1} more" if len(prompts) > 1 else ""
            self.show(
                Content.assemble(("queued ", "$accent"), (first, ""), (more, "$muted"), ("   Esc takes back", "$muted"))
            )

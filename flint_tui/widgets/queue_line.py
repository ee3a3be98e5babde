"""What the composer is about: prompts that wait for the running reply, or the prompt that is being edited."""

from __future__ import annotations

from textual.content import Content

from flint_tui.widgets.status_line import StatusLabel


class QueueLine(StatusLabel):
    def show_queue(self, prompts: list[str], editing: int | None, width: int) -> None:
        self.display = bool(prompts) or editing is not None
        if editing is not None:
            number = editing // 2 + 1
            self.show(
                Content.assemble(("editing ", "$accent"), (f"prompt {number}", ""), ("   Esc gives up", "$muted"))
            )
        elif prompts:
            first = " ".join(prompts[0].split())
            room = max(8, width - 40)
            first = first if len(first) <= room else first[: room - 1] + "…"
            more = f" and {len(prompts) - 1} more" if len(prompts) > 1 else ""
            self.show(
                Content.assemble(("queued ", "$accent"), (first, ""), (more, "$muted"), ("   Esc takes back", "$muted"))
            )

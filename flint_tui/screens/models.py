"""The model switcher: what is packed opens, what can be packed is packed here, with progress, and can be cancelled."""

from __future__ import annotations

import time
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from flint_tui.model_shelf import Model, PackJob
from flint_tui.screens.dialog import Dialog
from flint_tui.widgets.glyphs import line_bar, size

REFRESH_S = 1 / 8
_STAGES = {
    "wait": "waiting for another process that packs it",
    "download": "downloading",
    "verify": "checking digests",
    "unpack": "unpacking",
    "pack": "packing",
}


class ModelsScreen(Dialog[str]):
    """Answers with the identifier of the model to load. Packing goes on while the dialog is closed."""

    title_text = "Models"
    keys = "Enter opens or packs · Ctrl+X cancels packing · Esc closes"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+x", "cancel", "Cancel packing", show=False)]

    def body(self) -> ComposeResult:
        yield OptionList(id="models", markup=False, compact=True)
        yield Static("", id="packing", markup=False)

    def on_mount(self) -> None:
        self._rates: list[tuple[float, int]] = []
        self.list_models()
        self.query_one(OptionList).focus()
        self.timer = self.set_interval(REFRESH_S, self.show_progress, pause=self.app.packing is None)
        self.show_progress()

    def list_models(self) -> None:
        self.models = self.app.shelf.models()
        options = self.query_one(OptionList)
        options.clear_options()
        options.add_options([Option(self._row(model)) for model in self.models])
        if self.models:
            options.highlighted = 0

    def _row(self, model: Model) -> Content:
        facts = self.app.chat.facts
        current = model.packed and facts is not None and facts.identifier == model.identifier
        mark = ("◆ ", "$accent") if current else ("● ", "$success") if model.packed else ("○ ", "$muted")
        what = size(model.bytes) if model.packed else f"{size(model.bytes)} to download"
        return Content.assemble(
            mark,
            (f"{model.name:<26} ", "" if model.packed else "$muted"),
            (f"{what:<19} ", "$muted"),  # before what a narrow screen cuts off: Enter begins the download
            (f"{model.detail:<20} ", "$muted"),
            (model.note, "$muted"),
        )

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        model = self.models[event.option_index]
        if model.packed:
            self.dismiss(model.identifier)
        elif self.app.packing is not None and not self.app.packing.done:
            self.notify("One model is being packed already", severity="warning")
        else:
            self._rates = []
            self.app.packing = PackJob(self.app.shelf, model)
            self.timer.resume()
            self.show_progress()

    def action_cancel(self) -> None:
        if self.app.packing is not None:
            self.app.packing.cancel()

    def show_progress(self) -> None:
        job = self.app.packing
        line = self.query_one("#packing", Static)
        if job is None:
            return
        if not job.done:
            line.update(self._progress_line(job))
            return
        self.timer.pause()
        self.app.packing = None
        if job.packed:
            line.update(Content.styled(f"{job.model.name} is packed; Enter opens it", "$success"))
            self.list_models()
            at = next((i for i, model in enumerate(self.models) if model.identifier == job.packed), 0)
            self.query_one(OptionList).highlighted = at
        elif job.cancelled:
            line.update(Content.styled(f"{job.model.name}: cancelled, a later try resumes", "$warning"))
        else:
            line.update(Content.styled(f"{job.error}\n{job.hint}".strip(), "$error"))

    def _progress_line(self, job: PackJob) -> Content:
        progress = job.progress
        if progress is None:
            return Content.styled(f"{job.model.name}: starting", "$muted")
        parts: list[Content | str | tuple[str, str]] = [
            (f"{job.model.name}: {_STAGES[progress.stage]} ", "$foreground")
        ]
        if progress.total:
            now = time.monotonic()
            if self._rates and progress.done < self._rates[-1][1]:
                self._rates.clear()  # the next stage counts from 0
            self._rates = [*self._rates[-23:], (now, progress.done)]
            (t0, b0), (t1, b1) = self._rates[0], self._rates[-1]
            rate = (b1 - b0) / (t1 - t0) if t1 > t0 else 0.0
            left = f"  {(progress.total - progress.done) / rate:.0f} s left" if rate > 0 else ""
            parts += [
                line_bar(progress.done / progress.total, 20),
                (f" {size(progress.done)} of {size(progress.total)}", "$foreground"),
                (f"  {size(rate)}/s{left}" if rate else "", "$muted"),
            ]
        else:
            parts.append((progress.item, "$muted"))
        return Content.assemble(*parts)

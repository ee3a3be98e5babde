"""The benchmark: rows as they are measured, both modes as bars, and where this machine stands under its roof."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from flint_tui.bench_quick import BenchProgress, BenchResult, BenchRow, BenchStore, export_text, quick_bench
from flint_tui.decode_thread import JobDone
from flint_tui.screens.ask import AskLine
from flint_tui.widgets.glyphs import DASH, bar, line_bar, number, seconds, size
from flint_tui.widgets.key_line import KeyLine

if TYPE_CHECKING:
    from flint_tui.app import FlintApp

REFRESH_S = 1 / 8
BAR_WIDTH = 30
KEYS = (
    ("r", "run", "screen.start"),
    ("escape", "stop, then close", "screen.leave"),
    ("e", "export", "screen.export"),
    ("left", "older", "screen.older(1)"),
    ("right", "newer", "screen.older(-1)"),
)


@dataclass(frozen=True)
class _Style:
    prefill: str = "$primary"
    single: str = "$single"
    speculative: str = "$accent"


class BenchScreen(Screen[None]):
    """Runs `runner` in the engine thread: no reply can be decoded meanwhile."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "start", "Run", show=False),
        Binding("escape", "leave", "Stop, then close", show=False),
        Binding("e", "export", "Export", show=False),
        Binding("left,h", "older(1)", "Older result", show=False),
        Binding("right,l", "older(-1)", "Newer result", show=False),
    ]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012
    app: FlintApp  # type: ignore[assignment]
    runner = staticmethod(quick_bench)

    def __init__(self, store: BenchStore | None = None) -> None:
        super().__init__()
        self.store = store or BenchStore()
        self.events: SimpleQueue[BenchProgress | BenchRow] = SimpleQueue()
        self.rows: list[BenchRow] = []
        self.progress: BenchProgress | None = None
        self.running = False
        self.problem = ""
        self.results: list[BenchResult] = []
        self.back = 0  # how many results before the newest is shown

    def compose(self) -> ComposeResult:
        yield Static("", id="bench-title", markup=False)
        with Horizontal(id="bench-body"):
            with VerticalScroll(id="bench-left", can_focus=False):
                yield Static("", id="bench-rows", markup=False)
            from flint_tui.widgets.roof_plot import RoofPlot

            yield RoofPlot(id="roof")
        yield KeyLine(id="keys")

    def on_mount(self) -> None:
        self.query_one(KeyLine).show_keys(KEYS)
        self.results = self.store.all()
        self.timer = self.set_interval(REFRESH_S, self.look, pause=True)
        self.show()

    # -- running

    def action_start(self) -> None:
        if self.running:
            return
        if self.app.session.replying or self.app.chat.facts is None:
            self.notify("The engine is busy or not open: try again in a moment", severity="warning")
            return
        self.rows, self.progress, self.problem, self.back = [], None, "", 0
        self.running = True
        events, runner = self.events, self.runner

        def work(engine, cancel) -> None:
            for event in runner(engine, cancel):
                events.put(event)

        self.app.run_job("bench", work, self._done)
        self.timer.resume()
        self.show()

    def _done(self, outcome: JobDone) -> None:
        self.look()
        self.running = False
        self.problem = outcome.error
        facts = self.app.chat.facts
        complete = self.progress is not None and self.progress.done == self.progress.total
        if not outcome.error and complete and self.rows and facts is not None:
            result = BenchResult(
                time.time(), facts.model, facts.backend, facts.peak_gb_s, facts.peak_source, tuple(self.rows)
            )
            try:
                self.store.add(result)
            except OSError as error:
                self.problem = f"the result could not be kept: {error.strerror or error}"
            self.results.append(result)
        elif not outcome.error:
            self.problem = "stopped; nothing was kept"
        if self.is_attached:
            self.timer.pause()
            self.show()

    def look(self) -> None:
        """Show what the runner has yielded since the last look."""
        changed = False
        while True:
            try:
                event = self.events.get_nowait()
            except Empty:
                break
            changed = True
            if isinstance(event, BenchRow):
                self.rows.append(event)
            else:
                self.progress = event
        if changed and self.is_attached:
            self.show()

    def action_leave(self) -> None:
        """The first Esc stops a running benchmark, the next one closes."""
        if self.running:
            self.app.engine_thread.cancel()
        else:
            self.dismiss(None)

    # -- showing

    @property
    def shown(self) -> BenchResult | None:
        """A finished result, when none is running."""
        if self.running or not self.results:
            return None
        return self.results[-1 - min(self.back, len(self.results) - 1)]

    def action_older(self, step: int) -> None:
        self.back = min(max(self.back + step, 0), max(0, len(self.results) - 1))
        self.show()

    def show(self) -> None:
        facts = self.app.chat.facts
        result = self.shown
        rows = list(result.rows) if result else self.rows
        peak = result.peak_gb_s if result else facts.peak_gb_s if facts else None
        source = result.peak_source if result else facts.peak_source if facts else ""
        self.query_one("#bench-title", Static).update(self._title(result))
        self.query_one("#bench-rows", Static).update(self._rows(rows, peak, source))
        from flint_tui.widgets.roof_plot import RoofPlot, RoofPoint

        points = [RoofPoint(row.test, row.bytes_per_token, row.mean) for row in rows if row.bytes_per_token]
        plot = self.query_one(RoofPlot)
        plot.display = bool(points and peak)
        plot.show(points, peak, source)

    def _title(self, result: BenchResult | None) -> Content:
        facts = self.app.chat.facts
        model = result.model if result else facts.model if facts else "no model"
        backend = result.backend if result else facts.backend if facts else ""
        parts: list[Content | str | tuple[str, str]] = [
            ("▲ ", "$accent"), ("benchmark  ", "bold"), (model, ""), ("  ", ""), (backend, "$muted"),
        ]  # fmt: skip
        if self.running:
            progress = self.progress or BenchProgress("starting", 0, 1)
            parts += [("   ", ""), line_bar(progress.done / progress.total, 16), (f" {progress.text}", "$muted")]
        elif result is not None and len(self.results) > 1:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(result.created))
            at = len(self.results) - self.back
            parts.append((f"   {at} of {len(self.results)}, {when}", "$muted"))
        if self.problem:
            parts.append((f"   {self.problem}", "$warning"))
        return Content.assemble(*parts)

    def _rows(self, rows: list[BenchRow], peak: float | None, source: str) -> Content:
        if not rows:
            hint = (
                "measuring" if self.running else "Press r to measure prefill and both decoding modes (about a minute)."
            )
            return Content.styled(hint, "$muted")
        lines: list[Content] = []
        decode = [row for row in rows if not row.test.startswith("prefill")]
        best = max((row.mean for row in decode), default=0.0)
        for row in rows:
            prefill = row not in decode
            style = _Style.prefill if prefill else _Style.speculative if row.test == "speculative" else _Style.single
            share = row.mean / best if best and not prefill else 1.0
            spread = f" ± {number(row.deviation)}" if row.deviation else ""
            lines.append(
                Content.assemble(
                    (f"{row.test:<14}", "bold"), (number(row.mean), f"bold {style}"), (f"{spread} tok/s", "$muted")
                )
            )
            if not prefill:
                lines.append(bar(share, BAR_WIDTH, style))
            lines += self._details(row)
            lines.append(Content(""))
        if len(decode) == 2 and decode[0].mean:
            ratio = decode[1].mean / decode[0].mean
            lines.append(
                Content.assemble((f"×{ratio:.2f} ", "bold $accent"), ("speculative against single pass", "$muted"))
            )
        if peak:
            lines.append(Content.styled(f"peak {number(peak)} GB/s: {source}", "$muted"))
        return Content("\n").join(lines)

    def _details(self, row: BenchRow) -> list[Content]:
        parts = []
        if row.mbu is not None:
            parts.append(f"{row.mbu:.0%} MBU, {number(row.gb_s)} GB/s")
        if row.bytes_per_token is not None:
            parts.append(f"{size(row.bytes_per_token)}/token")
        if row.test.startswith("prefill"):
            parts.append(f"first token {seconds(row.ttft_s)}")
        lines = [" · ".join(parts) or DASH]
        if row.acceptance_length is not None:
            lines.append(f"{row.acceptance_length:.2f} tok/step")
        return [Content.styled(line, "$muted") for line in lines]

    # -- exporting

    def action_export(self) -> None:
        result = self.shown
        if result is None:
            self.notify("There is no finished result to export", severity="warning")
            return

        def write(name: str | None) -> None:
            if not name:
                return
            target = Path(name).expanduser()
            kind = target.suffix.lstrip(".")
            if kind not in ("json", "csv", "md"):
                self.notify("The name must end in .json, .csv or .md", severity="error")
                return
            try:
                with target.open("x", encoding="utf-8") as file:
                    file.write(export_text(result, kind))
            except OSError as error:
                self.notify(f"{target}: {error.strerror or error}", severity="error", markup=False)
                return
            self.notify(f"Exported to {target.resolve()}", markup=False)

        self.app.push_screen(AskLine("Export (.json, .csv or .md)", "flint-bench.json"), write)

"""The live panels, one above the other."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical

from flint_tui.give_way import give_way
from flint_tui.live import EngineFacts, Figures, Mode
from flint_tui.widgets.acceptance_panel import AcceptancePanel
from flint_tui.widgets.bandwidth_panel import BandwidthPanel
from flint_tui.widgets.gpu_panel import GpuPanel
from flint_tui.widgets.modes_panel import ModesPanel
from flint_tui.widgets.panel import Panel
from flint_tui.widgets.prompt_panel import PromptPanel
from flint_tui.widgets.speed_panel import SpeedPanel
from flint_tui.widgets.traffic_panel import TrafficPanel


class Sidebar(Vertical):
    def compose(self) -> ComposeResult:
        yield SpeedPanel()
        yield BandwidthPanel()
        yield AcceptancePanel()
        yield PromptPanel()
        yield TrafficPanel()
        yield ModesPanel()
        yield GpuPanel()

    def show_figures(self, facts: EngineFacts, figures: Figures, last: dict[Mode, Figures]) -> None:
        self.set_class(facts.gpu, "-gpu")
        for panel in self.children:
            assert isinstance(panel, Panel)
            give_way()
            panel.show(facts, figures, last)

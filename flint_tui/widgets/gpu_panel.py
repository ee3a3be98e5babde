"""Clocks, power and memory of the GPU; takes no room where there is none."""

from __future__ import annotations

from textual.content import Content

from flint_tui.gpu_watch import GpuReading, GpuWatch
from flint_tui.live import EngineFacts, Figures, Mode
from flint_tui.widgets.glyphs import number, sides
from flint_tui.widgets.panel import PANEL_WIDTH, Panel


class GpuPanel(Panel):
    lines = 3
    title = "GPU"

    def __init__(self) -> None:
        super().__init__()
        self.nvml: GpuWatch | None = None

    def content(self, facts: EngineFacts, figures: Figures, last: dict[Mode, Figures]) -> list[Content]:
        if facts.gpu and self.nvml is None:
            self.nvml = GpuWatch()
        return rows(self.nvml.reading) if self.nvml is not None and self.nvml.reading is not None else [self.heading()]

    def on_unmount(self) -> None:
        if self.nvml is not None:
            self.nvml.close()


def rows(reading: GpuReading) -> list[Content]:
    """The panel's three lines."""
    return [
        sides(Content.styled("GPU", "bold $muted"), Content.styled(reading.name[:24], "$muted"), PANEL_WIDTH),
        sides(
            Content.assemble((f"{reading.sm_mhz:,}", "bold"), (" MHz core", "$muted")),
            Content.assemble((f"{reading.memory_mhz:,}", "bold"), (" MHz memory", "$muted")),
            PANEL_WIDTH,
        ),
        sides(
            Content.assemble((f"{reading.watts:.0f}", "bold"), (f" of {reading.limit_watts:.0f} W", "$muted")),
            Content.assemble(
                (number(reading.used_bytes / 1e9), "bold"), (f" of {number(reading.total_bytes / 1e9)} GB", "$muted")
            ),
            PANEL_WIDTH,
        ),
    ]

"""Paints what has changed, and asks no other widget.

For any change Textual renders every widget that meets the box around all changes, cuts their lines where any widget
begins or ends, and sends the parts. Here a changed region is divided among the widgets that are seen in it, and those
send their own lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from textual._compositor import Compositor, CompositorUpdate, ReflowResult
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from flint_tui.give_way import give_way


class Patch(NamedTuple):
    """Lines of one widget, and the screen cell where the first begins."""

    x: int
    y: int
    strips: list[Strip]


class PatchUpdate(CompositorUpdate):
    def __init__(self, patches: list[Patch]) -> None:
        self.patches = patches

    def render_segments(self, console: Console) -> str:
        parts = []
        for x, y, strips in self.patches:
            for row, strip in enumerate(strips, y + 1):
                parts.append(f"\x1b[{row};{x + 1}H")
                parts.append(strip.render(console))
        return "".join(parts)


class PatchCompositor(Compositor):
    """Textual's, with a shorter way for changes that leave the layout alone."""

    def reflow(self, parent: Widget, size: Size) -> ReflowResult:
        """What a vanished widget uncovers may begin in the middle of a wide character, half of which would stay blank:
        where the layout has changed whole rows are painted."""
        result = super().reflow(parent, size)
        self._dirty_regions = {Region(0, dirty.y, size.width, dirty.height) for dirty in self._dirty_regions}
        return result

    def render_partial_update(self) -> PatchUpdate | None:  # type: ignore[override]
        dirty, self._dirty_regions = self._dirty_regions, set()
        screen = self.size.region
        widgets = [(widget, place, place.intersection(clip)) for widget, (place, clip) in self.visible_widgets.items()]
        patches = []
        for region in dirty:
            if any(other is not region and other.contains_region(region) for other in dirty):
                continue  # painted with the other
            for widget, place, part in _divide(region.intersection(screen), widgets):
                give_way()
                patches.append(Patch(part.x, part.y, widget.render_lines(part.translate(-place.offset))))
        return PatchUpdate(patches) if patches else None


_Placed = tuple[Widget, Region, Region]  # a widget, where it stands, and the part that is shown unless covered


def _divide(region: Region, widgets: Sequence[_Placed], first: int = 0) -> Iterator[_Placed]:
    """The parts of `region` and who is seen there; `widgets` come front to back, those before `first` are elsewhere."""
    if not region:
        return
    for index in range(first, len(widgets)):
        widget, place, shown = widgets[index]
        if shown.overlaps(region):
            part = shown.intersection(region)
            yield widget, place, part
            for rest in _around(region, part):
                yield from _divide(rest, widgets, index + 1)
            return


def _around(outer: Region, inner: Region) -> Iterator[Region]:
    """What is left of `outer` without `inner`, which lies in it."""
    yield Region(outer.x, outer.y, outer.width, inner.y - outer.y)
    yield Region(outer.x, inner.bottom, outer.width, outer.bottom - inner.bottom)
    yield Region(outer.x, inner.y, inner.x - outer.x, inner.height)
    yield Region(inner.right, inner.y, outer.right - inner.right, inner.height)

"""Every action by name in the command palette."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from textual.command import DiscoveryHit, Hit, Hits, Provider

from flint_tui.actions import ACTIONS, Action, key_name

if TYPE_CHECKING:
    from flint_tui.app import FlintApp


class ActionProvider(Provider):
    """All of ACTIONS but the palette itself."""

    def _actions(self) -> list[tuple[Action, str, Callable[[], object]]]:
        app: FlintApp = self.app  # type: ignore[assignment]
        keys = app.keys
        return [
            (action, key_name(keys.get(action.id, action.key)), lambda id=action.id: app.action_perform(id))
            for action in ACTIONS
            if action.id != "command_palette"
        ]

    async def discover(self) -> Hits:
        for action, keys, run in self._actions():
            yield DiscoveryHit(action.title, run, help=keys)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for action, keys, run in self._actions():
            if (score := matcher.match(action.title)) > 0:
                yield Hit(score, matcher.highlight(action.title), run, help=keys)

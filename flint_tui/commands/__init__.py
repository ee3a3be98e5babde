"""The sub-commands, one module each, and what they share."""

from __future__ import annotations

import typer.core


class HelpfulGroup(typer.core.TyperGroup):
    """Without a command it prints its help, and that is no failure: whoever types `flint` alone asks what there is."""

    def parse_args(self, ctx, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])

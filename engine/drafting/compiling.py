"""torch.compile as harvest and training use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RECOMPILES = 64  # a rollout compiles its block for each draft position, each for fixed and then for varying shapes


def compiled(function: Callable[..., Any], wanted: bool = True) -> Callable[..., Any]:
    """`function` with its elementwise work fused, where `wanted`. It runs as it is written where torch cannot compile
    it (a machine without a C compiler), only slower."""
    if not wanted:
        return function
    import torch
    import torch._dynamo

    torch._dynamo.config.suppress_errors = True
    torch._dynamo.config.recompile_limit = max(RECOMPILES, torch._dynamo.config.recompile_limit)
    return torch.compile(function)

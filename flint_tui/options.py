"""Every option of `flint chat`, as parsed: what the screen and the one-shot path are opened with."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Literal

from engine.sampling import Sampling

Mode = Literal["single", "speculative"]
DrafterName = Literal["auto", "eagle", "ngram"]
BackendName = Literal["auto", "cuda", "cpu", "torch"]


@dataclass(frozen=True)
class ChatOptions:
    """None means: flint's or the model's own choice.

    resume: the id of a saved conversation or its beginning, "" for the newest, None to start a new one.
    """

    model: str | None = None
    prompt: str | None = None
    system: str | None = None
    mode: Mode = "single"
    drafter: DrafterName = "auto"
    backend: BackendName = "auto"
    threads: int | None = None
    context: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    seed: int | None = None
    resume: str | None = None
    json: bool = False
    stats: bool | None = None  # None: where standard error is a terminal

    def sampling(self, default: Sampling) -> Sampling:
        """The model's own sampling (`default`) with what was asked for in its place; without a seed, a random one.

        Raises UsageError for a value out of range.
        """
        names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")
        asked = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(default, **asked, seed=secrets.randbits(63) if self.seed is None else self.seed)

"""Prompts in JSON lines: what an evaluation asks, and what a harvest may begin with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from engine.errors import CheckpointError, UsageError
from engine.files.paths import asset
from engine.files.reading import read_text

HELD_OUT = "prompts/heldout.jsonl"
LARGEST_FILE = 64 << 20


@dataclass(frozen=True)
class Prompt:
    """One question, and the kind of work that it stands for ("chat", "code", ...). complete: false where it is only
    how a question begins, which a harvest's model goes on writing."""

    domain: str
    text: str
    complete: bool = True


def load_prompts(path: Path | None, shipped: str = HELD_OUT, limit: int | None = None) -> list[Prompt]:
    """A file of {"domain": ..., "text": ...} a line; the domain may be left out, and so may
    "complete". None: the shipped one.

    limit: at most so many of each domain. Raises UsageError.
    """
    path = path or asset(shipped)
    try:
        lines = read_text(path, LARGEST_FILE).splitlines()
    except CheckpointError as error:
        raise UsageError(str(error), "give a file of JSON lines") from None
    prompts: list[Prompt] = []
    taken: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = Prompt(str(row.get("domain", "all")), str(row["text"]), bool(row.get("complete", True)))
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise UsageError(f'{path.name}, line {number}: expected an object with "text"') from None
        taken[prompt.domain] = taken.get(prompt.domain, 0) + 1
        if limit is None or taken[prompt.domain] <= limit:
            prompts.append(prompt)
    if not prompts:
        raise UsageError(f"{path.name} holds no prompts")
    return prompts

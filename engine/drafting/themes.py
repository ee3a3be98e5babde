"""Writes varied prompts for a harvest: sentence patterns of four domains, filled with topics, tasks and passages.

A drafter learns the text that it is shown, so what it is shown must vary: with the shipped lists the chat patterns
alone make some 300,000 questions. Passages to summarise and rewrite are the target's own (harvest.py asks for them
first). No prompt of the held-out set is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import numpy as np

from engine.drafting.prompts import Prompt, load_prompts
from engine.files.paths import asset

THEMES = "prompts/themes.json"
SHARES = {"chat": 0.26, "code": 0.22, "summarise": 0.15, "rewrite": 0.19, "open": 0.18}
_SLOT = re.compile(r"\{(\w+)\}")


class Themes:
    """The shipped patterns and words, and the prompts that must not be written."""

    def __init__(self) -> None:
        data = json.loads(asset(THEMES).read_text("utf-8"))
        self.patterns: dict[str, list[str]] = data["domains"]
        self.words: dict[str, list[str]] = data["words"]
        self.openers: list[str] = data["openers"]
        self.held_out = {plain(prompt.text) for prompt in load_prompts(None)}

    def openings(self, count: int, rng: np.random.Generator, passages: Sequence[str]) -> list[Prompt]:
        """`count` prompts, domains by SHARES ("open": the first words of one). Without passages none to
        summarise or rewrite."""
        domains = [d for d in SHARES if passages or d not in ("summarise", "rewrite")]
        shares = np.array([SHARES[d] for d in domains])
        written: list[Prompt] = []
        while len(written) < count:
            domain = domains[int(rng.choice(len(domains), p=shares / shares.sum()))]
            if domain == "open":
                prompt = Prompt(domain, _pick(self.openers, rng), complete=False)
            else:
                prompt = Prompt(domain, self._fill(_pick(self.patterns[domain], rng), rng, passages))
            if plain(prompt.text) not in self.held_out:
                written.append(prompt)
        return written

    def passage_requests(self, count: int, rng: np.random.Generator) -> list[Prompt]:
        """Prompts whose answers are short texts."""
        return [Prompt("passage", self._fill(_pick(self.patterns["passage"], rng), rng, ())) for _ in range(count)]

    def _fill(self, pattern: str, rng: np.random.Generator, passages: Sequence[str]) -> str:
        def word(slot: re.Match[str]) -> str:
            return _pick(passages if slot[1] == "passage" else self.words[slot[1]], rng)

        return _SLOT.sub(word, pattern)


def plain(text: str) -> str:
    """Lower case words only: what two spellings of one prompt have in common."""
    return " ".join(re.findall(r"\w+", text.lower()))


def _pick(choices: Sequence[str], rng: np.random.Generator) -> str:
    return choices[int(rng.integers(len(choices)))]

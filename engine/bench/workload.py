"""What timed runs are fed: the tokens of one text that ships with flint, so that every machine decodes the same.

Real text, not random ids: a speculative mode is as fast as its text is predictable.
"""

from __future__ import annotations

from functools import cache
from itertools import cycle, islice
from pathlib import Path

from engine.files.paths import asset
from engine.text.tokenizer import Tokenizer


def text_path() -> Path:
    """The shipped text (original prose, 2,900 words), also the default of `flint eval`."""
    return asset("text/plain.txt")


@cache
def plain_text() -> str:
    return text_path().read_text(encoding="utf-8")


def prompt_ids(tokenizer: Tokenizer, count: int) -> list[int]:
    """The first `count` tokens of the text, which starts again where it ends."""
    return list(islice(cycle(tokenizer.encode(plain_text())), count))

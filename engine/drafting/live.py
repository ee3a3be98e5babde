"""Acceptance as a user meets it: prompts answered by the decoder itself, drafting and verifying."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.drafting.evaluate import Acceptance
from engine.errors import BackendError, UsageError
from engine.events import Finished, Tokens
from engine.files.paths import asset
from engine.loading import Engine, ReplyOptions


@dataclass(frozen=True)
class Prompt:
    """One question, and the kind of work that it stands for ("chat", "code", ...)."""

    domain: str
    text: str


@dataclass(frozen=True)
class Answered:
    """One answer: its counts, the token ids of prompt and reply, and the seconds of its decoding."""

    domain: str
    acceptance: Acceptance
    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    decode_s: float
    draft_s: float


def load_prompts(path: Path) -> list[Prompt]:
    """A JSONL file of {"domain": ..., "text": ...}; the domain may be left out. Raises UsageError."""
    prompts = []
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path.name} cannot be read ({error})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompts.append(Prompt(str(row.get("domain", "all")), str(row["text"])))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise UsageError(f'{path.name}, line {number}: expected an object with "text"') from None
    if not prompts:
        raise UsageError(f"{path.name} holds no prompts")
    return prompts


def chosen_prompts(path: Path | None, limit: int | None) -> list[Prompt]:
    """The prompts of a file (None: flint's own held-out ones), at most `limit` of each domain. Raises UsageError."""
    prompts = load_prompts(path or asset("prompts/heldout.jsonl"))
    if limit is None:
        return prompts
    domains = dict.fromkeys(prompt.domain for prompt in prompts)
    return [prompt for domain in domains for prompt in [p for p in prompts if p.domain == domain][:limit]]


def answer(engine: Engine, prompts: Sequence[Prompt], options: ReplyOptions, depth: int) -> Iterator[Answered]:
    """Answer each prompt in a conversation of its own. Counts cover `depth` draft positions.

    Raises BackendError when a reply ends with an error.
    """
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt.text}]
        ids: list[int] = []
        tested, accepted = [0] * depth, [0] * depth
        usage = None
        for event in engine.reply(messages, options):
            match event:
                case Tokens():
                    ids += event.ids
                    for position, count in enumerate(event.position_drafted[:depth]):
                        tested[position] += count
                    for position, count in enumerate(event.position_accepted[:depth]):
                        accepted[position] += count
                case Finished(reason="error"):
                    raise BackendError(event.error, event.hint)
                case Finished():
                    usage = event.usage
                case _:
                    pass
        assert usage is not None
        counts = Acceptance(usage.verify_steps, tuple(tested), tuple(accepted))
        prompt_ids = tuple(engine.prompt(messages))
        yield Answered(prompt.domain, counts, prompt_ids, tuple(ids), usage.decode_s, usage.draft_s)

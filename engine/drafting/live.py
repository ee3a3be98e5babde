"""Acceptance as a user meets it: prompts answered by the decoder itself, drafting and verifying."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.drafting.evaluate import Acceptance
from engine.drafting.prompts import Prompt
from engine.errors import BackendError
from engine.events import Finished, Tokens
from engine.loading import Engine, ReplyOptions


@dataclass(frozen=True)
class Answered:
    """One answer: its counts, the token ids of prompt and reply, and the seconds of its decoding."""

    domain: str
    acceptance: Acceptance
    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    decode_s: float
    draft_s: float


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

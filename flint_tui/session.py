"""The conversation at hand: its messages, the prompts that wait, the reply that runs. Knows nothing of widgets."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from engine.events import Finished, Tokens
from flint_tui.conversations import SAVE_INTERVAL_S, Conversation, ConversationStore, Message, title_of
from flint_tui.decode_thread import EngineThread
from flint_tui.engine_door import ChatTurn, TurnOptions
from flint_tui.live import Figures, Live, Mode
from flint_tui.text.safety import PrintableStream


@dataclass
class RunningReply:
    """The reply that is being decoded; `message` is what was saved of it last."""

    number: int
    message: Message
    mode: Mode
    cancel: threading.Event
    text: str = ""
    marks: list[tuple[int, int]] = field(default_factory=list)
    saved_at: float = 0.0
    safe: PrintableStream = field(default_factory=PrintableStream)


class Session:
    """Turns prompts into jobs for the engine thread and its events into saved messages."""

    def __init__(
        self, store: ConversationStore, engine: EngineThread, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.store = store
        self.engine = engine
        self.clock = clock
        self.live = Live()
        self.options = TurnOptions()
        self.model = ""
        self.system = ""
        self.conversation: Conversation | None = None
        self.messages: list[Message] = []
        self.queue: list[str] = []
        self.reply: RunningReply | None = None
        self._replies = 0

    # -- conversations

    def new(self) -> None:
        """Start an empty conversation; it is saved with its first prompt."""
        self.conversation = None
        self.messages = []
        self.live.figures = Figures(mode=self.options.mode)

    def open(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.messages = self.store.messages(conversation.id)
        self.system = conversation.system
        self.live.figures = Figures(mode=self.options.mode)

    def fork(self, count: int) -> Conversation | None:
        """Continue in a copy of the first `count` messages."""
        if self.conversation is None:
            return None
        self.messages = self.messages[:count]
        self.conversation = self.store.fork(self.conversation, self.messages)
        self.store.flush()
        self.messages = self.store.messages(self.conversation.id)
        return self.conversation

    def set_system(self, system: str) -> None:
        self.system = system
        if self.conversation is not None:
            self.conversation = replace(self.conversation, system=system)
            self.store.update(self.conversation.id, system=system)

    def rename(self, title: str) -> None:
        if self.conversation is not None:
            self.conversation = replace(self.conversation, title=title)
            self.store.update(self.conversation.id, title=title)

    # -- turns

    @property
    def replying(self) -> bool:
        return self.reply is not None

    def ask(self, text: str) -> Message:
        """Append a prompt and start its reply."""
        assert self.reply is None
        if self.conversation is None:
            self.conversation = self.store.create(self.model, self.system, title_of(text))
        message = Message("user", text)
        self.messages.append(message)
        self._save(message)
        self.start_reply()
        return message

    def start_reply(self) -> RunningReply:
        """Decode an answer to the messages as they are."""
        self._replies += 1
        if self.options.sampling is not None and not self.options.fixed_seed:
            sampling = replace(self.options.sampling, seed=secrets.randbits(63))
            self.options = replace(self.options, sampling=sampling)
        self.live.start(self.options.mode)
        turns = self.turns()
        cancel = self.engine.reply(self._replies, turns, self.options)
        self.reply = RunningReply(
            self._replies, Message("assistant", ""), self.options.mode, cancel, saved_at=self.clock()
        )
        return self.reply

    def truncate(self, count: int) -> None:
        """Keep the first `count` messages."""
        del self.messages[count:]
        if self.conversation is not None:
            self.store.truncate(self.conversation.id, count)

    def turns(self) -> list[ChatTurn]:
        """What the model is given; a prompt that got no answer is left out, templates want turns to alternate."""
        turns: list[ChatTurn] = [{"role": "system", "content": self.system}] if self.system else []
        for message, following in zip(self.messages, [*self.messages[1:], None], strict=True):
            if following is not None and following.role == message.role:
                continue
            turns.append({"role": message.role, "content": message.text})
        return turns

    # -- the running reply

    def grow(self, event: Tokens) -> tuple[str, list[tuple[int, int]]]:
        """Add decoded text; returns what may be shown of it, and the new ranges of accepted draft tokens."""
        reply = self.reply
        assert reply is not None
        text = reply.safe.feed(event.text)
        marks = self._accepted(event, len(reply.text)) if text == event.text else []
        reply.text += text
        reply.marks += marks
        if self.clock() - reply.saved_at >= SAVE_INTERVAL_S:
            self._save_reply(reply)
        return text, marks

    def _accepted(self, event: Tokens, start: int) -> list[tuple[int, int]]:
        """Where in the reply the accepted draft tokens of this event stand; nothing if their texts do not add up."""
        engine = self.engine.engine
        if engine is None or not any(event.draft_mask):
            return []
        pieces = [engine.piece(token) for token in event.ids]
        ends = sum(map(len, pieces))
        if ends > len(event.text):  # a stop token at the end has no text
            pieces = pieces[:-1]
        if sum(map(len, pieces)) != len(event.text):
            return []
        marks: list[tuple[int, int]] = []
        for piece, accepted in zip(pieces, event.draft_mask, strict=False):
            end = start + len(piece)
            if accepted and end > start:
                if marks and marks[-1][1] == start:
                    marks[-1] = (marks[-1][0], end)
                else:
                    marks.append((start, end))
            start = end
        return marks

    def finish(self, event: Finished) -> tuple[Message | None, str]:
        """End the reply: the message, unless it is empty, and the text that was still held back."""
        reply, self.reply = self.reply, None
        assert reply is not None
        held = reply.safe.close()
        reply.text += held
        if not reply.text and event.reason == "error":
            return None, held
        figures = figures_of(event, self.live.figures)
        message = replace(
            reply.message, text=reply.text, marks=tuple(reply.marks), reason=event.reason, figures=figures
        )
        self.messages.append(message)
        self._save(message)
        return message, held

    def _save_reply(self, reply: RunningReply) -> None:
        reply.saved_at = self.clock()
        if self.conversation is not None:
            partial = replace(reply.message, text=reply.text, marks=tuple(reply.marks), reason="cancelled")
            self.store.save(self.conversation.id, len(self.messages), partial)

    def _save(self, message: Message) -> None:
        if self.conversation is not None:
            self.store.save(self.conversation.id, len(self.messages) - 1, message)


def figures_of(event: Finished, figures: Figures) -> dict[str, float | int | str]:
    """What is kept of a reply's figures. Rates are tokens per second, times seconds."""
    usage = event.usage
    kept: dict[str, float | int | str | None] = {
        "mode": figures.mode,
        "tokens": usage.completion_tokens or figures.completion_tokens,
        "tok_s": usage.decode_tok_s,
        "ttft_s": usage.ttft_s or None,
        "acceptance_length": usage.acceptance_length if usage.drafted else None,
    }
    return {key: value for key, value in kept.items() if value is not None}


SEPARATOR = " · "  # between the parts of a footer
_ENDINGS = {"cancelled": "stopped", "length": "token limit reached", "context": "context full", "error": "failed"}


def footer_of(message: Message) -> str:
    """The quiet line under a reply."""
    figures = message.figures
    parts = []
    if tokens := figures.get("tokens"):
        parts.append(f"{tokens:,} tokens" if tokens != 1 else "1 token")
    if rate := figures.get("tok_s"):
        parts.append(f"{rate:,.0f} tok/s" if rate >= 10 else f"{rate:.1f} tok/s")
    if ttft := figures.get("ttft_s"):
        parts.append(f"first token {ttft * 1e3:,.0f} ms" if ttft < 1 else f"first token {ttft:.1f} s")
    if length := figures.get("acceptance_length"):
        parts.append(f"{length:.2f} tok/step")
    if figures.get("mode") == "speculative":
        parts.append("speculative")
    if ending := _ENDINGS.get(message.reason):
        parts.append(ending)
    return SEPARATOR.join(parts)

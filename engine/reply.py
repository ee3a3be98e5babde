"""What has been decoded of one reply: its ids, its text, why it ended, and the events and figures that tell so."""

from __future__ import annotations

from collections.abc import Sequence

from engine.events import FinishReason, Tokens, Usage
from engine.meter import Reading
from engine.text.tokenizer import StopStrings, TextStream, Tokenizer


class Reply:
    """Collects decode steps until someone asks for the event that tells them."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_tokens: int,
        limit_reason: FinishReason,
        stop_ids: frozenset[int],
        stop: Sequence[str],
    ) -> None:
        """limit_reason: why the reply is over after max_tokens ("length" or "context")."""
        self.reason: FinishReason | None = None
        self.tokens = 0
        self.stop_ids = stop_ids
        self._max_tokens = max_tokens
        self._limit_reason: FinishReason = limit_reason
        self._text = TextStream(tokenizer, hidden=stop_ids)
        self._stops = StopStrings(stop)
        self._total = Reading()
        self._begin_event()

    def _begin_event(self) -> None:
        self._ids: list[int] = []
        self._mask: list[bool] = []
        self._shown = ""
        self._steps = Reading()

    @property
    def tokens_left(self) -> int:
        return self._max_tokens - self.tokens

    @property
    def untold(self) -> bool:
        """Whether something has been added since the last event."""
        return bool(self._ids or self._shown)

    def add(self, ids: Sequence[int], step: Reading | None = None, accepted: int = 0) -> None:
        """Tokens that one step brought, of which the first `accepted` were drafted; those after an end are dropped.

        step: what the step cost; its `tokens` is filled in here. None for the first token, which the prefill paid for.
        """
        before = self.tokens
        for index, token in enumerate(ids):
            self.tokens += 1
            self._ids.append(token)
            self._mask.append(index < accepted)
            self._shown += self._stops.push(self._text.push((token,)))
            if token in self.stop_ids or self._stops.matched is not None:
                self.reason = "stop"
                break
            if self.tokens_left <= 0:
                self.reason = self._limit_reason
                break
        if step is not None:
            self._steps += step + Reading(tokens=self.tokens - before)

    def flush_text(self) -> None:
        """The reply is over: release what waited for the rest of a character or of a stop string."""
        self._shown += self._stops.push(self._text.flush()) + self._stops.flush()

    def event(self) -> Tokens:
        """Everything since the last event."""
        steps = self._steps
        event = Tokens(
            ids=tuple(self._ids),
            text=self._shown,
            seconds=steps.seconds,
            bytes=steps.bytes,
            steps=steps.steps,
            verify_steps=steps.verify_steps,
            accepted=steps.accepted,
            drafted=steps.drafted,
            position_drafted=steps.position_drafted,
            position_accepted=steps.position_accepted,
            draft_seconds=steps.draft_seconds,
            draft_mask=tuple(self._mask),
        )
        self._total += steps
        self._begin_event()
        return event

    def usage(self, *, prompt_tokens: int, cached_tokens: int, ttft_s: float, prefill_s: float) -> Usage:
        """Totals of all events so far."""
        total = self._total
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self.tokens,
            cached_tokens=cached_tokens,
            ttft_s=ttft_s,
            prefill_s=prefill_s,
            decode_s=total.seconds,
            decode_steps=total.steps,
            decode_bytes=total.bytes,
            verify_steps=total.verify_steps,
            accepted=total.accepted,
            drafted=total.drafted,
            draft_s=total.draft_seconds,
            accepted_per_position=total.accepted_per_position,
        )

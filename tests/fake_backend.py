"""Backends without a model: the next token's logits are a fixed function of everything in the cache, so that one
wrong, missing or stale token in it changes what comes next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np

from engine.backends.base import ByteLedger, LoopStep, StepOutput, TokenBatch
from engine.config import ModelConfig
from engine.errors import BackendError, ContextOverflow
from engine.sampling import Sampling, sample
from tests.synthetic import small_config

Logits = Callable[[Sequence[int]], np.ndarray]


def hashed_logits(vocab: int, repeats: float = 0.0) -> Logits:
    """Pseudo-random logits of all tokens so far. With probability about `repeats`, what followed the last token's
    first occurrence is by far the likeliest: text that prompt lookup can guess."""

    def logits(tokens: Sequence[int]) -> np.ndarray:
        rng = np.random.default_rng(hash(tuple(tokens)) & 0xFFFFFFFF)
        row = rng.normal(0, 2, vocab).astype(np.float32)
        first = list(tokens).index(tokens[-1])
        if rng.random() < repeats and first + 1 < len(tokens):
            row[tokens[first + 1]] += 12
        return row

    return logits


class FakeBackend:
    """Implements Backend. `fail_at`: the position whose step raises BackendError, having fed nothing."""

    name = "fake"
    description = "fake"
    verify_width = 8

    def __init__(
        self,
        logits: Logits | None = None,
        *,
        config: ModelConfig | None = None,
        context_size: int = 256,
        chunk: int = 16,
        fail_at: int | None = None,
    ) -> None:
        self.config = config or small_config(vocab_size=259, eos_token_ids=(2,))
        self.context_size = context_size
        self.fail_at = fail_at
        self.tokens: list[int] = []
        self.widths: list[int] = []  # M of every step
        self.elapsed = 0.0  # simulated seconds: 10 ms a step, and 5 % more for each further token
        self.on_step: Callable[[], None] = lambda: None
        self._logits = logits or hashed_logits(self.config.vocab_size)
        self._chunk = chunk

    @property
    def position(self) -> int:
        return len(self.tokens)

    def step(
        self, tokens: Sequence[int], *, logits: Literal["all", "last"] = "all", features: Sequence[int] = ()
    ) -> StepOutput:
        if len(self.tokens) + len(tokens) > self.context_size:
            raise ContextOverflow("full")
        if self.fail_at is not None and len(self.tokens) + len(tokens) > self.fail_at:
            raise BackendError("The device was lost", "Restart it.")
        self.on_step()
        self.widths.append(len(tokens))
        self.elapsed += 0.01 * (1 + 0.05 * (len(tokens) - 1))
        rows, taken = [], []
        for token in tokens:
            assert 0 <= token < self.config.vocab_size
            self.tokens.append(token)
            rows.append(self._logits(self.tokens))
            taken.append(np.full(self.config.hidden_size, sum(self.tokens), np.float32))
        return StepOutput(
            np.stack(rows if logits == "all" else rows[-1:]), {layer: np.stack(taken) + layer for layer in features}
        )

    def prefill_chunk(self) -> int:
        return self._chunk

    def truncate(self, position: int) -> None:
        assert 0 <= position <= len(self.tokens)
        del self.tokens[position:]

    def ledger(self, tokens: int, position: int) -> ByteLedger:
        return ByteLedger({"head": 1000}, kv_read=position + tokens, kv_written=tokens)

    def close(self) -> None:
        self.tokens.clear()


class FakeLoopBackend(FakeBackend):
    """Implements WholeLoop, too: a device that runs ahead of its reader by up to a batch."""

    batch = 3
    step_seconds = 0.01

    def stream(
        self, token: int, *, sampling: Sampling, max_tokens: int, stop_ids: frozenset[int], history: Sequence[int]
    ) -> FakeStream:
        return FakeStream(self, token, sampling, max_tokens, stop_ids, list(history))


class FakeStream:
    def __init__(
        self,
        backend: FakeLoopBackend,
        token: int,
        sampling: Sampling,
        max_tokens: int,
        stop_ids: frozenset[int],
        history: list[int],
    ) -> None:
        assert history[-1] == token
        assert history[:-1] == backend.tokens
        assert max_tokens > 0
        self._cancelled = False
        self._batches = self._decode(backend, token, sampling, max_tokens, stop_ids, history)

    def cancel(self) -> None:
        self._cancelled = True

    def __iter__(self) -> Iterator[TokenBatch]:
        return self._batches

    def _decode(self, backend, token, sampling, max_tokens, stop_ids, history) -> Iterator[TokenBatch]:
        ids: list[int] = []
        done = 0
        while not self._cancelled and done < max_tokens and backend.position < backend.context_size:
            try:
                row = backend.step((token,)).logits[0]
            except BackendError as failure:
                yield TokenBatch(ids, self._times(backend, done, len(ids)), error=str(failure))
                return
            token = sample(row, sampling, history)
            history.append(token)
            ids.append(token)
            done += 1
            if token in stop_ids or len(ids) == backend.batch or done == max_tokens:
                yield TokenBatch(ids, self._times(backend, done, len(ids)))
                ids = []
                if token in stop_ids:
                    return
        if ids:
            yield TokenBatch(ids, self._times(backend, done, len(ids)))

    @staticmethod
    def _times(backend: FakeLoopBackend, done: int, count: int) -> list[float]:
        return [backend.step_seconds * (done - count + 1 + i) for i in range(count)]


class FakeSpeculativeBackend(FakeLoopBackend):
    """Implements SpeculativeLoop, too: its steps draft what followed the last token's latest occurrence; a held head
    drafts what `guess` says."""

    loop_widths: tuple[int, ...] = (2, 4, 8)
    head_widths: tuple[int, ...] = ()
    row_cost = 0.05  # of a single step, for each further row of the loop's width

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.loops: list[int] = []  # the width of every speculative loop
        self.learned: list[int] = []  # of those with a head
        self.guess: Callable[[Sequence[int], int], list[int]] = lambda history, count: []

    def can_speculate(self, sampling: Sampling) -> bool:
        return sampling.repeat_penalty == 1.0

    def head_bytes(self, passes: int) -> int:
        return 1000 * passes

    def stream_speculative(
        self,
        token: int,
        *,
        sampling: Sampling,
        max_tokens: int,
        stop_ids: frozenset[int],
        history: Sequence[int],
        width: int,
        most_drafts: int | None = None,
        least_match: int = 1,
        learned: bool = False,
    ) -> FakeSpeculativeStream:
        assert width in (self.head_widths if learned else self.loop_widths)
        assert self.can_speculate(sampling)
        (self.learned if learned else self.loops).append(width)
        guess = self.guess if learned and least_match > 1 else None
        return FakeSpeculativeStream(
            self, token, sampling, max_tokens, stop_ids, list(history), width, most_drafts, guess
        )


class FakeSpeculativeStream(FakeStream):
    def __init__(self, backend, token, sampling, max_tokens, stop_ids, history, width, most_drafts, guess) -> None:
        self._guess = guess
        self._width, self._most = width, width - 1 if most_drafts is None else min(most_drafts, width - 1)
        super().__init__(backend, token, sampling, max_tokens, stop_ids, history)

    def _decode(self, backend, token, sampling, max_tokens, stop_ids, history) -> Iterator[TokenBatch]:
        done, clock, ids, seconds, steps = 0, 0.0, [], [], []
        over = False
        while not over and not self._cancelled and done < max_tokens and backend.position < backend.context_size:
            earlier = [i for i, known in enumerate(history[:-1]) if known == history[-1]]
            room = min(self._most, max_tokens - done - 1)
            draft = history[earlier[-1] + 1 :][:room] if earlier else []
            if self._guess:
                draft = self._guess(history, room)
            clock += backend.step_seconds * (1 + backend.row_cost * (self._width - 1))
            kept = 0
            try:
                while True:
                    token = sample(backend.step((history[-1],)).logits[0], sampling, history)
                    history.append(token)
                    kept += 1
                    over = token in stop_ids
                    if over or kept > len(draft) or token != draft[kept - 1]:
                        break
            except BackendError as failure:
                yield TokenBatch([], [], error=str(failure))
                return
            accepted = sum(1 for a, b in zip(draft, history[-kept:], strict=False) if a == b)
            ids += history[-kept:]
            seconds += [clock] * kept
            steps.append(LoopStep(kept, len(draft), accepted, evidence=int(bool(draft and not self._guess))))
            done += kept
            if len(steps) == backend.batch or over:
                yield TokenBatch(ids, seconds, steps=steps)
                ids, seconds, steps = [], [], []
        if ids:
            yield TokenBatch(ids, seconds, steps=steps)

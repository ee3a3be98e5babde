"""The one generate loop: prefill, then single pass or speculation, told as events.

    prompt -> longest prefix already in the KV cache is kept, the rest fed in chunks -> first token
    single pass:   feed the last token, sample the next       (in the backend's own loop, where it has one)
    speculation:   draft K, feed K + 1 in one step, keep what the target agrees with, roll the cache back
                   (in the backend's own loop, where it can look drafts up itself)

The token just chosen is not in the cache yet: the conversation is one longer than what has been fed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.backends.base import Backend, SpeculativeLoop, TokenBatch, TokenStream, WholeLoop
from engine.drafting.base import Draft, Drafter
from engine.drafting.draft_length import DraftLength
from engine.drafting.loop_head import LoopHead
from engine.drafting.loop_pace import HEAD_PATIENCE, LoopPace, compared, width_for
from engine.drafting.verify import verify
from engine.errors import BackendError, CheckpointError, ContextOverflow, DrafterError, FlintError
from engine.events import Event, Finished, Note, Prefilled, PrefillProgress
from engine.meter import Reading
from engine.reply import Reply
from engine.sampling import Sampling, sample
from engine.text.tokenizer import Tokenizer

MEASURED_STEPS = 9  # single ones, before the first loop with a learned head
OTHER_CONTEXT = 1.5  # and before one where a step reads so many times as much as then, or as little
EVENT_SECONDS = 0.01  # faster decode steps share an event: at most about 100 a second


@dataclass(frozen=True)
class DecodeOptions:
    """How one reply is decoded.

    max_tokens: None decodes to the end of the context. stop: strings that end the reply, not shown. stop_ids: None
    takes the model's own. drafter: None is single pass. fallback: takes the place of a drafter that needs features
    (and so costs time with every token) where that one does not pay, or fails. draft_tokens: drafts in each verify
    step; None adapts it to what pays.
    """

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] | None = None
    drafter: Drafter | None = None
    fallback: Drafter | None = None
    draft_tokens: int | None = None


class Decoder:
    """Decodes replies, keeping what their prompts share in the KV cache. Not thread-safe."""

    def __init__(self, backend: Backend, tokenizer: Tokenizer) -> None:
        self.backend = backend
        self.tokenizer = tokenizer
        self.cached: list[int] = []  # the tokens whose keys and values the backend holds
        self._drafters: dict[int, tuple[Drafter, DraftLength]] = {}  # every drafter that follows the cache, by id()

    def generate(
        self, prompt_ids: Sequence[int], options: DecodeOptions | None = None, cancel: threading.Event | None = None
    ) -> Iterator[Event]:
        """Decode one reply; the last event is Finished, whatever happens. `cancel` is looked at every step.

        Closing the iterator early ends the reply, too. In every case the next reply starts from an exact cache.
        """
        return _Generation(self, list(prompt_ids), options or DecodeOptions(), cancel or threading.Event()).events()

    def follow(self, drafter: Drafter) -> DraftLength:
        """Keep a drafter in step with the cache from now on; what is measured about it on this backend."""
        known = self._drafters.get(id(drafter))
        if known is None:
            known = self._drafters[id(drafter)] = drafter, DraftLength(self.backend.verify_width, drafter.max_draft)
        return known[1]

    def truncate(self, position: int) -> None:
        """Keep the first `position` tokens, in the backend and in every drafter."""
        if position < self.backend.position:
            self.backend.truncate(position)
        del self.cached[position:]
        for drafter, _ in self._drafters.values():
            drafter.truncate(min(drafter.position, position))

    def settle(self) -> None:
        """After a step that failed half-way: keep what both the backend and `cached` are sure of."""
        with contextlib.suppress(BackendError):  # closed or lost: nothing is cached any more
            self.truncate(min(self.backend.position, len(self.cached)))
            return
        self.cached.clear()


class _Generation:
    """One reply under way."""

    def __init__(self, decoder: Decoder, prompt: list[int], options: DecodeOptions, cancel: threading.Event) -> None:
        self.decoder, self.backend = decoder, decoder.backend
        self.options, self.sampling, self.cancel = options, options.sampling, cancel
        self.drafter = options.drafter
        self.history = prompt  # grows by the reply
        self.prompt_tokens = len(prompt)
        room = self.backend.context_size + 1 - len(prompt)  # the last token need not be fed
        limit = room if options.max_tokens is None else options.max_tokens
        stop_ids = options.stop_ids
        self.reply = Reply(
            decoder.tokenizer,
            max_tokens=min(limit, room),
            limit_reason="context" if room < limit or options.max_tokens is None else "length",
            stop_ids=frozenset(self.backend.config.eos_token_ids) if stop_ids is None else stop_ids,
            stop=options.stop,
        )
        self.notes: list[Note] = []  # to be told with the next event
        self.paused = False
        self.cached_tokens = 0
        self.ttft_s = self.prefill_s = self.draft_seconds = 0.0
        self.mark = self.told = self.started = time.perf_counter()

    def events(self) -> Iterator[Event]:
        error = hint = ""
        try:
            yield from self._prefill()
            yield from self._decode()
        except FlintError as failure:
            self.reply.reason, error, hint = "error", str(failure), failure.hint
        except Exception as failure:  # told as the last event, so that no screen has to expect exceptions
            self.reply.reason, error = "error", f"{type(failure).__name__}: {failure}"
            hint = "This is a bug in flint: please report it."
        finally:
            self.decoder.settle()
        self.reply.flush_text()
        yield from self._tell()
        assert self.reply.reason is not None
        usage = self.reply.usage(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            ttft_s=self.ttft_s,
            prefill_s=self.prefill_s,
        )
        yield Finished(self.reply.reason, usage, error, hint)

    def _goes_on(self) -> bool:
        """Whether another step may be taken; looks at the cancel flag."""
        if self.reply.reason is None and self.cancel.is_set():
            self.reply.reason = "cancelled"
        return self.reply.reason is None

    # --- prefill --------------------------------------------------------------------------------------------------

    def _prefill(self) -> Iterator[Event]:
        """Bring the prompt into the cache and choose the first token."""
        prompt, backend, cached = self.history, self.backend, self.decoder.cached
        if not prompt:
            raise FlintError("The prompt is empty", "Write something; the chat template or tokenizer may drop it.")
        if max(prompt) >= backend.config.vocab_size:
            raise CheckpointError(
                f"The tokenizer makes token {max(prompt)}, the model knows {backend.config.vocab_size}",
                "its tokenizer.json belongs to another model: pack it again with the right one",
            )
        if len(prompt) > backend.context_size:
            raise ContextOverflow(
                f"The prompt has {len(prompt)} tokens, the context holds {backend.context_size}",
                "Shorten the prompt, or open the model with a larger --ctx.",
            )
        kept = self.cached_tokens = self._reusable()
        self.decoder.truncate(kept)
        logits = np.empty(0)
        while len(cached) < len(prompt):
            if not self._goes_on():
                return
            chunk = prompt[len(cached) : len(cached) + backend.prefill_chunk()]
            output = backend.step(chunk, logits="last", features=self._feature_layers)
            cached += chunk
            logits = output.logits[-1]
            self._extend_drafter(chunk, output.features)
            self.prefill_s = time.perf_counter() - self.started
            yield PrefillProgress(len(cached) - kept, len(prompt) - kept)
        if not self._goes_on():
            return
        if self.reply.tokens_left < 1:
            self.reply.reason = "length"
            return
        token = sample(logits, self.sampling, prompt)
        self.ttft_s = time.perf_counter() - self.started
        yield Prefilled(self.prompt_tokens - kept, kept, self.ttft_s)
        self.history.append(token)
        self.reply.add((token,))
        yield from self._tell()

    def _reusable(self) -> int:
        """Tokens of the prompt that need no work: those in the cache, and known to a drafter that needs features. The
        last one is always fed, for its logits."""
        cached, prompt, drafter = self.decoder.cached, self.history, self.drafter
        limit = min(len(cached), len(prompt) - 1)
        shared = next((i for i in range(limit) if cached[i] != prompt[i]), limit)
        if drafter is None or not drafter.feature_layers or drafter.position >= shared:
            return shared
        if self.options.draft_tokens is not None or not self.decoder.follow(drafter).paused:
            return drafter.position
        self.drafter = self.options.fallback  # not worth feeding the conversation again
        return shared

    # --- decoding -------------------------------------------------------------------------------------------------

    def _decode(self) -> Iterator[Event]:
        """Verify drafts where they pay, single passes where they do not."""
        if isinstance(self.drafter, LoopHead):
            yield from self._decode_with_head(self.drafter)
        if self.drafter is not None:
            self.decoder.follow(self.drafter).begin_reply()
            backend, goes_on = self.backend, self._goes_on()
            if goes_on and isinstance(backend, SpeculativeLoop) and self._loop_drafts(backend, self.drafter):
                # Where single steps take a third of a millisecond, the lookup's first sight of a prompt takes several:
                # it happens beside the loop.
                yield from self._stream(backend)
        while self._goes_on():
            draft = self._draft()
            if draft.ids and self.drafter is not None:
                if isinstance(self.backend, SpeculativeLoop) and self._loop_drafts(self.backend, self.drafter):
                    width = width_for(self.options.draft_tokens or len(draft.ids), self.backend.loop_widths)
                    yield from self._stream_speculative(self.backend, self.drafter, width)
                else:
                    yield from self._verify_step(self.drafter, draft)
            elif isinstance(self.backend, WholeLoop) and not self._feature_layers:
                yield from self._stream(self.backend)
            else:
                yield from self._single_step()

    def _decode_with_head(self, head: LoopHead) -> Iterator[Event]:
        """The reply in the loop that holds the head, as far as that pays; lookup takes its place for the rest."""
        backend, policy, fixed = self.backend, self.decoder.follow(head), self.options.draft_tokens
        policy.begin_reply()
        if not isinstance(backend, SpeculativeLoop) or not backend.can_speculate(self.sampling):
            self.notes.append(Note("The learned head does not draft with a repeat penalty: prompt lookup does"))
            return self._replace_drafter()
        moved = backend.ledger(1, len(self.decoder.cached)).total
        known = head.compared_bytes / OTHER_CONTEXT <= moved <= head.compared_bytes * OTHER_CONTEXT
        if self._goes_on() and fixed is None and not known:
            yield from self._stream(backend, MEASURED_STEPS)
            if self._goes_on():
                head.compared_bytes = moved
        width = head.width(fixed)
        if self._goes_on() and (fixed is not None or policy.opens_loop(width)):
            yield from self._stream_speculative(backend, head, width)
        if self.reply.reason is None:
            self._note_pause(policy)
            self._replace_drafter()

    def _single_step(self) -> Iterator[Event]:
        token, cached = self.history[-1], self.decoder.cached
        start = time.perf_counter()
        output = self.backend.step((token,), logits="last", features=self._feature_layers)
        cached.append(token)
        chosen = sample(output.logits[0], self.sampling, self.history)
        self.history.append(chosen)
        if self.drafter is not None:
            self.decoder.follow(self.drafter).record_step(1, time.perf_counter() - start)
            self._extend_drafter((token,), output.features)
        step = Reading(
            steps=1,
            seconds=self._lap(),
            bytes=self.backend.ledger(1, len(cached) - 1).total,
            draft_seconds=self._drafting_lap(),  # of a draft that was not worth verifying
        )
        self.reply.add((chosen,), step)
        yield from self._tell_when_due()

    def _stream(self, backend: WholeLoop, most: int | None = None) -> Iterator[Event]:
        """Single passes in the backend's own loop, until the reply ends, `most` have been made, or a draft is worth
        verifying. Its clock times the steps: what happens here costs it nothing.

        The loop is ahead by a token, which tells for nothing whether a draft begins well; only then is it left, as
        starting it anew has a price."""
        fed, clock = len(self.decoder.cached), 0.0
        conversation = self.history  # also of tokens after a stop string, which are cached but not in the reply
        stream = backend.stream(
            conversation[-1],
            sampling=self.sampling,
            max_tokens=min(self.reply.tokens_left, most or self.reply.tokens_left),
            stop_ids=self.reply.stop_ids,
            history=tuple(conversation),
        )

        def take(batch: TokenBatch) -> None:
            nonlocal fed, clock
            conversation.extend(batch.ids)
            for token, seconds in zip(batch.ids, batch.seconds, strict=True):
                if self.reply.reason is None:
                    moved = self.backend.ledger(1, fed).total
                    self.reply.add((token,), Reading(steps=1, seconds=seconds - clock, bytes=moved))
                    if self.drafter is not None:
                        self.decoder.follow(self.drafter).record_step(1, seconds - clock)
                fed, clock = fed + 1, seconds
            if batch.error:
                raise BackendError(batch.error)

        batches = iter(stream)
        expected: int | None = None  # the first token of the last draft
        try:
            for batch in batches:
                take(batch)
                self._lap()  # ending the stream for a draft counts as time of the verify step
                if not self._goes_on():
                    break
                draft = self._draft(beside=True).ids
                if draft and batch.ids and batch.ids[0] == expected:
                    break
                expected = draft[0] if draft else None
                yield from self._tell_when_due()
        finally:
            self._leave(stream, batches, take)

    def _leave(self, stream: TokenStream, batches: Iterator[TokenBatch], take: Callable[[TokenBatch], None]) -> None:
        """End a backend's loop: take what it had decoded when it saw the flag, and settle what is cached."""
        stream.cancel()
        for batch in batches:
            take(batch)
        with contextlib.suppress(BackendError):
            self.decoder.cached[:] = self.history[: self.backend.position]
        self.draft_seconds = 0.0  # of a draft before the loop, whose clock does not hold that time

    # --- speculation ----------------------------------------------------------------------------------------------

    def _draft(self, beside: bool = False) -> Draft:
        """The draft to verify now; without ids where single pass is the better step. beside: while the backend goes on
        decoding, so that drafting costs nothing."""
        drafter, fixed = self.drafter, self.options.draft_tokens
        if drafter is None:
            return Draft(())
        policy = self.decoder.follow(drafter)
        known = len(self.history) - 1
        room = self.backend.context_size - known - 1
        count = min(policy.ask() if fixed is None else fixed, self.reply.tokens_left - 1, room)
        if count < 1:
            self._note_pause(policy)
            return Draft(())
        start = time.perf_counter()
        try:
            if not drafter.feature_layers:  # it is handed its tokens only when it is asked
                drafter.extend(self.history[drafter.position : known], {})
            draft = drafter.propose(self.history[-1], count, self.sampling)
        except DrafterError as failure:
            self._without_drafter(f"Speculation is off: {failure}")
            return Draft(())
        if not beside:
            seconds = time.perf_counter() - start
            self.draft_seconds += seconds
            policy.record_draft(len(draft.ids), seconds)
        kept = policy.choose(draft.evidence, len(draft.ids)) if fixed is None else len(draft.ids)
        self._note_pause(policy)
        if self.drafter is not drafter:
            return Draft(())
        distributions = None if draft.distributions is None else draft.distributions[:kept]
        return Draft(draft.ids[:kept], distributions, draft.evidence)

    def _verify_step(self, drafter: Drafter, draft: Draft) -> Iterator[Event]:
        token, cached, backend = self.history[-1], self.decoder.cached, self.backend
        policy = self.decoder.follow(drafter)
        position, width = len(cached), 1 + len(draft.ids)
        start = time.perf_counter()
        output = backend.step((token, *draft.ids), logits="all", features=drafter.feature_layers)
        verified = verify(output.logits, draft, self.sampling, self.history, self.reply.stop_ids)
        kept = len(verified.tokens)  # positions: `token`, and every verified token but the last
        backend.truncate(position + kept)
        seconds = time.perf_counter() - start
        policy.record_step(width, seconds)
        policy.record_verified(draft.evidence, verified.tested, verified.accepted, seconds)
        fed = (token, *verified.tokens[:-1])
        cached += fed
        self._extend_drafter(fed, {layer: rows[:kept] for layer, rows in output.features.items()})
        step = Reading(
            steps=1,
            verify_steps=1,
            seconds=self._lap(),
            bytes=backend.ledger(width, position).total,
            drafted=len(draft.ids),
            accepted=verified.accepted,
            position_drafted=(1,) * verified.tested,
            position_accepted=tuple(int(i < verified.accepted) for i in range(verified.tested)),
            draft_seconds=self._drafting_lap(),
        )
        self.reply.add(verified.tokens, step, accepted=verified.accepted)
        yield from self._tell_when_due()

    def _loop_drafts(self, backend: SpeculativeLoop, drafter: Drafter) -> bool:
        """Whether the backend's loop can look up the same drafts itself."""
        return drafter.name == "ngram" and bool(backend.loop_widths) and backend.can_speculate(self.sampling)

    def _stream_speculative(self, backend: SpeculativeLoop, drafter: Drafter, width: int) -> Iterator[Event]:
        """Drafting and verifying in the backend's own loop, until the reply ends, or single pass or a wider step is the
        better way. Its clock times the steps, drafting included."""
        fixed = self.options.draft_tokens
        head = drafter if isinstance(drafter, LoopHead) else None
        policy = self.decoder.follow(drafter)
        pace = (
            LoopPace(policy, width, (width,), HEAD_PATIENCE if policy.pays_in_loop(width) else 1.0)
            if head
            else LoopPace(policy, width, backend.loop_widths)
        )
        learned = {"learned": True, "least_match": head.least_match} if head else {}
        fed, clock = len(self.decoder.cached), 0.0
        stream = backend.stream_speculative(
            self.history[-1],
            sampling=self.sampling,
            max_tokens=self.reply.tokens_left,
            stop_ids=self.reply.stop_ids,
            history=tuple(self.history),
            width=width,
            most_drafts=fixed,
            **learned,
        )

        def take(batch: TokenBatch) -> None:
            nonlocal fed, clock
            first = 0
            for step in batch.steps:
                ids, end = batch.ids[first : first + step.tokens], batch.seconds[first + step.tokens - 1]
                self.history.extend(ids)
                if self.reply.reason is None:
                    tested = compared(step)
                    moved = self.backend.ledger(width, fed).total
                    if head:
                        moved += backend.head_bytes(step.drafted if step.drafted and not step.evidence else 1)
                    reading = Reading(
                        steps=1,
                        verify_steps=int(step.drafted > 0),
                        seconds=end - clock,
                        bytes=moved,
                        drafted=step.drafted,
                        accepted=step.accepted,
                        position_drafted=(1,) * tested,
                        position_accepted=tuple(int(i < step.accepted) for i in range(tested)),
                    )
                    self.reply.add(ids, reading, accepted=step.accepted)
                    pace.record(step, end - clock)
                first, fed, clock = first + step.tokens, fed + step.tokens, end
            if batch.error:
                raise BackendError(batch.error)

        batches = iter(stream)
        better = width
        try:
            for batch in batches:
                take(batch)
                self._lap()
                better = width if fixed is not None else pace.best_width
                if not self._goes_on() or better != width:
                    break
                yield from self._tell_when_due()
        finally:
            self._leave(stream, batches, take)
        if head:
            return
        if better > width and self._goes_on():
            yield from self._stream_speculative(backend, drafter, better)
        elif better == 1 and self._goes_on() and isinstance(self.backend, WholeLoop):
            yield from self._stream(self.backend)  # and not at once into another loop of this kind

    # --- the drafter and the clock --------------------------------------------------------------------------------

    @property
    def _feature_layers(self) -> tuple[int, ...]:
        return self.drafter.feature_layers if self.drafter is not None else ()

    def _extend_drafter(self, tokens: Sequence[int], features: Mapping[int, np.ndarray]) -> None:
        """Hand over tokens that entered the cache, with their features; without features see `_draft`."""
        if self.drafter is None or not self._feature_layers:
            return
        start = time.perf_counter()
        try:
            self.drafter.extend(tokens, features)
        except DrafterError as failure:
            self._without_drafter(f"Speculation is off: {failure}")
            return
        seconds = time.perf_counter() - start
        self.draft_seconds += seconds
        self.decoder.follow(self.drafter).record_following(seconds)

    def _note_pause(self, policy: DraftLength) -> None:
        """Say once a reply that drafts do not pay. A drafter that needs features leaves then: following costs, too."""
        if policy.paused and not self.paused and self.options.draft_tokens is None:
            self.paused = True
            self.notes.append(Note(f"Speculation paused, it does not pay here: {policy.why_paused()}"))
            if self._feature_layers:
                self._replace_drafter()

    def _without_drafter(self, why: str) -> None:
        assert self.drafter is not None
        self.notes.append(Note(why))
        self.drafter.truncate(0)
        self._replace_drafter()

    def _replace_drafter(self) -> None:
        self.drafter = self.options.fallback if self.drafter is not self.options.fallback else None
        if self.drafter is not None:
            self.decoder.follow(self.drafter).begin_reply()

    def _lap(self) -> float:
        """Seconds since the last lap, or since the reader of the events came back for more."""
        before, self.mark = self.mark, time.perf_counter()
        return self.mark - before

    def _drafting_lap(self) -> float:
        """The drafter's part of the time since the last step."""
        seconds, self.draft_seconds = self.draft_seconds, 0.0
        return seconds

    def _tell_when_due(self) -> Iterator[Event]:
        if self.mark - self.told >= EVENT_SECONDS:
            yield from self._tell()

    def _tell(self) -> Iterator[Event]:
        """Everything that has not been told yet."""
        yield from self.notes
        self.notes.clear()
        if self.reply.untold:
            yield self.reply.event()
        self.mark = self.told = time.perf_counter()

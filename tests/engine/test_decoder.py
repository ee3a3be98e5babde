"""The generate loop over scripted backends: the same tokens whatever the path, and an exact cache however it ends."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers

from engine import decoder as decoder_module
from engine.decoder import DecodeOptions, Decoder
from engine.drafting import draft_length
from engine.drafting.base import Draft
from engine.drafting.loop_head import LoopHead
from engine.drafting.ngram import NgramDrafter
from engine.errors import DrafterError
from engine.events import Event, Finished, Note, Prefilled, PrefillProgress, Tokens
from engine.sampling import Sampling, sample
from engine.text.tokenizer import Tokenizer
from tests.fake_backend import FakeBackend, FakeLoopBackend, FakeSpeculativeBackend, hashed_logits
from tests.synthetic import byte_tokenizer

PROMPT = list(range(10, 50))
BACKENDS = [FakeBackend, FakeLoopBackend, FakeSpeculativeBackend]
SAMPLED = Sampling(temperature=0.8, top_k=40, top_p=0.9, repeat_penalty=1.1, seed=7)
WARM = Sampling(temperature=0.8, seed=7)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(byte_tokenizer())))


def ids_of(events: Sequence[Event]) -> list[int]:
    return [token for event in events if isinstance(event, Tokens) for token in event.ids]


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Tokens))


def end_of(events: Sequence[Event]) -> Finished:
    end = events[-1]
    assert isinstance(end, Finished)
    return end


def by_hand(
    prompt: Sequence[int], sampling: Sampling, count: int, stop: frozenset[int] = frozenset({2}), **backend
) -> list[int]:
    """The definition: one token at a time, nothing kept."""
    logits = FakeBackend(**backend)._logits
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(sample(logits(tokens), sampling, tokens))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


def spelled(text: str, then: int = 2):
    """Logits that write `text` after PROMPT, byte by byte (ids 3.. are the bytes), then `then` for ever."""
    wanted = [3 + byte for byte in text.encode()]

    def logits(tokens: Sequence[int]) -> np.ndarray:
        index = len(tokens) - len(PROMPT)
        row = np.zeros(259, np.float32)
        row[wanted[index] if 0 <= index < len(wanted) else then] = 10
        return row

    return logits


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_every_path_gives_the_tokens_of_the_definition(kind, sampling, tokenizer):
    wanted = by_hand(PROMPT, sampling, 60)
    events = list(Decoder(kind(), tokenizer).generate(PROMPT, DecodeOptions(sampling, max_tokens=60)))
    assert ids_of(events) == wanted
    assert end_of(events).usage.completion_tokens == len(wanted)


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED, WARM], ids=["greedy", "sampled", "no penalty"])
@pytest.mark.parametrize("fixed", [None, 1, 4])
def test_speculation_changes_nothing(kind, sampling, fixed, tokenizer):
    logits = hashed_logits(259, repeats=0.8)
    options = DecodeOptions(sampling, max_tokens=150)
    plain = list(Decoder(kind(logits), tokenizer).generate(PROMPT, options))
    decoder = Decoder(kind(logits), tokenizer)
    drafted = DecodeOptions(sampling, max_tokens=150, drafter=NgramDrafter(), draft_tokens=fixed)
    events = list(decoder.generate(PROMPT, drafted))
    assert ids_of(events) == ids_of(plain)
    usage = end_of(events).usage
    if fixed:
        assert usage.accepted > 0
        assert usage.completion_tokens - 1 == usage.decode_steps + usage.accepted
    assert decoder.cached == (PROMPT + ids_of(events))[: len(decoder.cached)]


def test_the_first_token_comes_at_once_and_fast_steps_share_events(tokenizer, monkeypatch):
    monkeypatch.setattr("engine.decoder.EVENT_SECONDS", 1e9)
    options = DecodeOptions(max_tokens=100, stop_ids=frozenset())
    events = list(Decoder(FakeBackend(), tokenizer).generate(PROMPT, options))
    assert [type(e) for e in events] == [PrefillProgress] * 3 + [Prefilled, Tokens, Tokens, Finished]
    assert [(e.done, e.total) for e in events[:3]] == [(16, 40), (32, 40), (40, 40)]  # type: ignore[union-attr]
    first, rest = events[4], events[5]
    assert isinstance(first, Tokens)
    assert isinstance(rest, Tokens)
    assert (len(first.ids), first.steps) == (1, 0)
    assert (len(rest.ids), rest.steps) == (99, 99)


def test_a_step_longer_than_the_pace_is_told_by_itself(tokenizer, monkeypatch):
    monkeypatch.setattr("engine.decoder.EVENT_SECONDS", 0.0)
    events = list(Decoder(FakeBackend(), tokenizer).generate(PROMPT, DecodeOptions(max_tokens=20)))
    assert [len(event.ids) for event in events if isinstance(event, Tokens)] == [1] * 20


def test_bytes_follow_the_ledger_and_the_whole_loop_s_clock_counts(tokenizer):
    events = list(Decoder(FakeLoopBackend(), tokenizer).generate(PROMPT, DecodeOptions(max_tokens=31)))
    usage = end_of(events).usage
    assert usage.decode_bytes == sum(1000 + (40 + i + 1) + 1 for i in range(30))
    assert usage.decode_s == pytest.approx(30 * FakeLoopBackend.step_seconds)
    assert usage.decode_tok_s == pytest.approx(1 / FakeLoopBackend.step_seconds)
    assert usage.decode_steps == usage.completion_tokens - 1
    assert usage.acceptance_length is None


# --- how a reply ends -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BACKENDS)
def test_stop_token_ends_and_is_not_shown(kind, tokenizer):
    events = list(Decoder(kind(spelled("héllo")), tokenizer).generate(PROMPT))
    assert text_of(events) == "héllo"
    assert ids_of(events)[-1] == 2
    assert end_of(events).reason == "stop"


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("drafter", [None, NgramDrafter], ids=["single", "speculative"])
def test_stop_string_ends_before_it(kind, drafter, tokenizer):
    backend = kind(spelled("one two STOP three four five six"))
    options = DecodeOptions(stop=("STOP",), drafter=drafter and drafter())
    events = list(Decoder(backend, tokenizer).generate(PROMPT, options))
    assert text_of(events) == "one two "
    assert end_of(events).reason == "stop"
    assert ids_of(events) == [3 + byte for byte in b"one two STOP"]


def test_text_held_for_a_stop_string_or_half_a_character_comes_out_at_the_end(tokenizer):
    text = "abc STO"
    events = list(
        Decoder(FakeBackend(spelled(text)), tokenizer).generate(PROMPT, DecodeOptions(stop=("STOP",), max_tokens=7))
    )
    assert text_of(events) == text
    events = list(Decoder(FakeBackend(spelled("aé")), tokenizer).generate(PROMPT, DecodeOptions(max_tokens=2)))
    assert text_of(events) == "a�"
    assert end_of(events).reason == "length"


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("drafter", [None, NgramDrafter], ids=["single", "speculative"])
def test_context_end(kind, drafter, tokenizer):
    backend = kind(hashed_logits(259, 0.8), context_size=64)
    options = DecodeOptions(stop_ids=frozenset(), drafter=drafter and drafter(), draft_tokens=4)
    events = list(Decoder(backend, tokenizer).generate(PROMPT, options))
    assert end_of(events).reason == "context"
    assert len(ids_of(events)) == 64 + 1 - len(PROMPT)  # the last one need not be fed
    assert ids_of(events) == by_hand(PROMPT, Sampling(), 25, frozenset(), logits=hashed_logits(259, 0.8))


def test_max_tokens_beyond_the_context_is_a_context_end(tokenizer):
    options = DecodeOptions(stop_ids=frozenset(), max_tokens=1000)
    events = list(Decoder(FakeBackend(context_size=50), tokenizer).generate(PROMPT, options))
    assert end_of(events).reason == "context"


@pytest.mark.parametrize("kind", BACKENDS)
def test_max_tokens_zero_prefills_only(kind, tokenizer):
    events = list(Decoder(kind(), tokenizer).generate(PROMPT, DecodeOptions(max_tokens=0)))
    assert ids_of(events) == []
    assert end_of(events).reason == "length"


def test_prompt_longer_than_the_context(tokenizer):
    (end,) = Decoder(FakeBackend(context_size=39), tokenizer).generate(PROMPT)
    assert isinstance(end, Finished)
    assert (end.reason, end.error) == ("error", "The prompt has 40 tokens, the context holds 39")
    assert "--ctx" in end.hint


def test_prompt_that_fills_the_context_still_gets_one_token(tokenizer):
    events = list(Decoder(FakeBackend(context_size=40), tokenizer).generate(PROMPT, DecodeOptions(max_tokens=5)))
    assert len(ids_of(events)) == 1
    assert end_of(events).reason == "context"


def test_empty_prompt(tokenizer):
    (end,) = Decoder(FakeBackend(), tokenizer).generate([])
    assert isinstance(end, Finished)
    assert end.error == "The prompt is empty"


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("fail_at", [20, 55])
def test_a_failing_backend_ends_the_reply_with_one_line(kind, fail_at, tokenizer):
    backend = kind(fail_at=fail_at)
    decoder = Decoder(backend, tokenizer)
    events = list(decoder.generate(PROMPT, DecodeOptions(max_tokens=60)))
    assert end_of(events).reason == "error"
    assert end_of(events).error == "The device was lost"
    assert decoder.cached == backend.tokens
    if fail_at == 55:
        assert ids_of(events) == by_hand(PROMPT, Sampling(), 16)


def test_unexpected_exceptions_are_told_too(tokenizer):
    def broken(tokens: Sequence[int]) -> np.ndarray:
        raise ZeroDivisionError("oops")

    end = end_of(list(Decoder(FakeBackend(broken), tokenizer).generate(PROMPT)))
    assert (end.reason, end.error) == ("error", "ZeroDivisionError: oops")


def test_logits_that_are_not_numbers_leave_an_exact_cache(tokenizer):
    good = hashed_logits(259, 0.9)
    backend = FakeBackend(lambda tokens: good(tokens) * (np.nan if len(tokens) > 60 else 1))
    decoder = Decoder(backend, tokenizer)
    events = list(decoder.generate(PROMPT, DecodeOptions(drafter=NgramDrafter(), draft_tokens=4)))
    assert end_of(events).reason == "error"
    assert decoder.cached == backend.tokens


@pytest.mark.parametrize("kind", BACKENDS)
def test_cancel_is_seen_within_one_step(kind, tokenizer):
    backend, cancel = kind(), threading.Event()
    steps_after = 0

    def on_step() -> None:
        nonlocal steps_after
        steps_after += cancel.is_set()
        if backend.position >= 60:
            cancel.set()

    backend.on_step = on_step
    decoder = Decoder(backend, tokenizer)
    events = list(decoder.generate(PROMPT, DecodeOptions(stop_ids=frozenset()), cancel))
    assert end_of(events).reason == "cancelled"
    assert steps_after <= (FakeLoopBackend.batch if kind is FakeLoopBackend else 0)
    assert decoder.cached == backend.tokens


def test_cancel_between_the_chunks_of_the_prefill(tokenizer):
    backend, cancel = FakeBackend(), threading.Event()
    decoder = Decoder(backend, tokenizer)
    events = []
    for event in decoder.generate(PROMPT, cancel=cancel):
        events.append(event)
        cancel.set()
    assert [type(event) for event in events] == [PrefillProgress, Finished]
    assert end_of(events).reason == "cancelled"
    assert decoder.cached == PROMPT[:16] == backend.tokens


# --- the cache afterwards ---------------------------------------------------------------------------------------------


def _stopped_by_string(kind):
    return kind(hashed_logits(259, 0.5)), DecodeOptions(SAMPLED, stop=("a", "e", "t", "\x03", "7")), None


def _cancelled(kind):
    cancel = threading.Event()
    backend = kind(hashed_logits(259, 0.5))
    backend.on_step = lambda: cancel.set() if backend.position >= 70 else None
    return backend, DecodeOptions(SAMPLED, stop_ids=frozenset()), cancel


def _full_length(kind):
    return kind(hashed_logits(259, 0.5)), DecodeOptions(SAMPLED, max_tokens=33), None


def _failed(kind):
    return kind(hashed_logits(259, 0.5), fail_at=61), DecodeOptions(SAMPLED, stop_ids=frozenset()), None


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("ending", [_stopped_by_string, _cancelled, _full_length, _failed])
@pytest.mark.parametrize("drafter", [None, NgramDrafter], ids=["single", "speculative"])
def test_the_next_turn_is_that_of_a_fresh_decoder(kind, ending, drafter, tokenizer):
    backend, options, cancel = ending(kind)
    follower = drafter and drafter()
    options = DecodeOptions(options.sampling, options.max_tokens, options.stop, options.stop_ids, follower)
    decoder = Decoder(backend, tokenizer)
    first = ids_of(list(decoder.generate(PROMPT, options, cancel)))
    assert first
    backend.fail_at = None
    backend.on_step = lambda: None

    second = PROMPT + first + [5, 6, 7]
    options = DecodeOptions(SAMPLED, max_tokens=40, drafter=follower)
    events = list(decoder.generate(second, options))
    assert ids_of(events) == by_hand(second, SAMPLED, 40, logits=hashed_logits(259, 0.5))
    assert end_of(events).usage.cached_tokens >= len(PROMPT)
    assert decoder.cached == backend.tokens


@pytest.mark.parametrize("kind", BACKENDS)
def test_only_what_is_new_is_fed(kind, tokenizer):
    backend = kind()
    decoder = Decoder(backend, tokenizer)
    first = ids_of(list(decoder.generate(PROMPT, DecodeOptions(max_tokens=10))))
    conversation = PROMPT + first + [5, 6]
    backend.widths.clear()
    events = list(decoder.generate(conversation, DecodeOptions(max_tokens=1)))
    # The reply's last token was never fed; with it, the two new ones.
    assert backend.widths == [3]
    assert end_of(events).usage.cached_tokens == len(conversation) - 3


def test_the_same_prompt_again_feeds_its_last_token_only(tokenizer):
    backend = FakeBackend()
    decoder = Decoder(backend, tokenizer)
    first = list(decoder.generate(PROMPT, DecodeOptions(max_tokens=5)))
    backend.widths.clear()
    second = list(decoder.generate(PROMPT, DecodeOptions(max_tokens=5)))
    assert ids_of(first) == ids_of(second)
    assert backend.widths == [1] * 5


def test_a_reader_that_leaves_early_leaves_an_exact_cache(tokenizer):
    for kind in BACKENDS:
        backend = kind()
        decoder = Decoder(backend, tokenizer)
        events = decoder.generate(PROMPT, DecodeOptions(stop_ids=frozenset()))
        for event in events:
            if isinstance(event, Tokens) and event.steps:
                break
        events.close()  # type: ignore[attr-defined]
        assert decoder.cached == backend.tokens
        again = list(decoder.generate([*PROMPT, 9], DecodeOptions(max_tokens=12)))
        assert ids_of(again) == by_hand([*PROMPT, 9], Sampling(), 12)


# --- drafters ---------------------------------------------------------------------------------------------------------


class FeatureDrafter:
    """Wants features, checks every one of them, guesses the true token with a fixed pattern of errors."""

    name = "features"
    feature_layers: tuple[int, ...] = (1, 2)
    max_draft = 4

    def __init__(self, logits, break_at: int | None = None) -> None:
        self.tokens: list[int] = []
        self._logits, self._break_at = logits, break_at

    @property
    def position(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int], features: Mapping[int, np.ndarray]) -> None:
        for index, token in enumerate(tokens):
            self.tokens.append(token)
            for layer in self.feature_layers:
                assert features[layer].shape == (len(tokens), 64)
                assert features[layer][index, 0] == sum(self.tokens) + layer
        if self._break_at is not None and len(self.tokens) > self._break_at:
            raise DrafterError("the head is corrupt")

    def truncate(self, position: int) -> None:
        assert 0 <= position <= len(self.tokens)
        del self.tokens[position:]

    def propose(self, token: int, count: int, sampling: Sampling) -> Draft:
        known = [*self.tokens, token]
        ids: list[int] = []
        for _ in range(count):
            guess = int(self._logits(known).argmax())
            ids.append(guess if len(known) % 6 else (guess + 1) % 259)
            known.append(ids[-1])
        return Draft(ids)


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_drafter_with_features_is_fed_them_through_every_path(kind, tokenizer):
    logits = hashed_logits(259)
    backend = kind(logits)
    decoder, drafter = Decoder(backend, tokenizer), FeatureDrafter(logits)
    options = DecodeOptions(max_tokens=40, drafter=drafter, draft_tokens=4)
    events = list(decoder.generate(PROMPT, options))
    assert ids_of(events) == by_hand(PROMPT, Sampling(), 40)
    assert drafter.tokens == decoder.cached
    usage = end_of(events).usage
    assert usage.accepted > 0
    assert len(usage.accepted_per_position) == 4

    # A turn without it, then one with it again: what it missed is fed once more for its features.
    reply = PROMPT + ids_of(events)
    middle = ids_of(list(decoder.generate([*reply, 4], DecodeOptions(max_tokens=10))))
    last = [*reply, 4, *middle, 5]
    events = list(decoder.generate(last, options))
    assert ids_of(events) == by_hand(last, Sampling(), 40)
    assert end_of(events).usage.cached_tokens == len(reply) - 1
    assert drafter.tokens == decoder.cached


@pytest.mark.parametrize("break_at", [20, 50])
def test_a_drafter_that_fails_is_left_behind(break_at, tokenizer):
    logits = hashed_logits(259)
    options = DecodeOptions(max_tokens=40, drafter=FeatureDrafter(logits, break_at), draft_tokens=3)
    decoder = Decoder(FakeBackend(logits), tokenizer)
    events = list(decoder.generate(PROMPT, options))
    assert [event.text for event in events if isinstance(event, Note)] == ["Speculation is off: the head is corrupt"]
    assert ids_of(events) == by_hand(PROMPT, Sampling(), 40)
    assert decoder.cached == decoder.backend.tokens  # type: ignore[attr-defined]


class WrongDrafter(NgramDrafter):
    """Never right."""

    def propose(self, token: int, count: int, sampling: Sampling) -> Draft:
        return Draft([258] * count)


class WrongFeatureDrafter(FeatureDrafter):
    def propose(self, token: int, count: int, sampling: Sampling) -> Draft:
        return Draft([258] * count)


def never_258(tokens: Sequence[int]) -> np.ndarray:
    row = hashed_logits(259)(tokens)
    row[258] = -100
    return row


def notes_of(events: Sequence[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Note)]


@pytest.fixture
def simulated(monkeypatch):
    """Makes the decoder read a backend's simulated clock, so that what pays is no matter of the machine."""

    def use(backend: FakeBackend) -> FakeBackend:
        monkeypatch.setattr(decoder_module, "time", SimpleNamespace(perf_counter=lambda: backend.elapsed))
        return backend

    return use


def test_what_does_not_pay_is_paused_and_said_once(tokenizer, simulated):
    options = DecodeOptions(max_tokens=200, stop_ids=frozenset(), drafter=WrongDrafter())
    backend = simulated(FakeBackend(never_258))
    events = list(Decoder(backend, tokenizer).generate(PROMPT, options))
    (note,) = notes_of(events)
    assert note.startswith("Speculation paused, it does not pay here")
    verify_steps = sum(width > 1 for width in backend.widths[3:])
    assert 1 <= verify_steps < 20
    assert end_of(events).usage.decode_s < 1.03 * 0.01 * 199


def test_a_loop_that_runs_ahead_is_left_only_for_a_draft_that_begins_well(tokenizer, simulated):
    backend = simulated(FakeLoopBackend(never_258))
    options = DecodeOptions(max_tokens=200, stop_ids=frozenset(), drafter=WrongDrafter())
    events = list(Decoder(backend, tokenizer).generate(PROMPT, options))
    assert notes_of(events) == []
    assert sum(width > 1 for width in backend.widths[3:]) == 0
    assert end_of(events).usage.decode_s == pytest.approx(0.01 * 199)

    repeating = simulated(FakeLoopBackend(hashed_logits(259, repeats=0.97)))
    options = DecodeOptions(max_tokens=200, stop_ids=frozenset(), drafter=NgramDrafter())
    usage = end_of(list(Decoder(repeating, tokenizer).generate(PROMPT, options))).usage
    assert usage.verify_steps > 3
    assert usage.decode_s < 0.7 * 0.01 * 199


def test_a_backend_that_drafts_itself_is_left_to_it(tokenizer, simulated):
    backend = simulated(FakeSpeculativeBackend(hashed_logits(259, repeats=0.97)))
    options = DecodeOptions(max_tokens=200, stop_ids=frozenset(), drafter=NgramDrafter())
    events = list(Decoder(backend, tokenizer).generate(PROMPT, options))
    usage = end_of(events).usage
    assert 1 <= len(backend.loops) < 8
    assert set(backend.widths[3:]) == {1}  # the fake's own way of verifying; none from the host
    assert usage.verify_steps > 3
    assert usage.completion_tokens - 1 == usage.decode_steps + usage.accepted
    assert usage.accepted_per_position[0] > 0.7
    assert usage.decode_s < 0.6 * 0.01 * 199
    told = [event for event in events if isinstance(event, Tokens)]
    assert sum(sum(event.draft_mask) for event in told) == usage.accepted


def test_the_first_sight_of_a_prompt_is_taken_beside_the_loop(tokenizer, simulated):
    """Before it, it would have cost more than a reply's drafts may, where a step takes a third of a millisecond."""
    backend = simulated(FakeSpeculativeBackend(hashed_logits(259, repeats=0.97)))

    class SlowReader(NgramDrafter):
        def extend(self, tokens, features) -> None:
            if self.position == 0:
                backend.elapsed += 0.05
            super().extend(tokens, features)

    decoder, drafter = Decoder(backend, tokenizer), SlowReader()
    decoder.follow(drafter).record_step(1, 0.01)  # as after another reply
    options = DecodeOptions(max_tokens=200, stop_ids=frozenset(), drafter=drafter)
    usage = end_of(list(decoder.generate(PROMPT, options))).usage
    assert backend.loops
    assert usage.decode_s < 0.7 * 0.01 * 199


@pytest.mark.parametrize("ends", ["length", "stop", "cancelled"])
def test_no_loop_is_begun_for_a_reply_that_has_ended(tokenizer, ends):
    """At its first token, or in its prefill: a loop would then find a cache without the whole prompt."""
    backend, cancel = FakeSpeculativeBackend(spelled("") if ends == "stop" else None), threading.Event()
    options = DecodeOptions(max_tokens=1 if ends == "length" else 9, drafter=NgramDrafter())
    events = []
    for event in Decoder(backend, tokenizer).generate(PROMPT, options, cancel):
        events.append(event)
        if ends == "cancelled" and isinstance(event, PrefillProgress):
            cancel.set()
    end = end_of(events)
    assert (end.reason, end.error) == (ends, "")
    assert backend.tokens == PROMPT[: 16 if ends == "cancelled" else None]


def test_a_speculative_loop_that_does_not_pay_is_left(tokenizer, simulated):
    def fading(tokens: Sequence[int]) -> np.ndarray:
        return hashed_logits(259, repeats=0.99 if len(tokens) < 120 else 0.0)(tokens)

    backend = simulated(FakeSpeculativeBackend(fading, context_size=800))
    backend.row_cost = 0.2
    options = DecodeOptions(max_tokens=500, stop_ids=frozenset(), drafter=NgramDrafter())
    usage = end_of(list(Decoder(backend, tokenizer).generate(PROMPT, options))).usage
    assert 1 <= len(backend.loops) < 6
    assert 0.3 * usage.completion_tokens < usage.decode_steps - usage.verify_steps
    assert usage.decode_s < 1.03 * 0.01 * usage.completion_tokens


def test_a_loop_is_left_for_a_wider_one(tokenizer, simulated):
    def round_and_round(tokens: Sequence[int]) -> np.ndarray:
        row = np.zeros(259, np.float32)
        row[PROMPT[(PROMPT.index(tokens[-1]) + 1) % len(PROMPT)]] = 9
        return row

    backend = simulated(FakeSpeculativeBackend(round_and_round, context_size=800))
    backend.row_cost = 0.4  # so dear that the prior guess of what is accepted pays for one draft at most
    decoder, drafter = Decoder(backend, tokenizer), NgramDrafter()
    for width in (1, 2, 4, 8):
        decoder.follow(drafter).record_step(width, 0.01 * (1 + 0.4 * (width - 1)))
    list(decoder.generate(PROMPT, DecodeOptions(max_tokens=600, stop_ids=frozenset(), drafter=drafter)))
    assert backend.loops == sorted(backend.loops)
    assert backend.loops[0] < backend.loops[-1] == 8


def test_a_repeat_penalty_is_verified_from_the_host(tokenizer):
    backend = FakeSpeculativeBackend(hashed_logits(259, repeats=0.9))
    options = DecodeOptions(SAMPLED, max_tokens=100, drafter=NgramDrafter(), draft_tokens=3)
    usage = end_of(list(Decoder(backend, tokenizer).generate(PROMPT, options))).usage
    assert backend.loops == []
    assert usage.accepted > 0
    assert max(backend.widths[3:]) == 4


def test_what_pays_is_used(tokenizer, simulated):
    logits = hashed_logits(259, repeats=0.97)
    options = DecodeOptions(max_tokens=200, stop_ids=frozenset(), drafter=NgramDrafter())
    events = list(Decoder(simulated(FakeBackend(logits)), tokenizer).generate(PROMPT, options))
    assert notes_of(events) == []
    assert end_of(events).usage.decode_s < 0.5 * 0.01 * 199


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_drafter_with_features_that_does_not_pay_makes_room_for_its_fallback(kind, tokenizer, simulated):
    backend = simulated(kind(never_258))
    drafter, fallback = WrongFeatureDrafter(never_258), NgramDrafter()
    decoder = Decoder(backend, tokenizer)
    options = DecodeOptions(max_tokens=200, stop_ids=frozenset(), drafter=drafter, fallback=fallback)
    events = list(decoder.generate(PROMPT, options))
    assert ids_of(events) == by_hand(PROMPT, Sampling(), 200, frozenset(), logits=never_258)
    assert notes_of(events)[0].startswith("Speculation paused")
    assert drafter.position < 100
    assert fallback.position > 200

    # The next turn does not feed the conversation again for its sake; another conversation tries it anew.
    longer = PROMPT + ids_of(events) + [7]
    following = list(decoder.generate(longer, DecodeOptions(max_tokens=3, drafter=drafter, fallback=fallback)))
    assert end_of(following).usage.cached_tokens == len(longer) - 2
    other = list(range(100, 140))
    list(decoder.generate(other, DecodeOptions(max_tokens=2, drafter=drafter, fallback=fallback)))
    assert drafter.tokens[:40] == other


def oracle(logits) -> Callable[[Sequence[int], int], list[int]]:
    """A head that knows what the target will say."""

    def guess(history: Sequence[int], count: int) -> list[int]:
        tokens = list(history)
        for _ in range(count):
            tokens.append(int(logits(tokens).argmax()))
        return tokens[len(history) :]

    return guess


def head_options(**changes: Any) -> DecodeOptions:
    values: dict[str, Any] = {"max_tokens": 200, "stop_ids": frozenset(), "fallback": NgramDrafter()}
    return DecodeOptions(**values | changes)


def holding(
    backend: FakeSpeculativeBackend, guess: Callable[[Sequence[int], int], list[int]]
) -> FakeSpeculativeBackend:
    backend.head_widths, backend.guess = (2, 4, 8), guess
    return backend


def test_a_head_in_the_loop_drafts_the_whole_reply(tokenizer, simulated):
    logits = hashed_logits(259)
    backend = simulated(holding(FakeSpeculativeBackend(logits, context_size=600), oracle(logits)))
    decoder, head = Decoder(backend, tokenizer), LoopHead("auto", backend.head_widths, lookup=True)
    events = list(decoder.generate(PROMPT, head_options(drafter=head)))
    usage = end_of(events).usage
    assert ids_of(events) == by_hand(PROMPT, Sampling(), 200, frozenset(), logits=logits)
    assert (backend.learned, backend.loops, notes_of(events)) == ([4], [], [])
    single = decoder_module.MEASURED_STEPS  # once, to compare with
    assert usage.verify_steps == usage.decode_steps - single
    assert usage.accepted == 3 * (200 - 1 - single) // 4
    assert usage.decode_bytes > usage.decode_steps * 1000 + usage.verify_steps * 3000
    following = list(decoder.generate(PROMPT, head_options(drafter=head)))
    assert end_of(following).usage.decode_steps == 50
    for drafts, width in ((1, 2), (3, 4), (5, 8), (9, 8)):
        list(decoder.generate(PROMPT, head_options(drafter=head, draft_tokens=drafts, max_tokens=9)))
        assert backend.learned[-1] == width


def test_a_head_is_compared_with_single_steps_of_such_a_context(tokenizer, simulated):
    """Of a step 1,000 bytes are weights, and one for each position."""
    logits = hashed_logits(259)
    backend = simulated(holding(FakeSpeculativeBackend(logits, context_size=2000), oracle(logits)))
    decoder, head = Decoder(backend, tokenizer), LoopHead("auto", backend.head_widths, lookup=True)
    single: list[int] = []
    for length in (20, 300, 900, 1000, 20):
        prompt = [(7 * i) % 250 + 3 for i in range(length)]
        usage = end_of(list(decoder.generate(prompt, head_options(drafter=head, max_tokens=42)))).usage
        single.append(usage.decode_steps - usage.verify_steps)  # the last of a loop may have no room for drafts
    assert [steps // decoder_module.MEASURED_STEPS for steps in single] == [1, 0, 1, 0, 1]
    assert decoder.follow(head).cost(1) == pytest.approx(backend.step_seconds)


def test_a_head_that_does_not_pay_makes_room_for_lookup(tokenizer, simulated):
    backend = simulated(
        holding(FakeSpeculativeBackend(never_258, context_size=800), lambda known, count: [258] * count)
    )
    backend.row_cost = 0.15
    decoder, head = Decoder(backend, tokenizer), LoopHead("eagle", backend.head_widths, lookup=False)
    options = head_options(drafter=head)
    events = list(decoder.generate(PROMPT, options))
    assert ids_of(events) == by_hand(PROMPT, Sampling(), 200, frozenset(), logits=never_258)
    assert backend.learned == [4]
    usage = end_of(events).usage
    assert usage.verify_steps < 30
    assert usage.decode_s < 1.08 * 0.01 * 199  # in this first reply
    # Now and then it is tried again.
    for _ in range(draft_length.PROBE_REPLIES - 1):
        list(decoder.generate(PROMPT, options))
    assert backend.learned == [4]
    looked = list(decoder.generate(PROMPT, options))
    assert backend.learned == [4, 4]
    assert end_of(looked).usage.verify_steps < usage.verify_steps / 2  # with less patience


def test_with_a_repeat_penalty_lookup_drafts_instead_of_the_head(tokenizer):
    logits = hashed_logits(259, repeats=0.9)
    backend = holding(FakeSpeculativeBackend(logits), oracle(logits))
    head = LoopHead("auto", backend.head_widths, lookup=True)
    events = list(
        Decoder(backend, tokenizer).generate(PROMPT, head_options(sampling=SAMPLED, drafter=head, max_tokens=100))
    )
    assert ids_of(events) == by_hand(PROMPT, SAMPLED, 100, frozenset(), logits=logits)
    assert backend.learned == []
    assert notes_of(events) == ["The learned head does not draft with a repeat penalty: prompt lookup does"]


def test_draft_marks_and_counts_by_position(tokenizer):
    logits = hashed_logits(259)
    options = DecodeOptions(max_tokens=60, drafter=FeatureDrafter(logits), draft_tokens=3)
    events = [e for e in Decoder(FakeBackend(logits), tokenizer).generate(PROMPT, options) if isinstance(e, Tokens)]
    for event in events:
        assert len(event.draft_mask) == len(event.ids)
        assert sum(event.draft_mask) == event.accepted == sum(event.position_accepted)
    drafted = np.sum([np.pad(e.position_drafted, (0, 3 - len(e.position_drafted))) for e in events], axis=0)
    assert list(drafted) == sorted(drafted, reverse=True)
    assert drafted[0] == sum(event.verify_steps for event in events)


def test_a_token_that_the_model_does_not_know_is_one_line(tokenizer):
    end = end_of(list(Decoder(FakeBackend(), tokenizer).generate([5, 100_000])))
    assert (end.reason, end.error.partition(",")[0]) == ("error", "The tokenizer makes token 100000")
    assert "another model" in end.hint


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_prompt_of_exactly_the_context_gets_one_token(kind, tokenizer):
    for size, tokens in ((len(PROMPT), 1), (len(PROMPT) + 1, 2)):
        events = list(Decoder(kind(context_size=size), tokenizer).generate(PROMPT))
        assert (end_of(events).reason, len(ids_of(events))) == ("context", tokens)
    end = end_of(list(Decoder(kind(context_size=len(PROMPT) - 1), tokenizer).generate(PROMPT)))
    assert (end.reason, end.error) == ("error", "The prompt has 40 tokens, the context holds 39")

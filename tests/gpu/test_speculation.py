"""Speculation inside the megakernel's loop, on the GPU: the tokens of single pass, at every width; then the decoder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.backends.base import LoopStep
from engine.backends.cuda import CudaBackend
from engine.decoder import DecodeOptions, Decoder
from engine.drafting.eagle import EagleDrafter
from engine.drafting.loop_head import LoopHead
from engine.drafting.ngram import NgramDrafter
from engine.drafting.prompts import load_prompts
from engine.events import Event, Finished, Tokens
from engine.loading import Engine, ReplyOptions, drafter_path, open_engine
from engine.packed.model import PackedModel
from engine.sampling import Sampling, sample
from engine.text.tokenizer import Tokenizer
from kernels.cuda.reference import draw
from tests.gpu.test_backend import random_tokens, small_model

WIDTHS = (2, 4, 8)
NEAR_TIE = 2e-2  # a logit gap below which two widths' roundings may choose differently
NEAR_BORDER = 5e-3  # a distance from a draw to the next id's share, of the whole probability
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "cool": {"temperature": 0.1, "seed": 3},
    "top-p": {"temperature": 0.7, "top_k": 100, "top_p": 0.9, "min_p": 0.01, "seed": 2**40 + 1},
}


def speculate(
    backend: CudaBackend,
    history: Sequence[int],
    count: int,
    width: int,
    stop: Sequence[int] = (),
    *,
    least_match: int = 1,
    learned: bool = False,
    **sampling: Any,
) -> tuple[list[int], list[LoopStep]]:
    """A reply after `history`, whose last token is fed first: its tokens and steps."""
    ids: list[int] = []
    seconds: list[float] = []
    steps: list[LoopStep] = []
    chosen = Sampling(**sampling)
    for batch in backend.stream_speculative(
        history[-1],
        sampling=chosen,
        max_tokens=count,
        stop_ids=frozenset(stop),
        history=history,
        width=width,
        least_match=least_match,
        learned=learned,
    ):
        assert not batch.error, batch.error
        ids += batch.ids
        seconds += batch.seconds
        steps += batch.steps
    assert seconds == sorted(seconds)
    assert sum(step.tokens for step in steps) == len(ids)
    return ids, steps


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_reply_is_that_of_single_steps(opened, width: int, sampling: dict[str, Any], record_property):
    model = small_model(tie_word_embeddings=False)  # greedy replies run into cycles of several tokens
    backend = opened(model, 1024)
    # Random weights repeat themselves little: the reference's greedy replies would accept 6 to 13 drafts in 400 tokens,
    # 19 to 77 in 900.
    prompt, count, compared = random_tokens(70, model.config.vocab_size), 400 if sampling else 900, 400
    backend.step(prompt[:-1])
    ids, steps = speculate(backend, prompt, count, width, **sampling)
    assert len(ids) == count
    assert backend.position == len(prompt) - 1 + count
    record_property("acceptance_length", count / len(steps))
    if not sampling:
        assert sum(step.accepted for step in steps) > 8
    backend.truncate(len(prompt) - 1)
    history, different, worst = list(prompt), 0, 0.0
    for token in ids[:compared]:
        logits = backend.step([history[-1]]).logits[0]
        if sample(logits, Sampling(**sampling), history) != token:
            different += 1
            # How close a call it was: of logits, or of the whole probability where it was drawn.
            worst = max(worst, draw(torch.from_numpy(logits), Sampling(**sampling), history)[1])
        history.append(token)
    record_property("different", different)
    record_property("closest_call", worst)
    # Only near ties may differ: widths round differently. Of a hundred borders between ids some lie near every draw.
    assert different <= (2 if not sampling else compared / 40)
    assert worst < (NEAR_TIE if not sampling else NEAR_BORDER)


def test_the_cache_after_a_speculative_reply_is_exact(opened):
    model = small_model(tie_word_embeddings=False)
    backend = opened(model, 1024)
    prompt = random_tokens(40, model.config.vocab_size)
    backend.step(prompt[:-1])
    ids, _ = speculate(backend, prompt, 200, 8, temperature=0.1)
    after = backend.step([7]).logits
    backend.truncate(0)
    backend.step(prompt[:-1])
    for token in [prompt[-1], *ids[:-1]]:
        backend.step([token], logits="last")
    expected = backend.step([7]).logits
    assert abs(after - expected).max() < 3e-3 * abs(expected).max()


@pytest.mark.parametrize("width", WIDTHS)
def test_stops_lengths_and_the_end_of_the_context(opened, width: int):
    model = small_model(tie_word_embeddings=False)
    backend = opened(model, 300)
    prompt = random_tokens(20, model.config.vocab_size)
    backend.step(prompt[:-1])
    ids, _ = speculate(backend, prompt, 250, width)
    for count in (1, 2, 5, 16, 33):
        backend.truncate(len(prompt) - 1)
        assert speculate(backend, prompt, count, width)[0] == ids[:count]
        assert backend.position == len(prompt) - 1 + count
    for stop in sorted(set(ids[150:]))[:5]:
        backend.truncate(len(prompt) - 1)
        stopped, _ = speculate(backend, prompt, 250, width, [stop, 4000])
        assert stopped == ids[: ids.index(stop) + 1]
        assert backend.position == len(prompt) - 1 + len(stopped)
    backend.truncate(len(prompt) - 1)
    whole, _ = speculate(backend, prompt, 10_000, width)
    assert len(whole) == 300 - len(prompt) + 1
    assert backend.position == 300


def test_a_cancelled_reply_ends_at_once(opened):
    model = small_model()
    backend = opened(model, 30000)
    prompt = random_tokens(20, model.config.vocab_size)
    backend.step(prompt[:-1])
    reply = backend.stream_speculative(
        prompt[-1],
        sampling=Sampling(temperature=1.0),
        max_tokens=29000,
        stop_ids=frozenset(),
        history=prompt,
        width=4,
    )
    count, cancelled = 0, 0.0
    for batch in reply:
        count += len(batch.ids)
        if not cancelled and count > 10:
            cancelled = time.perf_counter()
            reply.cancel()
    assert time.perf_counter() - cancelled < 0.5
    assert 10 < count < 29000
    assert backend.position == len(prompt) - 1 + count


def test_equal_seeds_give_equal_replies_over_a_long_history(opened):
    model = small_model()
    backend = opened(model, 8000)
    prompt = random_tokens(5000, model.config.vocab_size)
    backend.step(prompt[:-1])
    replies = []
    for _ in range(3):
        backend.truncate(len(prompt) - 1)
        replies.append(speculate(backend, prompt, 500, 8, temperature=0.5, seed=3))
    assert replies[0] == replies[1] == replies[2]


def answer(decoder: Decoder, prompt: Sequence[int], options: DecodeOptions) -> tuple[list[int], Finished]:
    events: list[Event] = list(decoder.generate(prompt, options))
    end = events[-1]
    assert isinstance(end, Finished)
    assert not end.error, end.error
    return [token for event in events if isinstance(event, Tokens) for token in event.ids], end


@pytest.mark.real_model
@pytest.mark.parametrize("drafts", [1, 3, 7, None])
def test_smollm2_says_the_same_with_drafts(packed_smollm2: Path, drafts: int | None, record_property):
    model = PackedModel.open(packed_smollm2)
    backend = CudaBackend.from_packed(model, context_size=2048)
    tokenizer = Tokenizer.from_packed(model)
    decoder, drafter = Decoder(backend, tokenizer), NgramDrafter()
    listing = "def area(width, height):\n    return width * height\n\n\n" * 3
    different, accepted, steps = 0, 0, 0
    prompts = (listing + "def area(", "Roses are red,", "1 2 3 4 5 6 7 8 1 2 3 4 5 6 7 8 1 2 3", "Once upon a time")
    for text in prompts:
        prompt = tokenizer.encode(text)
        plain, _ = answer(decoder, prompt, DecodeOptions(max_tokens=200, stop_ids=frozenset()))
        options = DecodeOptions(max_tokens=200, stop_ids=frozenset(), drafter=drafter, draft_tokens=drafts)
        drafted, end = answer(decoder, prompt, options)
        different += plain != drafted
        accepted += end.usage.accepted
        steps += end.usage.verify_steps
    backend.close()
    record_property("different", different)
    record_property("acceptance_length", 1 + accepted / max(1, steps))
    assert accepted > 0
    assert different <= 1  # two widths round apart: after a near tie, two right replies go their own ways


# --- a learned head in the loop ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(packed_smollm2: Path):
    opened = open_engine(str(packed_smollm2), "cuda", context=2048)
    yield opened
    opened.close()


@pytest.mark.real_model
@pytest.mark.parametrize("width", WIDTHS)
def test_the_head_in_the_loop_drafts_as_in_torch(engine: Engine, width: int, record_property):
    """Each step accepts as many drafts as the same head's, asked in torch about the same features."""
    head, _ = engine.drafters("eagle")
    backend = engine.backend
    assert isinstance(head, LoopHead)
    assert isinstance(backend, CudaBackend)
    path = drafter_path(engine.model)
    assert path is not None
    different = steps = accepted = 0
    for prompt in load_prompts(None, limit=2):
        prompt_ids = engine.prompt([{"role": "user", "content": prompt.text}])
        torch_head = EagleDrafter.open(path, engine.model)
        backend.truncate(0)
        backend.step(prompt_ids[:-1], logits="last")
        ids, taken = speculate(backend, prompt_ids, 100, width, least_match=head.least_match, learned=True)
        whole = [*prompt_ids, *ids]
        backend.truncate(0)
        features = backend.step(whole[:-1], logits="last", features=torch_head.feature_layers).features

        def rows(first: int, last: int, features: dict[int, np.ndarray] = features) -> dict[int, np.ndarray]:
            return {layer: values[first:last] for layer, values in features.items()}

        fed = len(prompt_ids) - 1
        torch_head.extend(whole[:fed], rows(0, fed))
        drafts: Sequence[int] = ()
        for step in taken:
            right = 0
            while right < min(len(drafts), step.drafted) and drafts[right] == whole[fed + 1 + right]:
                right += 1
            different += min(right, step.tokens) != step.accepted
            torch_head.extend(whole[fed : fed + step.tokens], rows(fed, fed + step.tokens))
            fed += step.tokens
            drafts = torch_head.propose(whole[fed], width - 1, Sampling()).ids
        steps, accepted = steps + len(taken), accepted + sum(step.accepted for step in taken)
    print(f"width {width}: acceptance length {1 + accepted / steps:.2f}, {different} of {steps} steps differ")
    record_property("acceptance_length", 1 + accepted / steps)
    record_property("different", different)
    assert different <= steps / 50  # near ties; the draft's cache is fp16, too


@pytest.mark.real_model
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("drafter", ["auto", "eagle"])
def test_smollm2_says_the_same_with_its_head(engine: Engine, drafter: str, width: int, record_property):
    different, accepted, steps, single_s, drafted_s = 0, 0, 0, 0.0, 0.0
    for prompt in load_prompts(None, limit=4):
        messages = [{"role": "user", "content": prompt.text}]
        ids: list[list[int]] = []
        for options in (
            ReplyOptions(sampling=Sampling(), max_tokens=128),
            ReplyOptions("speculative", drafter, Sampling(), 128, draft_tokens=width - 1),
        ):
            events = list(engine.reply(messages, options))
            end = events[-1]
            assert isinstance(end, Finished)
            assert not end.error, end.error
            ids.append([token for event in events if isinstance(event, Tokens) for token in event.ids])
            if options.mode == "single":
                single_s += end.usage.decode_s
            else:
                drafted_s += end.usage.decode_s
                accepted, steps = accepted + end.usage.accepted, steps + end.usage.verify_steps
        different += ids[0] != ids[1]
    length = 1 + accepted / max(1, steps)
    print(f"{drafter}, width {width}: acceptance length {length:.2f}, {single_s / drafted_s:.2f} times single pass")
    record_property("different", different)
    record_property("acceptance_length", length)
    record_property("times_single", single_s / drafted_s)
    assert different <= 3  # two widths round apart: after a near tie, two right replies go their own ways
    assert length > (1.4 if width == 2 else 1.8)

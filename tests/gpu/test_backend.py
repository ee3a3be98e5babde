"""The cuda backend against torch_reference: steps of every width, whole replies, sampling, the cache between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engine.backends.cuda import COLUMNS, PASSES, CudaBackend
from engine.errors import ContextOverflow, DeviceOutOfMemory
from engine.packed.matrix import Storage
from engine.sampling import Sampling, sample
from kernels.cuda import megakernel as megakernel_module
from tests.gpu.conftest import Opener
from tests.gpu.models import SHAPES, RandomModel, adopt_cache, config_of, relative_error
from tests.synthetic import small_config

TOLERANCE = 3e-3  # relative, of logits and features
PROMPT = PASSES * COLUMNS + 68  # long enough to run as prefill; ends inside a block of 16 positions


def random_tokens(count: int, vocab: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


def small_model(**overrides: Any) -> RandomModel:
    """A few megabytes that still fill more than one tile, unit and split."""
    values: dict[str, Any] = {"hidden_size": 512, "num_layers": 3, "head_dim": 64, "num_heads": 8, "num_kv_heads": 2}
    values |= {"intermediate_size": 1536, "vocab_size": 4099, "max_position_embeddings": 40000}
    return RandomModel(small_config("llama", **(values | overrides)), Storage("int4", 64), seed=11)


def check_steps(backend: CudaBackend, model: RandomModel, widths: Sequence[int], record: Callable[..., None]) -> None:
    """A prompt through the prefill, then steps of those widths; every row and feature against the reference."""
    config = model.config
    tokens = random_tokens(PROMPT + sum(widths), config.vocab_size)
    reference = model.reference(len(tokens))
    wanted, errors, at = [0, 1, config.num_layers], {}, 0
    for width in (PROMPT, *widths):
        part = tokens[at : at + width]
        expected = reference.step(part, features=wanted)
        output = backend.step(part, features=wanted)
        errors[f"logits of {width} at {at}"] = relative_error(output.logits, expected.logits)
        for layer in wanted:
            found = relative_error(output.features[layer], expected.features[layer])
            errors[f"x{layer} of {width} at {at}"] = found
        assert backend._megakernel is not None
        adopt_cache(reference, backend._megakernel.kv_cache)
        at += width
    record("worst_error", max(errors.values()))
    bad = {name: f"{error:.1e}" for name, error in errors.items() if not error < TOLERANCE}
    assert not bad, f"relative errors over {TOLERANCE}: {bad}"


@pytest.mark.parametrize("shape", SHAPES)
def test_real_shapes_two_layers_deep(opened: Opener, shape: str, record_property):
    smollm2 = shape.startswith("smollm2")
    storage = Storage("int4", 32, symmetric=False) if smollm2 else Storage("int4", 128)
    head = {"embed": Storage("int8", 32)} if smollm2 else {}
    model = RandomModel(config_of(shape, layers=2, vocab=8192), storage, overrides=head, seed=4)
    check_steps(opened(model), model, [1, 2, 3, 8, 1], record_property)


@pytest.mark.parametrize(
    "storage",
    [
        Storage("int4", 32),
        Storage("int4", 32, symmetric=False),
        Storage("int4", 64, symmetric=False),
        Storage("int4", 128, symmetric=False),
        Storage("int8", 32),
        Storage("int8", 128),
        Storage("bf16"),
    ],
    ids=str,
)
def test_formats(opened: Opener, storage: Storage, record_property):
    model = RandomModel(config_of("qwen3-0.6b", layers=2, vocab=8192), storage, seed=3)
    check_steps(opened(model), model, [1, 5], record_property)


def test_granite_3b_at_full_depth(opened: Opener, record_property):
    model = RandomModel(config_of("granite-3b"), seed=5)
    check_steps(opened(model), model, [1, 4, 8], record_property)


def test_a_verified_draft_equals_single_steps(opened: Opener, record_property):
    model = small_model()
    backend = opened(model)
    tokens = random_tokens(60, model.config.vocab_size)
    backend.step(tokens[:50])
    together = backend.step(tokens[50:58]).logits
    backend.truncate(50)
    single = np.concatenate([backend.step([token]).logits for token in tokens[50:58]])
    error = relative_error(together, single)
    record_property("worst_error", error)
    assert error < TOLERANCE


def test_the_cache_after_a_truncation_is_exact(opened: Opener):
    model = small_model()
    backend = opened(model)
    tokens = random_tokens(120, model.config.vocab_size)
    backend.step(tokens[:100])
    expected = backend.step(tokens[100:105]).logits
    backend.step(random_tokens(90, model.config.vocab_size, seed=2))
    backend.truncate(100)
    assert np.array_equal(backend.step(tokens[100:105]).logits, expected)
    backend.truncate(0)
    backend.step(tokens[:100])
    assert np.array_equal(backend.step(tokens[100:105]).logits, expected)


# --- whole replies --------------------------------------------------------------------------------------------------


def stream(backend: CudaBackend, history: Sequence[int], count: int, stop: Sequence[int] = (), **sampling: Any):
    """A whole reply after `history`, whose last token is fed first; the tokens, and the time of each."""
    ids: list[int] = []
    seconds: list[float] = []
    for batch in backend.stream(
        history[-1], sampling=Sampling(**sampling), max_tokens=count, stop_ids=frozenset(stop), history=history
    ):
        assert not batch.error, batch.error
        ids += batch.ids
        seconds += batch.seconds
    return ids, seconds


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy with penalty": {"repeat_penalty": 1.3, "repeat_window": 20},
    "temperature": {"temperature": 0.8, "seed": 5},
    "top-k": {"temperature": 1.0, "top_k": 7, "seed": 2**40 + 1},
    "top-p": {"temperature": 1.2, "top_p": 0.6, "seed": 7},
    "min-p": {"temperature": 1.5, "min_p": 0.1, "seed": 8},
    "all": {"temperature": 0.9, "top_k": 200, "top_p": 0.9, "min_p": 0.02, "repeat_penalty": 1.1, "seed": 9},
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_reply_equals_sampling_step_by_step(opened: Opener, sampling: dict[str, Any], record_property):
    model = small_model()
    backend = opened(model)
    prompt, count = random_tokens(70, model.config.vocab_size), 128
    backend.step(prompt[:-1])
    ids, seconds = stream(backend, prompt, count, **sampling)
    assert len(ids) == count
    assert seconds == sorted(seconds)
    assert backend.position == len(prompt) - 1 + count
    # Each token again, from the same history, with the sampler of the engine on the logits of single steps.
    backend.truncate(len(prompt) - 1)
    history, different = list(prompt), 0
    for token in ids:
        logits = backend.step([history[-1]]).logits[0]
        different += sample(logits, Sampling(**sampling), history) != token
        history.append(token)
    record_property("different", different)
    # The device sums probabilities in float32: a draw within 1e-6 of a border may fall on its other side.
    assert different <= (0 if sampling.get("temperature", 0) == 0 else 1)


def test_equal_seeds_give_equal_replies(opened: Opener):
    model = small_model()
    backend = opened(model, 1024)
    prompt = random_tokens(40, model.config.vocab_size)
    replies = []
    for seed in (3, 3, 3, 4):
        backend.truncate(0)
        backend.step(prompt[:-1])
        replies.append(stream(backend, prompt, 512, temperature=0.8, top_p=0.95, seed=seed)[0])
    assert replies[0] == replies[1] == replies[2]
    assert replies[0] != replies[3]


def test_a_reply_ends_at_its_stop_token(opened: Opener):
    model = small_model()
    backend = opened(model)
    prompt = random_tokens(20, model.config.vocab_size)
    backend.step(prompt[:-1])
    ids, _ = stream(backend, prompt, 60, temperature=1.0, seed=1)
    stop = ids[40]
    backend.truncate(len(prompt) - 1)
    stopped, _ = stream(backend, prompt, 60, stop=[stop, 4000], temperature=1.0, seed=1)
    assert stopped == ids[: ids.index(stop) + 1]
    assert backend.position == len(prompt) - 1 + len(stopped)


def test_a_cancelled_reply_leaves_an_exact_cache(opened: Opener):
    model = small_model()
    backend = opened(model, 30000)
    prompt = random_tokens(20, model.config.vocab_size)
    backend.step(prompt[:-1])
    reply = backend.stream(prompt[-1], sampling=Sampling(), max_tokens=29000, stop_ids=frozenset(), history=prompt)
    ids: list[int] = []
    cancelled = 0.0
    for batch in reply:
        ids += batch.ids
        if not cancelled and len(ids) > 10:
            cancelled = time.perf_counter()
            reply.cancel()
    assert time.perf_counter() - cancelled < 1.0
    assert 10 < len(ids) < 29000
    assert backend.position == len(prompt) - 1 + len(ids)
    continued = backend.step([7]).logits
    backend.truncate(0)
    backend.step(prompt[:-1])
    for token in [prompt[-1], *ids[:-1]]:
        backend.step([token], logits="last")
    assert np.array_equal(backend.step([7]).logits, continued)


def test_a_full_cache_ends_the_reply(opened: Opener):
    model = small_model()
    backend = opened(model, 100)
    prompt = random_tokens(90, model.config.vocab_size)
    backend.step(prompt[:-1])
    ids, _ = stream(backend, prompt, 1000)
    assert len(ids) == 11  # positions 89 .. 99
    assert backend.position == 100
    with pytest.raises(ContextOverflow):
        stream(backend, [*prompt, *ids], 1)


def test_twenty_thousand_tokens(opened: Opener, record_property):
    model = small_model()
    backend = opened(model, 21000)
    started = time.perf_counter()
    ids, seconds = stream(backend, [5], 20000, temperature=1.0, seed=1)
    record_property("tokens_per_second", round(20000 / (time.perf_counter() - started)))
    assert len(ids) == 20000
    assert seconds == sorted(seconds)


def test_settling_changes_times_only(opened: Opener):
    model = small_model()
    backend = opened(model, 300)
    megakernel = backend._megakernel
    assert megakernel is not None
    backend.step(random_tokens(60, model.config.vocab_size))
    before = megakernel.step([7], 60)[0].cpu()
    seconds = megakernel.settle()
    assert len(seconds) == megakernel_module.PLACES
    assert min(seconds) > 0
    assert torch.equal(megakernel.step([7], 60)[0].cpu(), before)


def test_poisoned_memory_changes_nothing(opened: Opener):
    """Whatever the kernels do not write, they must not read: all free memory and the cache hold NaN first."""
    model = small_model()
    prompt = random_tokens(70, model.config.vocab_size)

    def everything() -> list[Any]:
        backend = opened(model)
        assert backend._megakernel is not None
        backend._megakernel.kv_cache.fill_(torch.nan)
        first = backend.step(prompt[:50], features=[1])
        second = backend.step(prompt[50:57])
        reply = stream(backend, prompt[:58], 40)[0]
        drawn = stream(backend, [*prompt[:58], *reply, 9], 40, temperature=0.7, top_p=0.9, seed=1)[0]
        backend.close()
        return [first.logits, first.features[1], second.logits, np.array(reply), np.array(drawn)]

    clean = everything()
    large = [torch.full((64 << 20,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(16)]
    small = [torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for size in (512, 8192, 100000) * 200]
    del large, small  # torch's allocator hands these blocks out again, as they are
    for before, after in zip(clean, everything(), strict=True):
        assert np.array_equal(before, after)
    assert np.isfinite(clean[0]).all()


def test_a_context_that_does_not_fit_names_what_does(opened: Opener):
    model = small_model()
    with pytest.raises(DeviceOutOfMemory, match=r"KV cache for 4000000000 positions") as caught:
        opened(model, 4_000_000_000)
    assert "--ctx" in caught.value.hint

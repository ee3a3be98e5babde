"""The real smollm2 on the GPU: greedy replies equal the reference's, up to near ties."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.backends.cuda import CudaBackend
from engine.backends.torch_reference import TorchReference
from engine.packed.model import PackedModel
from engine.sampling import Sampling
from engine.text.tokenizer import Tokenizer

pytestmark = pytest.mark.real_model

NEAR_TIE = 2e-2  # a logit gap below which two right backends may choose differently
TOKENS = 128
PROMPTS = (
    "Gravity is",
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "The three states of matter are",
    "A good recipe for pancakes begins with",
    "In 1969, the first human",
    "Water boils at",
    "The difference between a virus and a bacterium is",
    "Dear Sir or Madam,",
    "List five animals that live in the ocean:",
    "The square root of 144 is",
    "import numpy as np\n",
    "Shakespeare wrote",
    "The stock market fell because",
    "To change a flat tire, first",
    "Photosynthesis is the process by which",
    "SELECT name FROM users WHERE",
    "Der Hund läuft durch",
    "Roses are red,",
)


@pytest.fixture(scope="module")
def both(packed_smollm2: Path):
    model = PackedModel.open(packed_smollm2)
    backend = CudaBackend.from_packed(model, context_size=1024)
    yield Tokenizer.from_packed(model), backend, TorchReference.from_packed(model, context_size=1024, device="cuda")
    backend.close()


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt[:12].strip())
def test_greedy_reply(both, prompt: str, record_property):
    tokenizer, backend, reference = both
    history = tokenizer.encode(prompt)
    backend.truncate(0)
    if len(history) > 1:
        backend.step(history[:-1])
    reply: list[int] = []
    for batch in backend.stream(
        history[-1], sampling=Sampling(), max_tokens=TOKENS, stop_ids=frozenset(), history=history
    ):
        assert not batch.error
        reply += batch.ids
    assert len(reply) == TOKENS
    # The reference reads prompt and reply at once, so one near tie does not hide what follows it.
    reference.truncate(0)
    logits = reference.step([*history, *reply[:-1]]).logits[len(history) - 1 :]
    gaps = [float(row.max() - row[token]) for row, token in zip(logits, reply, strict=True)]
    record_property("near_ties", sum(gap > 0 for gap in gaps))
    record_property("worst_gap", round(max(gaps), 4))
    assert max(gaps) < NEAR_TIE, f"token {gaps.index(max(gaps))} of the reply is no near tie"

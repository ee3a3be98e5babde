"""The native CPU backend on the real smollm2, against the float32 reference."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import assets
from engine.backends.cpu import CpuBackend
from engine.backends.torch_reference import TorchReference
from engine.packed.model import PackedModel
from engine.sampling import Sampling
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer

pytestmark = pytest.mark.real_model

ASSETS = Path(next(iter(assets.__path__)))
NEAR_TIE = 0.5  # logits; engines that round differently part here (llama.cpp with and without flash attention does)


class Pair:
    """The same model on both backends."""

    def __init__(self, directory: Path) -> None:
        self.model = PackedModel.open(directory)
        self.tokenizer = Tokenizer.from_packed(self.model)
        self.cpu = CpuBackend(self.model, threads=2)
        self.reference = TorchReference.from_packed(self.model)


@pytest.fixture(scope="module")
def pair(smollm2: Path) -> Iterator[Pair]:
    pair = Pair(smollm2)
    yield pair
    pair.cpu.close()
    pair.reference.close()


def english(pair: Pair, count: int) -> list[int]:
    text = (ASSETS / "text" / "plain.txt").read_text() + (ASSETS / "prompts" / "heldout.jsonl").read_text()
    ids = pair.tokenizer.encode(text)
    assert len(ids) >= count
    return ids[:count]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_logits_on_english_text(pair: Pair) -> None:
    ids = english(pair, 160)
    pair.cpu.truncate(0)
    pair.reference.truncate(0)
    ours, theirs = pair.cpu.step(ids).logits, pair.reference.step(ids).logits
    relative = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    p, q = log_softmax(theirs), log_softmax(ours)
    divergence = (np.exp(p) * (p - q)).sum(-1)
    assert relative < 2e-3, relative  # 6e-4 seen; one int8 digit per activation instead of two gives 3e-2
    assert divergence.mean() < 1e-4, divergence.mean()  # 4e-6 seen; one digit: 1e-2
    assert divergence.max() < 2e-3, divergence.max()


def test_pieces_and_threads_give_the_same_bits(pair: Pair, smollm2: Path) -> None:
    ids = english(pair, 90)
    pair.cpu.truncate(0)
    whole = pair.cpu.step(ids).logits
    pair.cpu.truncate(64)
    np.testing.assert_array_equal(np.concatenate([pair.cpu.step([token]).logits for token in ids[64:70]]), whole[64:70])
    np.testing.assert_array_equal(pair.cpu.step(ids[70:75]).logits, whole[70:75])
    alone = CpuBackend(PackedModel.open(smollm2), threads=1)
    np.testing.assert_array_equal(alone.step(ids[:20]).logits, whole[:20])
    alone.close()


def negative_log_likelihood(backend: CpuBackend | TorchReference, ids: list[int]) -> float:
    """Mean over all tokens but the first, in nats; the logits are never held all at once."""
    backend.truncate(0)
    total = 0.0
    for start in range(0, len(ids) - 1, 250):
        piece = ids[start : start + 250]
        wanted = ids[start + 1 : start + 251]
        rows = log_softmax(backend.step(piece).logits)[: len(wanted)]
        total -= rows[np.arange(len(wanted)), wanted].sum()
    return total / (len(ids) - 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_likelihood_of_four_thousand_tokens(pair: Pair) -> None:
    ids = english(pair, 4000)
    ours, theirs = negative_log_likelihood(pair.cpu, ids), negative_log_likelihood(pair.reference, ids)
    print(f"\nmean negative log likelihood of 4,000 tokens: {ours:.5f}, float32 {theirs:.5f}")
    assert abs(ours - theirs) < 0.01


def greedy_matches(pair: Pair, prompt: str, count: int) -> tuple[int, float]:
    """Generates greedily, then asks the reference about every choice.

    Returns the tokens that agree before the first near tie or the end, and the smallest clear margin passed.
    """
    template = ChatTemplate.from_packed(pair.model, pair.tokenizer)
    ids = template.encode([{"role": "user", "content": prompt}], pair.tokenizer)
    pair.cpu.truncate(0)
    if len(ids) > 1:
        pair.cpu.step(ids[:-1], logits="last")
    stream = pair.cpu.stream(
        ids[-1], sampling=Sampling(), max_tokens=count, stop_ids=frozenset(pair.model.config.eos_token_ids), history=ids
    )
    reply = [token for batch in stream for token in batch.ids]
    pair.reference.truncate(0)
    rows = pair.reference.step(ids + reply[:-1]).logits[len(ids) - 1 :]
    smallest = np.inf
    for i, (row, token) in enumerate(zip(rows, reply, strict=True)):
        second, first = np.partition(row, -2)[-2:]
        if first - second < NEAR_TIE:
            return i, smallest
        assert token == row.argmax(), f"token {i} of {prompt!r}: margin {first - second:.2f}"
        smallest = min(smallest, first - second)
    return len(reply), smallest


def prompts() -> list[str]:
    lines = (ASSETS / "prompts" / "heldout.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [next(value for value in record.values() if isinstance(value, str) and " " in value) for record in records]


def test_greedy_replies_follow_the_reference(pair: Pair) -> None:
    assert sum(greedy_matches(pair, prompt, 24)[0] for prompt in prompts()[:3]) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_greedy_replies_follow_the_reference_on_twenty_prompts(pair: Pair) -> None:
    agreed = [greedy_matches(pair, prompt, 48)[0] for prompt in prompts()[:20]]
    print("\ntokens up to the first near tie:", agreed)
    assert len(agreed) == 20
    assert sum(agreed) > 40


MEMORY_SCRIPT = """
import sys
from engine.backends.cpu import CpuBackend
from engine.packed.model import PackedModel
from engine.sampling import Sampling
from engine.machine.hardware import peak_memory

before = peak_memory()
model = PackedModel.open(sys.argv[1])
backend = CpuBackend(model, threads=2)
backend.step(list(range(3, 103)), logits="last")
stream = backend.stream(5, sampling=Sampling(), max_tokens=20, stop_ids=frozenset(), history=[5])
assert sum(len(batch.ids) for batch in stream) == 20
print(before, peak_memory(), backend.ledger(1, 0).weight_bytes)
"""


def test_memory_at_its_peak(smollm2: Path) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc")
    result = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, str(smollm2)], capture_output=True, text=True, check=True
    )
    interpreter, peak, weights = map(int, result.stdout.split())
    print(f"\npeak {peak / weights:.2f} times the weights, the interpreter's {interpreter / 1e6:.0f} MB included")
    # One copy of the weights, 100 positions of cache, scratch; never the file's pages on top.
    assert peak - interpreter < 1.2 * weights, f"{(peak - interpreter) / 1e6:.0f} MB for {weights / 1e6:.0f} MB"

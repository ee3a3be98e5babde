"""What every sampler must choose: cases for the numpy, C++ and CUDA samplers alike.

`choose` spells out the steps of engine/sampling.py's Sampling plainly, without any speed. `cases()` draws inputs and
keeps those in which no decision is close: arithmetic in float32 must come to the same id.

    @pytest.mark.parametrize("case", cases(), ids=str)
    def test_it(case): assert my_sampler(case.logits, case.sampling, case.history) == case.expected
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from engine.sampling import Sampling

# Smallest distance of any decision from its border, as a share of the mass. Sums of 150000 float32 weights in any order
# of blocks agree to about 1e-5.
MARGIN = 1e-4


@dataclass(frozen=True)
class Case:
    """logits: float32 [vocab]. history: the conversation so far. expected: the id that follows it."""

    name: str
    logits: np.ndarray
    sampling: Sampling
    history: tuple[int, ...]
    expected: int

    def __str__(self) -> str:
        return self.name


@functools.cache
def cases() -> tuple[Case, ...]:
    """About 140 cases, always the same, over vocabularies of 1 to 151936 ids; in a second or two."""
    settings = {
        "greedy": {"temperature": 0.0},
        "greedy-penalty": {"temperature": 0.0, "repeat_penalty": 1.3},
        "temperature": {"temperature": 0.7},
        "hot": {"temperature": 3.0, "top_k": 20},
        "cold": {"temperature": 0.01},
        "top-k-1": {"temperature": 1.0, "top_k": 1},
        "top-k": {"temperature": 1.0, "top_k": 5},
        "top-k-beyond": {"temperature": 1.0, "top_k": 10**6},
        "top-p": {"temperature": 1.0, "top_p": 0.9},
        "top-p-0": {"temperature": 1.0, "top_p": 0.0},
        "min-p": {"temperature": 1.0, "min_p": 0.05},
        "min-p-1": {"temperature": 1.0, "min_p": 1.0},
        "penalty": {"temperature": 1.0, "repeat_penalty": 1.5},
        "reward": {"temperature": 1.0, "repeat_penalty": 0.6, "top_k": 40},
        "window": {"temperature": 1.0, "repeat_penalty": 1.5, "repeat_window": 3, "top_k": 40},
        "no-window": {"temperature": 1.0, "repeat_penalty": 1.5, "repeat_window": 0, "top_k": 40},
        "all": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.1},
    }
    found = [
        _case(f"{name}-{size}", size, options) for name, options in settings.items() for size in (1, 2, 7, 100, 1003)
    ]
    large = ("greedy-penalty", "temperature", "top-k", "top-p", "min-p", "all")
    found += [_case(f"{name}-{size}", size, settings[name]) for name in large for size in (49152, 100353, 151936)]
    found += [_case(f"ties-{name}-64", 64, options, ties=True) for name, options in settings.items()]
    found += [_case(f"forbidden-{name}-100", 100, options, forbidden=0.9) for name, options in settings.items()]
    found += [_case(f"seed-{seed}", 100, {"temperature": 1.0, "seed": seed}) for seed in (1, 2**32, 2**64 - 1)]
    return tuple(found)


def _case(name: str, size: int, options: dict[str, float], ties: bool = False, forbidden: float = 0.0) -> Case:
    rng = np.random.default_rng([size, *name.encode()])
    while True:
        logits = (rng.standard_normal(size) * (2 if size < 1000 else 4)).astype(np.float32)
        logits = np.round(logits) if ties else logits
        logits[rng.random(size) < forbidden] = -np.inf
        if not np.isfinite(logits).any():
            continue
        sampling = Sampling(**{"seed": int(rng.integers(2**63)), **options})  # type: ignore[arg-type]
        # Histories repeat some of the likeliest ids, so that the penalty matters.
        likely = np.argsort(-logits)[:10]
        history = tuple(int(id) for id in rng.choice(likely, int(rng.integers(1, 200))))
        expected, margin = choose(logits, sampling, history)
        if margin >= MARGIN:
            return Case(name, logits, sampling, history, expected)


def choose(logits: np.ndarray, sampling: Sampling, history: tuple[int, ...]) -> tuple[int, float]:
    """The id, and how far the nearest decision was from going the other way (as a share of the kept mass)."""
    logits = logits.copy()
    if sampling.repeat_window:
        penalty = np.float32(sampling.repeat_penalty)
        for id in set(history[-sampling.repeat_window :]):
            logits[id] = logits[id] / penalty if logits[id] > 0 else logits[id] * penalty
    order = np.argsort(-logits, kind="stable")  # largest first; equal ones in the order of their ids
    values = logits[order].astype(np.float64)
    if sampling.temperature == 0.0:
        return int(order[0]), _gap(values, 1)

    count, margin = len(values), np.inf
    if sampling.top_k:
        count = min(count, sampling.top_k)
        margin = _gap(values, count)
    weights = np.exp((values[:count] - values[0]) / sampling.temperature)
    if sampling.top_p < 1.0:
        mass = np.cumsum(weights) / weights.sum()
        count = int(np.argmax(mass >= sampling.top_p)) + 1
        # Where the first token is enough whatever happens, nothing was decided.
        margin = min(margin, np.abs(mass - sampling.top_p).min()) if sampling.top_p else margin
    if sampling.min_p > 0.0:
        below_first = weights[:count][weights[:count] < 1.0]
        margin = min(margin, np.abs(below_first - sampling.min_p).min(initial=np.inf))
        count = int((weights[:count] >= sampling.min_p).sum())

    kept = np.argsort(order[:count])
    mass = np.concatenate(([0.0], np.cumsum(weights[kept]) / weights[kept].sum()))
    place = int(np.argmax(mass[1:] > _uniform(sampling.seed, len(history))))
    inner = mass[1:-1]  # the outer borders, 0 and 1, cannot be crossed
    margin = min(margin, np.abs(inner - _uniform(sampling.seed, len(history))).min(initial=np.inf))
    return int(order[kept[place]]), float(margin)


def _gap(values: np.ndarray, count: int) -> float:
    """Between the last of `count` values in descending order and the next one; equal values leave no doubt."""
    if count >= len(values) or values[count - 1] == values[count]:
        return np.inf
    return float(values[count - 1] - values[count])


def _uniform(seed: int, n: int) -> float:
    """Philox4x32-10 with counter (n, 0, 0, 0), written from the paper."""
    counter, key = [n, 0, 0, 0], [seed % 2**32, seed // 2**32]
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [b // 2**32 ^ counter[1] ^ key[0], b % 2**32, a // 2**32 ^ counter[3] ^ key[1], a % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return (counter[0] + 0.5) / 2**32

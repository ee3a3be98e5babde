"""Turns logits into one token id."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.errors import BackendError, UsageError

_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10
_WORD = 0xFFFFFFFF
_WALK_BLOCK = 512
_TOP_P_BISECTIONS = 6  # a bracket of 8x becomes one of 3.3 %


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The order is fixed on every backend:

    1. repeat penalty over the last `repeat_window` tokens of the history (each distinct id once: positive logits are
       divided by it, negative ones multiplied; CTRL, Keskar et al. 2019)
    2. temperature (0: the largest logit, the lowest id among equals, and nothing below applies)
    3. top_k: keep the k largest (ties at the border: lower id first); 0 keeps all
    4. top_p: keep the smallest set, in descending probability, whose mass reaches top_p; 1 keeps all
    5. min_p: drop what is below min_p times the largest probability; 0 keeps all
    6. the draw: u * (kept mass), walking the kept ids in ascending id order

    top_p counts mass relative to what top_k kept (equal probabilities: lower id first); at least one token is kept.
    The walk ends at the first id whose running sum of kept mass exceeds u * (kept mass).

    The uniform u of the token at index n of the conversation is Philox4x32-10 with counter (n, 0, 0, 0) and key
    (seed & 0xffffffff, seed >> 32): first output word r, u = (r + 0.5) * 2**-32. No state, so every backend can
    draw any position.

    Raises UsageError for a value outside its range: temperature >= 0, top_k >= 0, 0 <= top_p <= 1, 0 <= min_p <= 1,
    0.01 <= repeat_penalty <= 100 (beyond, logits leave float32), repeat_window >= 0, 0 <= seed < 2**64.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_window: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        _require(0 <= self.temperature < math.inf, "temperature", self.temperature, "a number from 0 (greedy) up")
        _require(self.top_k >= 0, "top-k", self.top_k, "0 (off) or more")
        _require(0 <= self.top_p <= 1, "top-p", self.top_p, "between 0 and 1 (off)")
        _require(0 <= self.min_p <= 1, "min-p", self.min_p, "between 0 (off) and 1")
        _require(0.01 <= self.repeat_penalty <= 100, "repeat-penalty", self.repeat_penalty, "0.01 to 100; 1 is off")
        _require(self.repeat_window >= 0, "repeat-window", self.repeat_window, "0 or more")
        _require(0 <= self.seed < 1 << 64, "seed", self.seed, "from 0 to 2**64 - 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise UsageError(f"{name} is {value}", f"{name} must be {allowed}")


def sample(logits: np.ndarray, sampling: Sampling, history: Sequence[int]) -> int:
    """The id that follows `history` (every token of the conversation so far; its length is the index of the draw).

    logits: float32 [vocab]; -inf forbids a token. Raises BackendError when they hold NaN or no finite maximum.
    """
    logits = _penalise(logits, sampling, history)
    top = _largest(logits)
    if sampling.greedy:
        return int(logits.argmax())
    ids, weights = _kept(logits, top, sampling)
    position = _walk(weights, uniform(sampling.seed, len(history)))
    return position if ids is None else int(ids[position])


def probabilities(logits: np.ndarray, sampling: Sampling, history: Sequence[int]) -> np.ndarray:
    """The distribution that `sample` draws from: float64 [vocab], zero where a token was dropped, summing to 1.

    Greedy gives 1 to the chosen id. Arguments and errors as in `sample`.
    """
    logits = _penalise(logits, sampling, history)
    top = _largest(logits)
    result = np.zeros(logits.shape[0])
    if sampling.greedy:
        result[logits.argmax()] = 1.0
    else:
        ids, weights = _kept(logits, top, sampling)
        result[slice(None) if ids is None else ids] = weights / weights.sum()
    return result


def uniform(seed: int, n: int) -> float:
    """The draw of index n: uniform in (0, 1), exactly (r + 0.5) / 2**32 with r from Philox4x32-10."""
    r = philox4x32((n & _WORD, 0, 0, 0), (seed & _WORD, seed >> 32))[0]
    return (r + 0.5) * 2.0**-32


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10, a counter-based generator: 128 random bits as four 32-bit words.

    Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_PHILOX_ROUNDS):
        product0 = c0 * _PHILOX_MULTIPLIERS[0]
        product1 = c2 * _PHILOX_MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _WORD,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _WORD,
        )
        k0 = (k0 + _PHILOX_KEY_STEPS[0]) & _WORD
        k1 = (k1 + _PHILOX_KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _penalise(logits: np.ndarray, sampling: Sampling, history: Sequence[int]) -> np.ndarray:
    """Step 1. float32 throughout, as on every backend; the caller's logits are not changed."""
    logits = np.asarray(logits, dtype=np.float32)
    if sampling.repeat_penalty == 1.0 or sampling.repeat_window == 0 or len(history) == 0:
        return logits
    seen = np.unique(np.asarray(history[-sampling.repeat_window :], dtype=np.int64))
    penalty = np.float32(sampling.repeat_penalty)
    logits = logits.copy()
    values = logits[seen]
    logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    return logits


def _largest(logits: np.ndarray) -> np.float32:
    """The largest logit. max() passes NaN on, so this one pass also finds any NaN."""
    top = logits.max()
    if not np.isfinite(top):
        raise BackendError(
            f"the model produced no usable logits (largest: {top})", "the weights may be damaged: `flint models verify`"
        )
    return top


def _kept(logits: np.ndarray, top: np.float32, sampling: Sampling) -> tuple[np.ndarray | None, np.ndarray]:
    """Steps 2 to 5: the kept ids, ascending (None: all), and their float64 weights (unnormalised, the largest is 1)."""
    ids = _top_k(logits, sampling.top_k) if 0 < sampling.top_k < logits.shape[0] else None
    scaled = (logits if ids is None else logits[ids]).astype(np.float64)
    scaled -= top
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature: -inf, weight 0
        scaled /= sampling.temperature
        weights = np.exp(scaled, out=scaled)
    if sampling.top_p < 1.0:
        kept = _top_p(weights, sampling.top_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    if sampling.min_p > 0.0:
        kept = np.flatnonzero(weights >= sampling.min_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    return ids, weights


def _top_k(logits: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k largest logits, ascending; among equals at the border the lower ids."""
    border = np.partition(logits, -k)[-k]
    above = np.flatnonzero(logits > border)
    level = np.flatnonzero(logits == border)[: k - above.shape[0]]
    return np.sort(np.concatenate((above, level)))


def _top_p(weights: np.ndarray, top_p: float) -> np.ndarray:
    """Positions, ascending, of the smallest set of the largest weights whose sum reaches top_p of the whole.

    A full sort of a flat distribution costs milliseconds, so a bisection first brackets the smallest weight that is
    kept, and only the weights inside the bracket are sorted.
    """
    wanted = max(top_p * weights.sum(), 1.0)  # the largest weight is 1, and always kept
    low, high = 1.0 / 8, 2.0  # above `high` is too little mass, above `low` enough
    while low > 0.0 and weights[weights >= low].sum() < wanted:
        low, high = low / 8, low
    candidates = np.flatnonzero(weights >= low)
    values = weights[candidates]
    for _ in range(_TOP_P_BISECTIONS):
        middle = math.sqrt(low * high)
        if values[values >= middle].sum() < wanted:
            high = middle
        else:
            low = middle
    sure = values >= high
    border = np.flatnonzero((values >= low) & ~sure)
    border = border[np.argsort(-values[border], kind="stable")]
    running = np.cumsum(values[border]) + values[sure].sum()
    sure[border[: int(np.searchsorted(running, wanted)) + 1]] = True
    return candidates[sure]


def _walk(weights: np.ndarray, u: float) -> int:
    """The first position whose running sum of weights exceeds u times the whole (0 < u < 1).

    Block sums first: one pass of additions over the vocabulary instead of its running sum, 10 times cheaper.
    """
    starts = np.arange(0, weights.shape[0], _WALK_BLOCK)
    sums = np.cumsum(np.add.reduceat(weights, starts))
    target = u * sums[-1]
    block = int(np.searchsorted(sums, target, side="right"))
    before = sums[block - 1] if block else 0.0
    inside = np.cumsum(weights[starts[block] : starts[block] + _WALK_BLOCK]) + before
    offset = min(int(np.searchsorted(inside, target, side="right")), inside.shape[0] - 1)
    while weights[starts[block] + offset] == 0.0:  # the two sums rounded differently, and the target fell between them
        offset -= 1
    return int(starts[block]) + offset

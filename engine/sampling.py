"""Turns logits into one token id."""

from __future__ import annotations

from dataclasses import dataclass


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

    The uniform u of the token at index n of the conversation is Philox4x32-10 with counter (n, 0, 0, 0) and key
    (seed & 0xffffffff, seed >> 32): first output word r, u = (r + 0.5) * 2**-32. No state, so every backend can
    draw any position.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_window: int = 64
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

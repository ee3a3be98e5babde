"""kernels/cuda/reference.py: how close a call a draw was."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels.cuda.megakernel import DeviceSampling
from kernels.cuda.reference import draw, uniform

NEAR = 1e-6
BORDERS = {  # of ids with probabilities 0.5, 0.3 and 0.2: the sampling, and the logits of what the border cuts
    "top-k": ({"top_k": 2}, (0.5, 0.3, 0.3 * (1 - NEAR))),
    "top-p, another": ({"top_p": 0.6}, (0.5, 0.3, 0.3 * (1 - NEAR))),
    "top-p, one less": ({"top_p": 0.8 + NEAR}, (0.5, 0.3, 0.2)),
    "top-p, one more": ({"top_p": 0.8 - NEAR}, (0.5, 0.3, 0.2)),
    "min-p, one less": ({"min_p": 0.4 - NEAR}, (0.5, 0.3, 0.2)),
    "min-p, one more": ({"min_p": 0.4 + NEAR}, (0.5, 0.3, 0.2)),
}


def close_call(border: str, low: float, high: float) -> tuple[int, float]:
    """The draw at that border, with a seed whose random number lies between low and high."""
    changed, probabilities = BORDERS[border]
    seed = next(seed for seed in itertools.count() if low < uniform(seed, 1) < high)
    sampling = DeviceSampling(temperature=1.0, seed=seed, **changed)
    return draw(torch.tensor(probabilities, dtype=torch.float64).log(), sampling, [0])


@pytest.mark.parametrize("border", BORDERS)
def test_a_border_counts_where_it_changes_the_choice(border: str):
    chosen, distance = close_call(border, 0.88, 0.92)  # the last candidate's, whoever it is
    assert chosen == (2 if "less" in border else 1)
    assert distance == pytest.approx(NEAR, rel=1e-3)


@pytest.mark.parametrize("border", BORDERS)
def test_a_border_beyond_the_choice_does_not_count(border: str):
    chosen, distance = close_call(border, 0.2, 0.3)  # the first id's, with the others or without
    assert chosen == 0
    assert distance > 0.19  # to u's next edge


def test_without_borders_only_the_edges_count():
    sampling = DeviceSampling(temperature=1.0, seed=3)
    u = uniform(3, 1)
    probabilities = torch.tensor([u - 0.01, 0.5 - u / 2 + 0.005, 0.5 - u / 2 + 0.005], dtype=torch.float64)
    chosen, distance = draw(probabilities.log(), sampling, [0])
    assert chosen == 1
    assert distance == pytest.approx(0.01)

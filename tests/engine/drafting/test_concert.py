"""Prompt lookup and a learned head together."""

from __future__ import annotations

import numpy as np

from engine.drafting.base import Draft
from engine.drafting.concert import Concert
from engine.sampling import Sampling


class Scripted:
    def __init__(self, name, draft, layers=()):
        self.name, self.draft, self.feature_layers, self.max_draft = name, draft, layers, 4
        self.position, self.fed = 0, []

    def extend(self, tokens, features):
        self.position += len(tokens)
        self.fed.append(set(features))

    def truncate(self, position):
        self.position = position

    def propose(self, token, count, sampling):
        return self.draft


def test_a_long_match_speaks_first_and_a_short_one_does_not():
    eagle = Scripted("eagle", Draft((7, 8)), (1, 2))
    for evidence, expected in ((2, (7, 8)), (3, (7, 8)), (4, (1, 2, 3)), (9, (1, 2, 3))):
        lookup = Scripted("ngram", Draft((1, 2, 3), evidence=evidence))
        assert Concert(lookup, eagle).propose(0, 4, Sampling()).ids == expected
    assert Concert(Scripted("ngram", Draft((), evidence=9)), eagle).propose(0, 4, Sampling()).ids == (7, 8)


def test_both_follow_the_cache_and_only_the_learned_one_gets_features():
    lookup, eagle = Scripted("ngram", Draft(())), Scripted("eagle", Draft(()), (1, 2))
    concert = Concert(lookup, eagle)
    concert.extend([1, 2, 3], {1: np.zeros((3, 4)), 2: np.zeros((3, 4))})
    concert.truncate(2)
    assert (lookup.position, eagle.position, concert.position) == (2, 2, 2)
    assert (lookup.fed, eagle.fed) == ([set()], [{1, 2}])
    assert concert.feature_layers == (1, 2)

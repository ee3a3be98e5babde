"""Prompt lookup against the plain definition: scan the whole conversation for the longest earlier match."""

from __future__ import annotations

import random

import pytest

from engine.drafting import ngram
from engine.drafting.base import Draft
from engine.drafting.ngram import LENGTHS, MAX_DRAFT, MAX_MATCH, NgramDrafter
from engine.sampling import Sampling


def drafter_of(tokens: list[int]) -> NgramDrafter:
    drafter = NgramDrafter()
    drafter.extend(tokens, {})
    return drafter


def propose(drafter: NgramDrafter, token: int, count: int = MAX_DRAFT) -> Draft:
    return drafter.propose(token, count, Sampling())


def longest_match(tokens: list[int]) -> int:
    """Length of the longest suffix of `tokens` that occurs earlier (overlaps allowed), up to MAX_MATCH."""
    size = len(tokens)
    return max(
        (
            length
            for end in range(size - 1)
            for length in range(1, min(MAX_MATCH, end + 1) + 1)
            if tokens[end + 1 - length : end + 1] == tokens[size - length :]
        ),
        default=0,
    )


def continues(tokens: list[int], draft: Draft) -> bool:
    """Whether the draft is what follows an earlier occurrence of the last `evidence` tokens, copying itself."""
    size, length = len(tokens), draft.evidence
    for end in range(size - 1):
        if end + 1 >= length and tokens[end + 1 - length : end + 1] == tokens[size - length :]:
            whole = tokens + list(draft.ids)
            if all(whole[end + 1 + i] == whole[size + i] for i in range(len(draft.ids))):
                return True
    return False


def test_what_followed_the_last_tokens_is_the_draft():
    draft = propose(drafter_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]), 4)
    assert list(draft.ids) == [5, 6, 7, 8]  # as long as the match
    assert draft.evidence == 4


def test_a_longer_match_beats_a_later_one():
    tokens = [7, 1, 2, 3, 4, 50, 9, 2, 3, 4, 60, 9, 9, 7, 1, 2, 3]
    draft = propose(drafter_of(tokens), 4)
    assert draft.ids[0] == 50
    assert draft.evidence == 5


def test_among_equals_the_latest_counts():
    assert propose(drafter_of([1, 2, 50, 1, 2, 60, 8, 1]), 2).ids[0] == 60


def test_nothing_known_nothing_drafted():
    assert propose(drafter_of([]), 4).ids == ()
    assert propose(drafter_of([1, 2, 3]), 4).ids == ()
    assert propose(drafter_of([1, 2, 3]), 3).ids == ()  # one token is no match


def test_a_loop_is_continued_past_the_end_of_the_text():
    draft = propose(drafter_of([1, 2, 3] * 10 + [1, 2]), 3, 9)
    assert list(draft.ids) == [1, 2, 3] * 3
    assert list(propose(drafter_of([5] * 20), 5, 6).ids) == [5] * 6


def test_no_longer_than_asked():
    assert len(propose(drafter_of(list(range(30)) + list(range(20))), 20, 3).ids) == 3


@pytest.mark.parametrize("alphabet", [2, 4, 30])
def test_like_the_definition_on_random_text(alphabet, monkeypatch):
    monkeypatch.setattr(ngram, "MAX_CANDIDATES", 10**6)
    rng = random.Random(alphabet)
    for _ in range(100):
        tokens = [rng.randrange(alphabet) for _ in range(rng.randrange(2, 60))]
        draft = propose(drafter_of(tokens[:-1]), tokens[-1])
        longest = longest_match(tokens)
        if longest < min(LENGTHS):
            assert draft.ids == ()
        else:
            assert draft.evidence == longest
            assert len(draft.ids) == min(longest, MAX_DRAFT)
            assert continues(tokens, draft)


def test_truncate_takes_everything_back():
    rng = random.Random(1)
    tokens = [rng.randrange(5) for _ in range(200)]
    drafter = drafter_of(tokens)
    for position in (150, 151, 90, 3, 0):
        drafter.truncate(min(position, drafter.position))
        fresh = drafter_of(tokens[: drafter.position])
        assert [chains.__dict__ for chains in drafter._chains] == [chains.__dict__ for chains in fresh._chains]
        for token in range(5):
            assert propose(drafter, token) == propose(fresh, token)
    with pytest.raises(ValueError, match="cannot truncate to 1"):
        drafter.truncate(1)


def test_the_work_for_a_token_does_not_grow_with_the_conversation(monkeypatch):
    followed = 0
    original = NgramDrafter._match_length

    def counted(self: NgramDrafter, end: int) -> int:
        nonlocal followed
        followed += 1
        return original(self, end)

    monkeypatch.setattr(NgramDrafter, "_match_length", counted)
    propose(drafter_of([1, 2] * 20_000), 1)
    assert followed <= ngram.MAX_CANDIDATES

"""Drafts by looking the conversation's last tokens up in the conversation itself: no training, any model.

What followed the longest earlier occurrence of the current suffix is the guess (prompt lookup, Saxena 2023; suffix
decoding, Oliaro et al. 2024). The index is LZ77's hash chains: for each n-gram length, a dictionary from the n-gram
to the position after its latest occurrence, and a link from there to the one before. Adding, dropping and looking up
a token cost the same at any length of conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from engine.drafting.base import Draft
from engine.sampling import Sampling

LENGTHS = (4, 2)  # n-grams indexed; the longer is looked up first
MAX_CANDIDATES = 8  # links followed, latest occurrence first
MAX_MATCH = 32  # tokens; a longer match is not told apart
MAX_DRAFT = 15


class _Chains:
    """Occurrences of every n-gram of one length, latest first."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._latest: dict[tuple[int, ...], int] = {}  # n-gram -> position after its latest occurrence
        self._earlier: list[int] = []  # position - 1 -> the position after the occurrence before, or 0

    def append(self, tokens: list[int]) -> None:
        """Index the n-gram that ends at the last of `tokens`."""
        end = len(tokens)
        if end < self.length:
            self._earlier.append(0)
            return
        gram = tuple(tokens[end - self.length :])
        self._earlier.append(self._latest.get(gram, 0))
        self._latest[gram] = end

    def pop(self, tokens: list[int]) -> None:
        """Take back the n-gram that ends at the last of `tokens`."""
        end = len(tokens)
        earlier = self._earlier.pop()
        if end < self.length:
            return
        gram = tuple(tokens[end - self.length :])
        if earlier:
            self._latest[gram] = earlier
        else:
            del self._latest[gram]

    def occurrences(self, gram: tuple[int, ...]) -> list[int]:
        """Positions after the latest occurrences of `gram`, latest first."""
        found: list[int] = []
        position = self._latest.get(gram, 0)
        while position and len(found) < MAX_CANDIDATES:
            found.append(position)
            position = self._earlier[position - 1]
        return found


class NgramDrafter:
    """Prompt lookup over the whole conversation. Deterministic; `evidence` is the length of the match."""

    name = "ngram"
    feature_layers: tuple[int, ...] = ()
    max_draft = MAX_DRAFT

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._chains = [_Chains(length) for length in LENGTHS]

    @property
    def position(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int], features: Mapping[int, np.ndarray]) -> None:
        for token in tokens:
            self._tokens.append(token)
            for chains in self._chains:
                chains.append(self._tokens)

    def truncate(self, position: int) -> None:
        if not 0 <= position <= len(self._tokens):
            raise ValueError(f"cannot truncate to {position}: the drafter holds {len(self._tokens)} tokens")
        while len(self._tokens) > position:
            for chains in self._chains:
                chains.pop(self._tokens)
            self._tokens.pop()

    def propose(self, token: int, count: int, sampling: Sampling) -> Draft:
        """The continuation of the longest match, at most as long as the match: short matches predict little."""
        for chains in self._chains:
            gram = (*self._tokens[len(self._tokens) - chains.length + 1 :], token)
            if len(gram) < chains.length:
                continue
            best, best_length = 0, 0
            for position in chains.occurrences(gram):
                length = self._match_length(position - 1)
                if length > best_length:
                    best, best_length = position, length
            if best:
                return Draft(self._continuation(best, token, min(count, best_length, MAX_DRAFT)), evidence=best_length)
        return Draft(())

    def _match_length(self, end: int) -> int:
        """Tokens in common, walking back, between an occurrence of `token` at `end` and the end of the text."""
        tokens, size = self._tokens, len(self._tokens)
        length = 1
        while length < min(MAX_MATCH, end + 1) and tokens[end - length] == tokens[size - length]:
            length += 1
        return length

    def _continuation(self, start: int, token: int, count: int) -> tuple[int, ...]:
        """`count` tokens from `start`; past the end of the text the copy reads itself, as LZ77's does."""
        text = self._tokens[start : start + count]
        if len(text) < count:
            text.append(token)
            period = len(self._tokens) + 1 - start
            while len(text) < count:
                text.append(text[-period])
        return tuple(text)

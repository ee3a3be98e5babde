"""A harvest as a trainer reads it: conversations of like length in batches, on the trainer's device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.drafting.harvest import Conversations
from engine.errors import UsageError

LOOP_WINDOW = 16  # tokens; so many in a row are hardly repeated by chance
ROUNDED_TO = 64  # tokens: rows are padded to a multiple, so that few shapes occur and matrices stay aligned


def read_shards(*directories: Path) -> list[Path]:
    """The shards of harvests, in order. Raises UsageError where there is none."""
    shards = sorted(p for d in directories for p in d.glob("shard-*.npz") if ".partial" not in p.name)
    if not shards:
        raise UsageError(f"no harvest in {directories[0]}", "run `flint draft harvest` first")
    return shards


def looping(tokens: Tensor, replies: Tensor, conversations: Tensor, window: int = LOOP_WINDOW) -> Tensor:
    """bool [n]: the `window` tokens that end here, all of replies, stood in an earlier reply of the conversation.

    tokens int64 [n], replies bool [n], conversations int64 [n] (the number of the conversation that a token is of).
    What a reply repeats of the user's words does not count: that is copying, and worth learning.
    """
    n = len(tokens)
    found = torch.zeros(n, dtype=torch.bool, device=tokens.device)
    if n < window:
        return found
    # Every window as one number: equal windows have equal sums, others differ but for one chance in 2**64.
    factors = np.random.default_rng(0).integers(-(1 << 62), 1 << 62, window + 1) | 1
    count = n - window + 1
    sums = conversations[:count] * int(factors[window])
    whole = conversations[:count] == conversations[window - 1 :]
    for i in range(window):
        sums = sums + (tokens[i : i + count] + 1) * int(factors[i])
        whole &= replies[i : i + count]
    sums, order = torch.where(whole, sums, torch.arange(count, device=sums.device)).sort(stable=True)
    again = torch.zeros_like(whole)
    again[order[1:]] = sums[1:] == sums[:-1]
    found[window - 1 :] = again & whole
    return found


class Corpus:
    """All conversations of a harvest, end to end on one device. `learn` bool [n]: tokens to learn from."""

    def __init__(self, shards: list[Path], device: torch.device, skip_loops: bool = True) -> None:
        tokens, replies, starts, learn = [], [], [], []
        total = 0
        for shard in shards:
            part = Conversations.load(shard)
            ids = torch.from_numpy(part.tokens.astype(np.int64)).to(device)
            spoken = torch.from_numpy(part.replies).to(device)
            of = np.repeat(np.arange(len(part.starts) - 1), np.diff(part.starts))
            loops = looping(ids, spoken, torch.from_numpy(of).to(device)) if skip_loops else torch.zeros_like(spoken)
            tokens.append(ids.int())
            replies.append(spoken)
            learn.append(spoken & ~loops)
            starts.append(part.starts[:-1] + total)
            total += len(part.tokens)
        self.tokens, self.replies, self.learn = torch.cat(tokens), torch.cat(replies), torch.cat(learn)
        begins = np.append(np.concatenate(starts), total)
        # A conversation without a token to learn from is left out.
        useful = np.append(0, np.cumsum(self.learn.cpu().numpy()))
        kept = useful[begins[1:]] > useful[begins[:-1]]
        self._starts, self._lengths = begins[:-1][kept], np.diff(begins)[kept]

    def __len__(self) -> int:
        return len(self._starts)

    def frequent_tokens(self, size: int, vocab_size: int) -> np.ndarray:
        """The `size` token ids that occur most often in replies, ascending, int64."""
        counts = torch.bincount(self.tokens[self.replies].long(), minlength=vocab_size).cpu().numpy()
        return np.sort(np.argsort(-counts, kind="stable")[: min(size, vocab_size)])

    def plan(self, budget: int, seed: int) -> list[tuple[np.ndarray, int]]:
        """One epoch: batches of conversations (their numbers, int64) and the length to pad them to; each batch holds
        about `budget` tokens, padding included. What does not fill a batch is padded to the next length; of the
        longest, what does not fill one is left out, unless there is nothing else."""
        rng = np.random.default_rng(seed)
        padded = -(-self._lengths // ROUNDED_TO) * ROUNDED_TO
        planned: list[tuple[np.ndarray, int]] = []
        left, length = np.zeros(0, np.int64), 0
        for length in map(int, np.unique(padded)):
            members = np.concatenate((left, rng.permutation(np.flatnonzero(padded == length))))
            rows = max(1, budget // length)
            full = len(members) - len(members) % rows
            planned += [(members[at : at + rows], length) for at in range(0, full, rows)]
            left = members[full:]
        if not planned and len(left):
            planned.append((left, length))
        return [planned[i] for i in rng.permutation(len(planned))]

    def batches(self, budget: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch of (tokens int64 [B, T], learn bool [B, T]). Rows are padded at the end, where causal attention
        does not see it."""
        device = self.tokens.device
        for members, length in self.plan(budget, seed):
            first = torch.from_numpy(self._starts[members]).to(device, non_blocking=True)[:, None]
            lengths = torch.from_numpy(self._lengths[members]).to(device, non_blocking=True)[:, None]
            column = torch.arange(length, device=device)
            inside = column < lengths
            at = torch.where(inside, first + column, 0)
            yield torch.where(inside, self.tokens[at], 0).long(), self.learn[at] & inside

"""Lets the target write its own conversations: the training data of a drafter, without any data set.

Every sequence starts with the chat template up to a user turn. The user's words are sampled from the model too, or
begin with an opener ("Write a Python function that") so that the domains are covered; then the reply is written,
greedily or sampled. When a turn ends the next one begins, until the sequence is full. Sequences share their
positions, so a batch needs no padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.drafting.batched_target import BatchedTarget, StaticCache
from engine.errors import UsageError

USER, REPLY = 0, 1
REACH_STEP = 128  # positions


@dataclass(frozen=True)
class TurnTokens:
    """The chat template cut into token sequences: what stands before the first user turn, between a user turn's end
    and the reply, and between a reply's end and the next user turn; and the token that ends a turn."""

    start: tuple[int, ...]
    user_to_reply: tuple[int, ...]
    reply_to_user: tuple[int, ...]
    end_of_turn: int

    @classmethod
    def from_template(cls, render: Callable[[list[dict[str, str]], bool], list[int]], end_of_turn: int) -> TurnTokens:
        """Find the pieces by rendering conversations around two marker words and cutting at the end of each turn.

        render(messages, add_generation_prompt) -> token ids. Raises UsageError where the template does not end turns
        with `end_of_turn`.
        """
        first = [{"role": "user", "content": ""}]
        prompt = render(first, True)
        closed = render([*first, {"role": "assistant", "content": ""}, *first], False)
        if end_of_turn not in prompt or closed[: len(prompt)] != prompt:
            raise UsageError("this chat template cannot be cut into turns", "give prompts in a JSONL file instead")
        cut = len(prompt) - 1 - prompt[::-1].index(end_of_turn)
        tail = closed[len(prompt) :]
        try:
            reply_end = tail.index(end_of_turn)
            next_end = tail.index(end_of_turn, reply_end + 1)
        except ValueError:
            raise UsageError(
                "this chat template cannot be cut into turns", "give prompts in a JSONL file instead"
            ) from None
        return cls(tuple(prompt[:cut]), tuple(prompt[cut + 1 :]), tuple(tail[reply_end + 1 : next_end]), end_of_turn)


@dataclass(frozen=True)
class HarvestOptions:
    """How much to write, and how. `greedy_share` of the sequences write greedy replies, the rest sample them at
    `temperature`; user turns are always sampled, at `user_temperature`. Draws are from the `top_k` largest logits."""

    tokens: int
    length: int = 768
    batch: int = 1024
    greedy_share: float = 0.5
    temperature: float = 0.8
    user_temperature: float = 0.9
    top_k: int = 64
    longest_user_turn: int = 160
    seed: int = 0


class Harvester:
    """Writes batches of conversations with one target."""

    def __init__(
        self, target: BatchedTarget, turns: TurnTokens, openers: Iterable[list[int]], options: HarvestOptions
    ) -> None:
        self.target, self.turns, self.options = target, turns, options
        self.openers = list(openers) or [[]]
        device = target.device
        self._ids = torch.zeros(options.batch, dtype=torch.long, device=device)
        self._position = torch.zeros(1, dtype=torch.long, device=device)
        self._cache = StaticCache(target.config, options.batch, options.length, device, target.dtype)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def _step(self, position: int) -> Tensor:
        """Logits [batch, vocab] of the tokens in `_ids` at `position`; on a GPU replayed from a CUDA graph, one for
        every REACH_STEP positions, so that early tokens do not read the whole cache."""
        self._position.fill_(position)
        reach = min(-(-(position + 1) // REACH_STEP) * REACH_STEP, self.options.length)

        def forward() -> Tensor:
            return self.target.logits(self.target.decode(self._ids, self._position, self._cache, reach))

        if self.target.device.type != "cuda":
            return forward()
        if reach not in self._graphs:
            forward()  # handles that are created lazily must exist before the capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = forward()
            self._graphs[reach] = graph, logits
        graph, logits = self._graphs[reach]
        graph.replay()
        return logits

    @torch.inference_mode()
    def batch(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """One batch: tokens uint32 [batch, length], and a bool array of the same shape that is true where the token
        belongs to a reply (its end-of-turn token included)."""
        options, turns, device = self.options, self.turns, self.target.device
        generator = torch.Generator(device).manual_seed(seed)
        rng = np.random.default_rng(seed)
        batch = options.batch
        forced, forced_lengths = self._forced_sequences(rng)
        role = torch.full((batch,), USER, device=device)
        script = torch.zeros(batch, dtype=torch.long, device=device)  # which forced sequence a row is in
        script += torch.from_numpy(rng.integers(2, len(forced_lengths), batch)).to(device)
        script_at = torch.zeros(batch, dtype=torch.long, device=device)
        greedy = torch.from_numpy(rng.random(batch) < options.greedy_share).to(device)
        spoken = torch.zeros(batch, dtype=torch.long, device=device)
        tokens = torch.zeros(batch, options.length, dtype=torch.long, device=device)
        replies = torch.zeros(batch, options.length, dtype=torch.bool, device=device)
        sampled = torch.zeros(batch, dtype=torch.long, device=device)
        for position in range(options.length):
            in_script = script_at < forced_lengths[script]
            token = torch.where(in_script, forced[script, script_at.clamp(max=forced.shape[1] - 1)], sampled)
            token = torch.where(
                (role == USER) & ~in_script & (spoken >= options.longest_user_turn), turns.end_of_turn, token
            )
            tokens[:, position] = token
            replies[:, position] = (role == REPLY) & ~in_script
            spoken = torch.where(in_script, 0, spoken + 1)
            ended = ~in_script & (token == turns.end_of_turn)
            script_at = torch.where(ended, 0, script_at + in_script)
            script = torch.where(ended, torch.where(role == USER, 0, 1), script)
            role = torch.where(ended, 1 - role, role)
            self._ids.copy_(token)
            sampled = self._choose(self._step(position), greedy & (role == REPLY), role, generator)
        return tokens.to(torch.int32).cpu().numpy().view(np.uint32), replies.cpu().numpy()

    def _forced_sequences(self, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Token sequences that are given, not sampled: 0 user-to-reply, 1 reply-to-user, 2.. start plus an opener."""
        picks = [self.openers[i] for i in rng.integers(0, len(self.openers), min(self.options.batch, 512))]
        sequences = [self.turns.user_to_reply, self.turns.reply_to_user, *((*self.turns.start, *o) for o in picks)]
        width = max(len(s) for s in sequences)
        table = np.zeros((len(sequences), max(width, 1)), dtype=np.int64)
        for row, sequence in enumerate(sequences):
            table[row, : len(sequence)] = sequence
        lengths = torch.tensor([len(s) for s in sequences], device=self.target.device)
        return torch.from_numpy(table).to(self.target.device), lengths

    def _choose(self, logits: Tensor, greedy: Tensor, role: Tensor, generator: torch.Generator) -> Tensor:
        """Next tokens int64 [batch]: the largest logit where greedy, else a draw from the top_k."""
        values, ids = logits.float().topk(self.options.top_k, dim=-1)
        temperature = torch.where(role == REPLY, self.options.temperature, self.options.user_temperature)[:, None]
        noise = torch.empty_like(values).exponential_(generator=generator)
        drawn = ((values / temperature).softmax(-1) / noise).argmax(-1, keepdim=True)
        choice = torch.where(greedy[:, None], torch.zeros_like(drawn), drawn)
        return ids.gather(1, choice)[:, 0]


def harvest(
    harvester: Harvester, directory: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> int:
    """Write shards `shard-00000.npz` (tokens uint32, replies bool; both [batch, length]) into `directory`.

    Shard n depends on the seed and n alone, and shards already there are kept, so an interrupted harvest resumes.
    Returns the number of tokens in the directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    options = harvester.options
    per_shard = options.batch * options.length
    shards = max(1, -(-options.tokens // per_shard))
    for number in range(shards):
        path = directory / f"shard-{number:05d}.npz"
        if not path.exists():
            tokens, replies = harvester.batch(options.seed * 1_000_003 + number)
            partial = path.with_suffix(".partial.npz")
            np.savez(partial, tokens=tokens, replies=replies)
            partial.replace(path)
        progress((number + 1) * per_shard, shards * per_shard)
    return shards * per_shard

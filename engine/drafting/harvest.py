"""Lets the target write its own conversations: the training data of a drafter, without any data set.

A conversation begins with the chat template and an opening: a whole prompt, or the first words of one that the model
goes on writing. Then the model replies, greedily or sampled; some conversations go on with a question that it asks
itself. A batch's rows hold one conversation each and take the next opening as soon as one ends, so no step is spent
on padding. A reply ends early when it only repeats itself: small models fall into loops, and a drafter trained on
loops has learned nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.drafting.batched_target import BatchedTarget, StaticCache
from engine.drafting.prompts import Prompt
from engine.drafting.themes import Themes
from engine.errors import UsageError

CANDIDATES = 64  # the likeliest tokens, of which one is drawn
LAGS = 64  # tokens: a loop of at most this period is noticed while it is written
LOOPED = 32  # tokens that repeat what stood one period earlier: then a reply ends
PASSAGE_TOKENS = range(25, 120)
PASSAGE_TEMPERATURES = (0.7, 1.3)  # a user's text is not what the model itself would say first


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
    """How much to write, and how. `length`: the longest conversation; `steps`: tokens that every row of a batch
    writes, one conversation after another. `greedy_share` of the conversations have greedy replies, the others sample
    at a temperature between the two of `temperatures`; user turns at `user_temperature`. Tokens less likely than
    `min_p` times the likeliest are not drawn. `follow_up` of the replies are followed by another user turn."""

    tokens: int
    length: int = 512
    steps: int = 1024
    batch: int = 1024
    greedy_share: float = 0.6
    temperatures: tuple[float, float] = (0.2, 1.0)
    user_temperature: float = 0.9
    min_p: float = 0.02
    longest_user_turn: int = 160
    longest_reply: int = 320
    follow_up: float = 0.15
    seed: int = 0


@dataclass(frozen=True)
class Conversations:
    """Conversations end to end: tokens uint32 [n], replies bool [n] (true where the token belongs to a reply, its
    end-of-turn token included), and starts int64 [count + 1]: conversation i is tokens[starts[i] : starts[i + 1]]."""

    tokens: np.ndarray
    replies: np.ndarray
    starts: np.ndarray

    def save(self, path: Path) -> None:
        """Write an npz file (atomically)."""
        partial = path.with_suffix(".partial.npz")
        np.savez(partial, tokens=self.tokens, replies=self.replies, starts=self.starts)
        partial.replace(path)

    def unlearn(self, turns: TurnTokens, unwanted: Collection[tuple[int, ...]]) -> None:
        """Conversations whose first question is one of `unwanted` (token ids) keep no reply."""
        for begin, end in zip(self.starts[:-1], self.starts[1:], strict=True):
            words = self.tokens[begin + len(turns.start) : end].tolist()
            if turns.end_of_turn in words and tuple(words[: words.index(turns.end_of_turn)]) in unwanted:
                self.replies[begin:end] = False

    @classmethod
    def load(cls, path: Path) -> Conversations:
        with np.load(path) as data:
            return cls(data["tokens"], data["replies"], data["starts"])


@dataclass(frozen=True)
class OpeningTokens:
    """An opening's token ids, and whether the user turn ends with them."""

    ids: Sequence[int]
    complete: bool


Openings = Callable[[int, np.random.Generator], list[OpeningTokens]]  # (count, rng) -> how conversations begin


class Harvester:
    """Writes batches of conversations with one target."""

    def __init__(self, target: BatchedTarget, turns: TurnTokens, options: HarvestOptions) -> None:
        self.target, self.turns, self.options = target, turns, options
        device = target.device
        self._ids = torch.zeros(options.batch, dtype=torch.long, device=device)
        self._positions = torch.zeros(options.batch, dtype=torch.long, device=device)
        self._cache = StaticCache(target.config, options.batch, options.length, device, target.dtype)
        self._graph: tuple[torch.cuda.CUDAGraph, Tensor] | None = None

    def _step(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits [batch, vocab] after ids int64 [batch] at positions int64 [batch]; on a GPU replayed from a graph."""
        self._ids.copy_(ids)
        self._positions.copy_(positions)

        def forward() -> Tensor:
            return self.target.logits(self.target.decode(self._ids, self._positions, self._cache))

        if self.target.device.type != "cuda":
            return forward()
        if self._graph is None:
            forward()  # what is compiled or created lazily must exist before the capture
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = forward()
            self._graph = graph, logits
        self._graph[0].replay()
        return self._graph[1]

    @torch.inference_mode()
    def converse(
        self, openings: Sequence[OpeningTokens], seed: int, options: HarvestOptions | None = None
    ) -> Conversations:
        """`batch` rows of `steps` tokens. Openings are taken in order, and again from the first when they run out. The
        last conversation of each row is cut where the batch ends. options: the harvester's if None; others must not
        differ in batch, and not be longer."""
        options, turns, device = options or self.options, self.turns, self.target.device
        batch, steps = options.batch, options.steps
        generator = torch.Generator(device).manual_seed(seed)
        rng = np.random.default_rng(seed)
        table, lengths, asks = self._scripts(openings)
        # Traits of the n-th conversation, drawn beforehand: temperature (0: greedy), and whether a question follows.
        count = len(openings)
        sampled_share = np.where(rng.random(count) < options.greedy_share, 0.0, 1.0)
        temperatures = torch.from_numpy(sampled_share * rng.uniform(*options.temperatures, count)).float().to(device)
        goes_on = torch.from_numpy(rng.random(count) < options.follow_up).to(device)

        conversation = torch.arange(batch, device=device)
        taken = torch.tensor(batch, device=device)
        script = 2 + conversation % count  # 0: user to reply, 1: reply to user, 2..: the openings
        at = torch.zeros_like(conversation)
        position = torch.zeros_like(conversation)
        spoken = torch.zeros_like(conversation)
        sampled = torch.zeros_like(conversation)
        recent = torch.full((batch, LAGS), -1, device=device)
        repeated = torch.zeros_like(recent)
        lags = torch.arange(LAGS, device=device)
        tokens = torch.zeros(steps, batch, dtype=torch.int32, device=device)
        replies = torch.zeros(steps, batch, dtype=torch.bool, device=device)
        begins = torch.zeros_like(replies)
        for step in range(steps):
            in_script = at < lengths[script]
            user = asks[script]
            token = torch.where(in_script, table[script, at.clamp(max=table.shape[1] - 1)], sampled)
            token = torch.where(user & ~in_script & (spoken >= options.longest_user_turn), turns.end_of_turn, token)
            speaking = ~in_script & ~user
            tokens[step], replies[step], begins[step] = token, speaking, position == 0
            # How many tokens in a row equal the one that stood `lag` earlier in the same reply.
            same = (recent == token[:, None]) & speaking[:, None] & (lags < spoken[:, None])
            repeated = torch.where(same, repeated + 1, 0)
            recent = torch.cat((token[:, None], recent[:, :-1]), dim=1)
            spoken = torch.where(in_script, 0, spoken + 1)

            trait = conversation % count
            ended = ~in_script & (token == turns.end_of_turn)
            asks_on = goes_on[trait] & (position < options.length // 2)
            over = (repeated >= LOOPED).any(1) | (spoken >= options.longest_reply) | (ended & ~asks_on)
            over = (speaking & over) | (position >= options.length - 1)
            logits = self._step(token, position)
            temperature = torch.where(user, options.user_temperature, temperatures[trait])
            sampled = self._choose(logits, temperature, generator)

            at = torch.where(ended | over, 0, at + in_script)
            script = torch.where(ended, torch.where(user, 0, 1), script)
            conversation = torch.where(over, taken + over.cumsum(0) - 1, conversation)
            taken = taken + over.sum()
            script = torch.where(over, 2 + conversation % count, script)
            position = torch.where(over, 0, position + 1)
        return _end_to_end(tokens, replies, begins)

    def _scripts(self, openings: Sequence[OpeningTokens]) -> tuple[Tensor, Tensor, Tensor]:
        """Token sequences that are given, not sampled: int64 [n, width]; their lengths; and whether the user speaks
        after them. 0: user to reply, 1: reply to user, 2..: the template's start plus an opening."""
        turns, room = self.turns, self.options.length // 2
        sequences = [turns.user_to_reply, turns.reply_to_user]
        for opening in openings:
            words = tuple(opening.ids)[:room]
            ending = (turns.end_of_turn, *turns.user_to_reply) if opening.complete else ()
            sequences.append((*turns.start, *words, *ending))
        table = np.zeros((len(sequences), max(1, *map(len, sequences))), dtype=np.int64)
        for row, sequence in enumerate(sequences):
            table[row, : len(sequence)] = sequence
        lengths = np.array([len(s) for s in sequences])
        asks = np.array([False, True, *(not o.complete for o in openings)])
        device = self.target.device
        return (
            torch.from_numpy(table).to(device),
            torch.from_numpy(lengths).to(device),
            torch.from_numpy(asks).to(device),
        )

    def _choose(self, logits: Tensor, temperature: Tensor, generator: torch.Generator) -> Tensor:
        """Next tokens int64 [batch]: the largest logit where the temperature [batch] is 0, else a draw."""
        values, ids = logits.topk(min(CANDIDATES, logits.shape[-1]), dim=-1)
        noise = torch.empty(values.shape, device=logits.device).exponential_(generator=generator)
        # The Gumbel-max trick over what min-p leaves.
        gap = values.float() - values[:, :1].float()
        scaled = gap / temperature.clamp(min=1e-4)[:, None]
        drawn = torch.where(scaled >= math.log(self.options.min_p), scaled - noise.log(), -torch.inf)
        choice = torch.where(temperature > 0, drawn.argmax(-1), 0)
        return ids.gather(1, choice[:, None])[:, 0]


def _end_to_end(tokens: Tensor, replies: Tensor, begins: Tensor) -> Conversations:
    """Rows of [steps, batch], one after the other."""
    starts = np.flatnonzero(begins.T.flatten().cpu().numpy())
    flat = tokens.T.flatten().cpu().numpy().astype(np.uint32)
    return Conversations(flat, replies.T.flatten().cpu().numpy(), np.append(starts, len(flat)))


@dataclass(frozen=True)
class Words:
    """Text to token ids and back."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def write_passages(harvester: Harvester, themes: Themes, words: Words, seed: int) -> list[str]:
    """Short texts by the target, one batch of them: whole sentences, no lists or code."""
    steps = min(harvester.options.steps, 3 * PASSAGE_TOKENS.stop)
    options = replace(harvester.options, steps=steps, greedy_share=0.0, temperatures=PASSAGE_TEMPERATURES)
    rng = np.random.default_rng((seed, 1))
    requests = themes.passage_requests(options.batch * (1 + steps // 100), rng)
    written = harvester.converse([OpeningTokens(words.encode(r.text), True) for r in requests], seed, options)
    passages: set[str] = set()
    for begin, end in zip(written.starts[:-1], written.starts[1:], strict=True):
        reply = written.tokens[begin:end][written.replies[begin:end]]
        text = words.decode(reply[: PASSAGE_TOKENS.stop].tolist()).strip()
        text = text[: max(text.rfind(mark) for mark in ".!?") + 1]
        if len(words.encode(text)) in PASSAGE_TOKENS and not any(mark in text for mark in ("```", "\n- ", "\n1.")):
            passages.add(text)
    return sorted(passages)


def from_prompts(prompts: Sequence[Prompt], words: Words) -> Openings:
    """Openings drawn from a list."""
    encoded = [OpeningTokens(words.encode(prompt.text), prompt.complete) for prompt in prompts]

    def draw(count: int, rng: np.random.Generator) -> list[OpeningTokens]:
        return [encoded[int(i)] for i in rng.integers(len(encoded), size=count)]

    return draw


def from_themes(harvester: Harvester, themes: Themes, words: Words, directory: Path) -> Openings:
    """Openings written from themes; the passages that they need are written first, into `directory`."""
    path = directory / "passages.json"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        written = write_passages(harvester, themes, words, harvester.options.seed)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(written), "utf-8")
        partial.replace(path)
    passages = json.loads(path.read_text("utf-8"))

    def draw(count: int, rng: np.random.Generator) -> list[OpeningTokens]:
        prompts = themes.openings(count, rng, passages)
        return [OpeningTokens(words.encode(prompt.text), prompt.complete) for prompt in prompts]

    return draw


def harvest(
    harvester: Harvester,
    directory: Path,
    openings: Openings,
    unwanted: Collection[tuple[int, ...]] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write shards `shard-00000.npz` (Conversations) into `directory`. unwanted: questions (token ids) that the model
    may come to ask, but that nothing may be learned from: those of an evaluation.

    Shard n depends on the seed and n alone, and shards already there are kept, so an interrupted harvest resumes.
    Returns the number of tokens in the directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    options = harvester.options
    per_shard = options.batch * options.steps
    shards = max(1, -(-options.tokens // per_shard))
    missing = [n for n in range(shards) if not _shard(directory, n).exists()]

    def prepare(number: int) -> list[OpeningTokens]:
        count = options.batch + per_shard // 100  # few conversations are shorter
        return openings(count, np.random.default_rng((options.seed, 2, number)))

    with ThreadPoolExecutor(1) as ahead:
        coming = ahead.submit(prepare, missing[0]) if missing else None
        for i, number in enumerate(missing):
            assert coming is not None
            beginnings = coming.result()
            if i + 1 < len(missing):
                coming = ahead.submit(prepare, missing[i + 1])
            written = harvester.converse(beginnings, options.seed * 1_000_003 + number)
            written.unlearn(harvester.turns, unwanted)
            written.save(_shard(directory, number))
            progress((shards - len(missing) + i + 1) * per_shard, shards * per_shard)
    return shards * per_shard


def _shard(directory: Path, number: int) -> Path:
    return directory / f"shard-{number:05d}.npz"

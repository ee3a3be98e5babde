"""Trains an EAGLE-3 head on conversations that its target wrote.

The loss is the cross-entropy against the target's own distribution, restricted to the draft vocabulary, summed over a
training-time test of `depth` draft positions with weights decay**i (EAGLE-3: 7 positions, 0.8). Features and target
distributions are recomputed by the target as training goes: the data on disk are token ids only.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.drafting.batched_target import BatchedTarget
from engine.drafting.compiling import compiled
from engine.drafting.corpus import Corpus
from engine.drafting.eagle_head import EagleConfig, EagleHead, default_feature_layers, shifted
from engine.errors import UsageError


@dataclass(frozen=True)
class TrainOptions:
    """What to train, and how.

    depth: draft positions unrolled; position i's loss weighs decay**i. reached_only: a position counts only where the
    drafts before it were right, as in a live loop. label_temperature: of the target's distribution, 0 for its argmax.
    intermediate_size: the head's MLP; the target's if None. skip_loops leaves out what a text that repeats itself
    would teach: small models often fall into loops, whose next token is certain. batch_tokens: tokens a step, padding
    included. The learning rate warms up over `warmup` steps, then falls along a cosine to a fiftieth at the end: of
    `epochs`, or of max_seconds, whichever comes first.
    """

    draft_vocab: int = 8192
    intermediate_size: int | None = None
    depth: int = 4
    decay: float = 0.8
    reached_only: bool = False
    label_temperature: float = 1.0
    warm_start: bool = True
    skip_loops: bool = True
    learning_rate: float = 1e-3
    batch_tokens: int = 8192
    epochs: int = 1
    warmup: int = 200
    clip: float = 0.5
    seed: int = 0
    max_seconds: float | None = None


@dataclass(frozen=True)
class TrainProgress:
    """step of steps; loss is the mean since the last report; accuracy[i]: how often draft position i's argmax is the
    target's where the drafts before it were right, over the tokens learned from; tokens read; seconds since the
    start."""

    step: int
    steps: int
    loss: float
    accuracy: tuple[float, ...]
    tokens: int
    seconds: float

    @property
    def length(self) -> float:
        """The acceptance length that these accuracies amount to, at a draft length of their number."""
        return 1 + float(np.cumprod(self.accuracy).sum())


def eagle_config(config: ModelConfig, draft_vocab_size: int, intermediate_size: int | None = None) -> EagleConfig:
    """A head of the target's own proportions, but for the MLP's width where one is given."""
    return EagleConfig(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=intermediate_size or config.intermediate_size,
        draft_vocab_size=draft_vocab_size,
        target_vocab_size=config.vocab_size,
        feature_layers=default_feature_layers(config.num_layers),
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_theta,
    )


@torch.no_grad()
def start_from_target(head: EagleHead, target: BatchedTarget) -> None:
    """Begin where the target ends: its last layer's attention (reading the feature half of the input) and MLP, its
    head's rows, and a feature that is the highest layer's."""
    last = f"layers.{target.config.num_layers - 1}."
    weights = target.weights
    hidden = target.config.hidden_size
    for name in "qkv":
        weight = getattr(head, name).weight
        weight.zero_()
        weight[:, hidden:] = weights[last + name]
    head.o.weight.copy_(weights[last + "o"])
    # A wider MLP keeps its further neurons as drawn, a narrower one takes the first.
    width = min(head.config.intermediate_size, target.config.intermediate_size)
    head.gate.weight[:width] = weights[last + "gate"][:width]
    head.up.weight[:width] = weights[last + "up"][:width]
    head.down.weight[:, :width] = weights[last + "down"][:, :width]
    head.mlp_norm.weight.copy_(weights[last + "mlp_norm"])
    head.hidden_norm.weight.copy_(weights[last + "attn_norm"])
    head.final_norm.weight.copy_(weights["final_norm"])
    head.head.weight.copy_(target.head[head.d2t])
    head.fc.weight.zero_()
    head.fc.weight[:, -hidden:] = torch.eye(hidden)


Losses = tuple[Tensor, Tensor, Tensor]


class Trainer:
    """A head, its optimiser and the loss of a batch.

    On a GPU a step of each shape is captured as a CUDA graph at its third occurrence: some 1500 launches of small
    kernels take a CPU longer than the GPU takes to run them.
    """

    def __init__(self, target: BatchedTarget, head: EagleHead, options: TrainOptions) -> None:
        self.target, self.head, self.options = target, head, options
        device = target.device
        self.t2d = torch.full((target.config.vocab_size,), -1, dtype=torch.long, device=device)
        self.t2d[head.d2t] = torch.arange(len(head.d2t), device=device)
        on_gpu = device.type == "cuda"
        self.optimiser = torch.optim.AdamW(
            head.parameters(),
            lr=torch.tensor(options.learning_rate, device=device) if on_gpu else options.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=on_gpu,
            capturable=on_gpu,
        )
        self._autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu)
        self._project, self._finish, self._labels, self._score = (
            compiled(f, target.compiled) for f in (head.project, head.finish, self._label, self._scored)
        )
        self._captures = on_gpu
        self._seen: Counter[torch.Size] = Counter()
        self._graphs: dict[torch.Size, tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Losses]] = {}
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._pool = torch.cuda.graph_pool_handle() if on_gpu else None  # one graph runs at a time: they share memory

    def _label(self, logits: Tensor, d2t: Tensor, t2d: Tensor) -> tuple[Tensor, Tensor]:
        """The target's logits [B, T, vocab] -> its choices as draft ids int64 [B, T] (-1: not in the draft
        vocabulary) and its probabilities over the draft vocabulary [B, T, draft_vocab]."""
        wanted = logits[..., d2t].float() / max(self.options.label_temperature, 1e-4)
        return t2d[logits.argmax(-1)], wanted.softmax(-1).to(logits.dtype)

    def _scored(self, hidden: Tensor, labels: Tensor, probabilities: Tensor, learn: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss over the positions where `learn` (bool [B, T]), and the drafts' ids int64 [B, T]."""
        drafted = self.head.logits(hidden).float()
        if self.options.label_temperature == 0:
            agreed = drafted.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        else:
            agreed = (probabilities.float() * drafted).sum(-1)
        cross_entropy = drafted.logsumexp(-1) - agreed
        return (cross_entropy * learn).sum() / learn.sum().clamp(min=1), drafted.argmax(-1)

    def losses(self, tokens: Tensor, learn: Tensor) -> Losses:
        """tokens int64 [B, T], learn bool [B, T] -> the weighted loss, and for each draft position the count of
        correct argmaxes and of tested tokens, where all drafts before were right."""
        options, head = self.options, self.head
        with torch.no_grad():
            hidden, features = self.target.forward(tokens, head.config.feature_layers)
            labels, probabilities = self._labels(self.target.logits(hidden), head.d2t, self.t2d)
            embedded = self.target.embed(tokens)
        # All below is at the index of the label: index s drafts token s + 1, the target's choice there. Moving the
        # states to it is cheaper than moving the labels' distributions to the states.
        learned, text = shifted(learn, 1), shifted(self.t2d[tokens], 1)
        reached = torch.ones_like(learn)
        loss = torch.zeros((), device=tokens.device)
        correct, tested = [], []
        for i, state in enumerate(head.rollout(features, embedded, options.depth, self._project, self._finish)):
            reached = shifted(reached, -1)  # the first 1 + i indices have no draft
            drafts = shifted(torch.ones_like(learn), -1 - i)
            usable = learned & (labels >= 0) & (reached if options.reached_only else drafts)
            term, drafted = self._score(shifted(state, -1 - i), labels, probabilities, usable)
            loss = loss + options.decay**i * term
            correct.append((learned & reached & (drafted == labels)).sum())
            tested.append((learned & reached).sum())
            reached = reached & (drafted == text)
        return loss, torch.stack(correct), torch.stack(tested)

    def step(self, tokens: Tensor, learn: Tensor, rate: float) -> Losses:
        """One update at a share `rate` of the learning rate. Returns what `losses` does; waits for nothing."""
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self.options.learning_rate * rate)
            else:
                group["lr"] = self.options.learning_rate * rate
        if self._stream is None:
            return self._update(tokens, learn)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = self._on_gpu(tokens, learn)
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def _on_gpu(self, tokens: Tensor, learn: Tensor) -> Losses:
        shape = tokens.shape
        self._seen[shape] += 1
        if shape not in self._graphs and self._captures and self._seen[shape] > 2:
            self._capture(tokens.clone(), learn.clone())
        if shape not in self._graphs:
            return self._update(tokens, learn)
        graph, tokens_in, learn_in, result = self._graphs[shape]
        tokens_in.copy_(tokens)
        learn_in.copy_(learn)
        graph.replay()
        return result

    def _capture(self, tokens: Tensor, learn: Tensor) -> None:
        self.optimiser.zero_grad(set_to_none=True)  # the graph has gradients of its own
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                result = self._update(tokens, learn)
        except RuntimeError as error:
            warnings.warn(f"steps are not captured as CUDA graphs, and slower: {error}", stacklevel=2)
            self._captures = False
            self.optimiser.zero_grad(set_to_none=True)
            return
        self._graphs[tokens.shape] = graph, tokens, learn, result

    def _update(self, tokens: Tensor, learn: Tensor) -> Losses:
        self.optimiser.zero_grad(set_to_none=True)
        with self._autocast:
            loss, correct, tested = self.losses(tokens, learn)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.options.clip)
        self.optimiser.step()
        return loss.detach(), correct, tested


def _beginning(target: BatchedTarget, corpus: Corpus, options: TrainOptions) -> EagleHead:
    vocabulary = corpus.frequent_tokens(options.draft_vocab, target.config.vocab_size)
    head = EagleHead(eagle_config(target.config, len(vocabulary), options.intermediate_size)).to(target.device)
    head.d2t.copy_(torch.from_numpy(vocabulary))
    if options.warm_start:
        start_from_target(head, target)
    return head


def _continued(target: BatchedTarget, start: EagleHead, options: TrainOptions) -> EagleHead:
    """A copy of `start`, its vocabulary widened to options.draft_vocab by the lowest ids that it lacks (of a
    byte-pair vocabulary, the most frequent), whose rows are the target's."""
    config = eagle_config(target.config, options.draft_vocab, options.intermediate_size)
    had = replace(start.config, draft_vocab_size=config.draft_vocab_size)
    if had != config or start.config.draft_vocab_size > config.draft_vocab_size:
        raise UsageError(
            f"the drafter to start from has other shapes: {_differences(start.config, config)}",
            "give its own, or start afresh",
        )
    known = start.d2t.cpu()
    free = torch.ones(config.target_vocab_size, dtype=torch.bool)
    free[known] = False
    further = free.nonzero()[: config.draft_vocab_size - len(known), 0]
    ids = torch.cat((known, further))
    head = EagleHead(config).to(target.device)
    state = start.state_dict()
    rows = torch.cat((state["head.weight"].to(target.device), target.head[further.to(target.device)].float()))
    head.load_state_dict(state | {"d2t": ids, "head.weight": rows})
    return head


def _differences(start: EagleConfig, wanted: EagleConfig) -> str:
    """The first few shapes that differ, as one line."""
    pairs = [(f.name, getattr(start, f.name), getattr(wanted, f.name)) for f in fields(EagleConfig)]
    return ", ".join(f"{name} {a}, not {b}" for name, a, b in pairs if a != b)


def rate_at(step: int, progress: float, warmup: int) -> float:
    """Share of the learning rate at a step, `progress` (0 to 1) of the way through the run."""
    cosine = 0.02 + 0.49 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return cosine * min(1.0, (step + 1) / max(1, warmup))


def train(
    target: BatchedTarget,
    shards: list[Path],
    options: TrainOptions,
    checkpoint: Path,
    progress: Callable[[TrainProgress], None] = lambda report: None,
    report_every: int = 50,
    save_every: int = 2000,
    saved: Callable[[EagleHead], None] = lambda head: None,
    start: EagleHead | None = None,
) -> EagleHead:
    """Train a head; resumes from `checkpoint` (a safetensors file of parameters and optimiser state) if it is there.

    saved: called with the head whenever a checkpoint has been written. start: a trained head to begin with, instead
    of the target; where draft_vocab is larger than its vocabulary, it is widened. Raises UsageError when the
    checkpoint was made with other options, or the start does not fit them.
    """
    from engine.drafting.checkpoint import load_training, save_training

    device = target.device
    started = time.monotonic()
    torch.manual_seed(options.seed)
    corpus = Corpus(shards, device, options.skip_loops)
    head = _beginning(target, corpus, options) if start is None else _continued(target, start, options)
    trainer = Trainer(target, head, options)
    steps = len(corpus.plan(options.batch_tokens, 0)) * options.epochs
    if steps == 0:
        raise UsageError("the harvest holds nothing to learn from", "harvest more")
    first = load_training(checkpoint, head, trainer.optimiser, asdict(options)) if checkpoint.exists() else 0

    sums = _Sums(device, options.depth)
    step = 0
    for epoch in range(options.epochs):
        for tokens, learn in corpus.batches(options.batch_tokens, options.seed * 1009 + epoch):
            step += 1
            if step <= first:
                continue
            # A run with a time limit anneals by the clock, so that it ends annealed.
            elapsed = time.monotonic() - started
            spent = elapsed / options.max_seconds if options.max_seconds else 0.0
            rate = rate_at(step - 1, max(step / steps, spent), min(options.warmup, steps // 10))
            sums.add(*trainer.step(tokens, learn, rate), tokens.numel())
            if step % report_every == 0 or step == steps or spent >= 1:
                progress(sums.report(step, steps, time.monotonic() - started))
            if spent >= 1:
                return head
            if step % save_every == 0 and step != steps:
                save_training(checkpoint, head, trainer.optimiser, step, asdict(options))
                saved(head)
    return head


class _Sums:
    """What a report says, summed on the device: reading it there would make every step wait."""

    def __init__(self, device: torch.device, depth: int) -> None:
        self.loss = torch.zeros((), device=device)
        self.correct, self.tested = torch.zeros(depth, device=device), torch.zeros(depth, device=device)
        self.steps = self.tokens = 0

    def add(self, loss: Tensor, correct: Tensor, tested: Tensor, tokens: int) -> None:
        self.loss += loss
        self.correct[: len(correct)] += correct
        self.tested[: len(tested)] += tested
        self.steps += 1
        self.tokens += tokens

    def report(self, step: int, steps: int, seconds: float) -> TrainProgress:
        accuracy = tuple((self.correct / self.tested.clamp(min=1)).tolist())
        report = TrainProgress(step, steps, float(self.loss) / self.steps, accuracy, self.tokens, seconds)
        for total in (self.loss, self.correct, self.tested):
            total.zero_()
        self.steps = 0
        return report

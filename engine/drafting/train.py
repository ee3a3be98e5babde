"""Trains an EAGLE-3 head on conversations that its target wrote.

The loss is the cross-entropy against the target's own distribution, restricted to the draft vocabulary, summed over a
training-time test of `depth` draft positions with weights decay**i (EAGLE-3: 7 positions, 0.8). Features and target
distributions are recomputed by the target as training goes: the data on disk are token ids only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import ModelConfig
from engine.drafting.batched_target import BatchedTarget
from engine.drafting.eagle_head import EagleConfig, EagleHead, default_feature_layers
from engine.errors import UsageError

LOOP_WINDOW = 16  # tokens; so many in a row are hardly repeated by chance


@dataclass(frozen=True)
class TrainOptions:
    """`depth` draft positions are unrolled; `hard_labels` trains against the target's argmax instead of its
    distribution. `skip_loops` leaves out what a text that repeats itself would teach: small models often fall into
    loops, whose next token is certain. Learning rate warms up over `warmup` of the run, then falls to a tenth along a
    cosine."""

    draft_vocab: int = 8192
    depth: int = 5
    decay: float = 0.8
    hard_labels: bool = False
    warm_start: bool = True
    skip_loops: bool = True
    learning_rate: float = 1e-3
    batch: int = 32
    epochs: int = 1
    warmup: float = 0.03
    clip: float = 0.5
    seed: int = 0
    max_seconds: float | None = None


@dataclass(frozen=True)
class TrainProgress:
    """step of steps; loss is the mean since the last report; accuracy[i]: how often draft position i's argmax is the
    target's, over reply tokens; seconds since the start."""

    step: int
    steps: int
    loss: float
    accuracy: tuple[float, ...]
    seconds: float


def read_shards(directory: Path) -> list[Path]:
    """The shards of a harvest, in order. Raises UsageError where there is none."""
    shards = sorted(p for p in directory.glob("shard-*.npz") if ".partial" not in p.name)
    if not shards:
        raise UsageError(f"no harvest in {directory}", "run `flint draft harvest` first")
    return shards


def looping(tokens: np.ndarray, window: int = LOOP_WINDOW) -> np.ndarray:
    """bool, as tokens uint32 [n, T]: the `window` tokens that end here occurred earlier in the same row."""
    count, length = tokens.shape
    seen_before = np.zeros(tokens.shape, dtype=bool)
    if length <= window:
        return seen_before
    # Every window as one number: equal windows have equal sums, others differ but for one chance in 2**64.
    factors = np.random.default_rng(0).integers(1, 1 << 63, window, dtype=np.uint64) | np.uint64(1)
    sums = np.zeros((count, length - window + 1), dtype=np.uint64)
    for i, factor in enumerate(factors):
        sums += (tokens[:, i : i + sums.shape[1]].astype(np.uint64) + np.uint64(1)) * factor
    for row, numbers in zip(seen_before, sums, strict=True):
        _, first, which = np.unique(numbers, return_index=True, return_inverse=True)
        row[window - 1 :] = first[which] < np.arange(len(numbers))
    return seen_before


def draft_vocabulary(shards: list[Path], size: int, vocab_size: int) -> np.ndarray:
    """The `size` token ids that occur most often in replies, ascending, int64."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for shard in shards:
        with np.load(shard) as data:
            counts += np.bincount(data["tokens"][data["replies"]], minlength=vocab_size)
    order = np.argsort(-counts, kind="stable")
    return np.sort(order[: min(size, vocab_size)])


def eagle_config(config: ModelConfig, draft_vocab_size: int) -> EagleConfig:
    """A head of the target's own proportions."""
    return EagleConfig(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
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
    for name in ("o", "gate", "up", "down"):
        getattr(head, name).weight.copy_(weights[last + name])
    head.mlp_norm.weight.copy_(weights[last + "mlp_norm"])
    head.hidden_norm.weight.copy_(weights[last + "attn_norm"])
    head.final_norm.weight.copy_(weights["final_norm"])
    head.head.weight.copy_(target.head[head.d2t])
    head.fc.weight.zero_()
    head.fc.weight[:, -hidden:] = torch.eye(hidden)


def batches(
    shards: list[Path], size: int, seed: int, skip_loops: bool = False
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Shuffled batches of (tokens, replies), shard by shard. skip_loops: what loops does not count as a reply."""
    rng = np.random.default_rng(seed)
    for shard in rng.permutation(len(shards)):
        with np.load(shards[shard]) as data:
            tokens, replies = data["tokens"], data["replies"]
        if skip_loops:
            replies = replies & ~looping(tokens)
        order = rng.permutation(len(tokens))
        for start in range(0, len(order) - size + 1, size):
            rows = order[start : start + size]
            yield tokens[rows], replies[rows]


def rollout_losses(
    head: EagleHead, target: BatchedTarget, tokens: Tensor, replies: Tensor, options: TrainOptions, t2d: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """tokens int64 [B, T], replies bool [B, T], t2d int64 [vocab] (-1: not in the draft vocabulary).

    Returns the weighted loss, and for each draft position the count of correct argmaxes and of tested tokens.
    """
    with torch.no_grad():
        hidden, features = target.forward(tokens, head.config.feature_layers)
        logits = target.logits(hidden)
        best = logits.argmax(-1)
        wanted = logits[..., head.d2t].float()
        embedded = target.embed(tokens)
    loss = torch.zeros((), device=tokens.device)
    correct, tested = [], []
    for i, state in enumerate(head.rollout([f.float() for f in features], embedded.float(), options.depth)):
        rows = state.shape[1]
        at = slice(1 + i, 1 + i + rows)  # index t's label is the target's choice at position t + 1 + i
        label = t2d[best[:, at]]
        # The predicted token, at t + 2 + i, must be a reply's; past the end the last position's role stands.
        predicted = torch.cat((replies[:, 2 + i :], replies[:, -1:]), dim=1)[:, :rows]
        usable = predicted & (label >= 0)
        drafted = head.logits(state)[usable].float()
        if options.hard_labels:
            term = F.cross_entropy(drafted, label[usable])
        else:
            probabilities = wanted[:, at][usable].softmax(-1)
            term = -(probabilities * drafted.log_softmax(-1)).sum(-1).mean()
        loss = loss + options.decay**i * torch.nan_to_num(term)
        correct.append((drafted.argmax(-1) == label[usable]).sum())
        tested.append(predicted.sum())
    return loss, torch.stack(correct), torch.stack(tested)


def train(
    target: BatchedTarget,
    shards: list[Path],
    options: TrainOptions,
    checkpoint: Path,
    progress: Callable[[TrainProgress], None] = lambda report: None,
    report_every: int = 50,
    save_every: int = 500,
) -> EagleHead:
    """Train a head; resumes from `checkpoint` (a safetensors file of parameters and optimiser state) if it is there.

    Raises UsageError when the checkpoint was made with other options.
    """
    from engine.drafting.checkpoint import load_training, save_training

    device = target.device
    torch.manual_seed(options.seed)
    vocabulary = draft_vocabulary(shards, options.draft_vocab, target.config.vocab_size)
    head = EagleHead(eagle_config(target.config, len(vocabulary))).to(device)
    head.d2t.copy_(torch.from_numpy(vocabulary))
    t2d = torch.full((target.config.vocab_size,), -1, dtype=torch.long, device=device)
    t2d[head.d2t] = torch.arange(len(vocabulary), device=device)
    if options.warm_start:
        start_from_target(head, target)
    optimiser = torch.optim.AdamW(head.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    steps_per_epoch = 0
    for shard in shards:
        with np.load(shard) as data:
            steps_per_epoch += len(data["replies"]) // options.batch
    steps = steps_per_epoch * options.epochs
    if steps == 0:
        raise UsageError("the harvest is smaller than one batch", "harvest more, or lower --batch")
    first = load_training(checkpoint, head, optimiser, asdict(options)) if checkpoint.exists() else 0

    def rate(step: int) -> float:
        warm = max(1, int(steps * options.warmup))
        if step < warm:
            return (step + 1) / warm
        return 0.1 + 0.45 * (1 + float(np.cos(np.pi * (step - warm) / max(1, steps - warm))))

    started = time.monotonic()
    total = torch.zeros((), device=device)
    correct = torch.zeros(options.depth, device=device)
    tested = torch.zeros(options.depth, device=device)
    since = 0
    step = 0
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")
    for epoch in range(options.epochs):
        for tokens, replies in batches(shards, options.batch, options.seed * 1009 + epoch, options.skip_loops):
            step += 1
            if step <= first:
                continue
            share = rate(step - 1)
            if options.max_seconds is not None:
                # A run with a time limit anneals by the clock, so that it ends annealed.
                share = min(share, 1 - 0.9 * (time.monotonic() - started) / options.max_seconds)
            for group in optimiser.param_groups:
                group["lr"] = options.learning_rate * max(share, 0.02)
            ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
            with autocast:
                loss, hits, trials = rollout_losses(
                    head, target, ids, torch.from_numpy(replies).to(device), options, t2d
                )
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), options.clip)
            optimiser.step()
            total += loss.detach()
            correct[: len(hits)] += hits
            tested[: len(trials)] += trials
            since += 1
            out_of_time = options.max_seconds is not None and time.monotonic() - started > options.max_seconds
            if step % report_every == 0 or step == steps or out_of_time:
                accuracy = tuple((correct / tested.clamp(min=1)).tolist())
                progress(TrainProgress(step, steps, float(total) / since, accuracy, time.monotonic() - started))
                for sums in (total, correct, tested):
                    sums.zero_()
                since = 0
            if step % save_every == 0 and step != steps:
                save_training(checkpoint, head, optimiser, step, asdict(options))
            if out_of_time:
                return head
    return head

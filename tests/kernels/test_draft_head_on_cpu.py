"""The learned drafter inside the megakernel's loop, on the emulated GPU: its drafts are those of engine.drafting.eagle
in float32, the tokens are single pass', and the steps those of the same loop written out in Python.

The heads are trained for a moment on the target's own replies, so that some of their drafts hold.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.drafting.eagle import EagleDrafter
from engine.drafting.eagle_head import EagleConfig, EagleHead, shifted
from engine.packed.matrix import Matrix
from engine.packed.quantize import dequantize, quantize_int4, quantize_int8
from engine.sampling import Sampling
from kernels.cuda.check import Case
from kernels.cuda.drafting import DraftCache, DraftHead, dequantised
from kernels.cuda.megakernel import DeviceSampling
from kernels.cuda.plan import DraftDims, KernelDims
from kernels.cuda.reference import RandomModel, Reference, random_model
from kernels.cuda.token_ring import Step
from tests.kernels.test_megakernel_on_cpu import EmulatedGpu
from tests.kernels.test_speculation_on_cpu import GREEDY, HOT, RANDOM, REPETITIVE, WARM, cyclic, longest_match

pytestmark = [
    pytest.mark.slow,  # ten seconds of g++ and as many of fibers for each
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to run the kernel on the CPU"),
]
CONTEXT = 96
NEVER = 99  # a match that no lookup finds: the head alone drafts
PROMPTS = [REPETITIVE, RANDOM, [9, 9, 40, 7, 260, 11, 12], [3, 1, 4, 1, 5, 9, 2, 6]]


@dataclass(frozen=True)
class Shape:
    """A target and its drafter."""

    dims: KernelDims
    kind: str
    group: int
    head: tuple[str, int] | None
    columns: int
    sms: int
    intermediate: int
    vocab: int
    layers: tuple[int, ...]
    stored: str = "int8"  # the drafter's matrices
    stored_head: str = "int4"

    def __str__(self) -> str:
        return f"{self.kind}-{self.stored}-{self.columns}-columns-{self.sms}-sms"


def quantised(name: str, values: np.ndarray, kind: str) -> Matrix:
    if kind == "bf16":
        bits = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return Matrix(name, "bf16", values.shape[0], values.shape[1], 0, bits, None, None)
    return (
        quantize_int8(values, 32) if kind == "int8" else quantize_int4(values, 32, symmetric=kind == "int4_symmetric")
    )


class Target:
    """A random model with its features and greedy replies, in float32."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.model: RandomModel = random_model(shape.dims, shape.kind, shape.group, head=shape.head, seed=3)

    def features(self, tokens: Sequence[int]) -> list[torch.Tensor]:
        """[tokens, hidden] for each layer that the drafter reads."""
        return [self._entering(tokens)[1][layer] for layer in self.shape.layers]

    def _entering(self, tokens: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return Reference(self.model, 256).step(tokens, 0)

    def reply(self, prompt: Sequence[int], count: int) -> list[int]:
        reference, tokens = Reference(self.model, 256), list(prompt)
        logits = reference.step(tokens, 0)[0]
        for _ in range(count):
            tokens.append(int(logits[-1].argmax()))
            logits = reference.step(tokens[-1:], len(tokens) - 1)[0]
        return tokens

    def embed(self, ids: Any) -> torch.Tensor:
        return (
            dequantised(self.model.matrices["embed"], "cpu")[torch.as_tensor(ids)]
            * self.shape.dims.embedding_multiplier
        )


def trained(target: Target, replies: Sequence[Sequence[int]], steps: int = 120) -> tuple[DraftHead, EagleHead]:
    """A head that has seen these conversations, as it is stored and as a float32 module of the stored values."""
    shape, d = target.shape, target.shape.dims
    config = EagleConfig(
        hidden_size=d.hidden,
        num_heads=d.heads,
        num_kv_heads=d.kv_heads,
        head_dim=d.head_dim,
        intermediate_size=shape.intermediate,
        draft_vocab_size=shape.vocab,
        target_vocab_size=d.vocab,
        feature_layers=shape.layers,
        rms_norm_eps=d.rms_norm_eps,
        rope_theta=5000.0,
    )
    torch.manual_seed(1)
    head = EagleHead(config)
    seen = sorted({token for reply in replies for token in reply})
    others = [token for token in range(d.vocab) if token not in seen]
    ids = torch.tensor(sorted((seen + others[::-1])[: shape.vocab]))
    head.d2t.copy_(ids)
    back = torch.full((d.vocab,), -100).index_copy(0, ids, torch.arange(shape.vocab))
    optimiser = torch.optim.AdamW(head.parameters(), lr=3e-3)
    data = []
    for reply in replies:
        tokens = torch.tensor(list(reply))
        data.append((tokens, [f[None] for f in target.features(reply)], target.embed(tokens)[None]))
    for step in range(steps):
        tokens, features, embedded = data[step % len(data)]
        loss = torch.zeros(())
        for depth, hidden in enumerate(head.rollout(features, embedded, 3)):
            labels = shifted(back[tokens][None, :, None], 2 + depth)[0, :, 0]
            count = len(tokens) - 2 - depth
            loss = loss + F.cross_entropy(head.logits(hidden)[0, :count], labels[:count], ignore_index=-100)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    matrices: dict[str, Matrix] = {}
    vectors: dict[str, np.ndarray] = {}
    for name, parameter in head.named_parameters():
        name, values = name.removesuffix(".weight"), parameter.detach().numpy()
        if values.ndim == 1:
            vectors[name] = values.copy()
            continue
        matrices[name] = quantised(name, values, shape.stored_head if name == "head" else shape.stored)
        parameter.data.copy_(torch.from_numpy(dequantize(matrices[name])))
    dims = DraftDims(shape.intermediate, shape.vocab, shape.layers, d.heads, d.kv_heads, d.head_dim, d.rms_norm_eps)
    frequencies = head._inverse.numpy().copy()
    return DraftHead(dims, matrices, vectors, frequencies, ids.to(torch.int32).numpy()), head.eval()


class Bench:
    """A target and its drafter in one emulated kernel, and everything that they are compared with."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self.shape, self.target = shape, Target(shape)
        self.known = [self.target.reply(prompt, 60) for prompt in PROMPTS[:3]]
        self.stored, self.head = trained(self.target, self.known)
        case = Case(shape.dims, shape.kind, shape.group, shape.head)
        self.gpu = EmulatedGpu(folder, shape.dims, case, shape.columns, shape.sms, CONTEXT, None, self.stored)
        (folder / "single").mkdir()
        self.single = EmulatedGpu(folder / "single", shape.dims, case, 1, shape.sms, CONTEXT)
        self.plain: dict[tuple[object, ...], list[int]] = {}

    def fill(self, history: list[int]) -> None:
        """All but the last token into the target's cache, and the drafter's rows of them."""
        width, cache = self.shape.columns, self.gpu._cache
        cache.fill_(float("nan"))
        for first in range(0, len(history) - 1, width):
            self.gpu.step(history[first : min(first + width, len(history) - 1)], first)
        draft = DraftCache(self.stored, self.target.embed, cache[-1])
        features = dict(zip(self.shape.layers, self.target.features(history), strict=True))
        cut = (len(history) - 1) // 2  # in two pieces
        for first, last in ((0, cut), (cut, len(history) - 1)):
            if last > first:
                draft.extend(history[first:last], first, {layer: f[first:last] for layer, f in features.items()})
        draft.complete(history[-1])
        assert draft.position == len(history) - 1

    def single_pass(self, history: list[int], way: DeviceSampling, count: int) -> list[int]:
        key = (tuple(history), way, count)
        if key not in self.plain:
            self.fill(history)
            self.single._cache.copy_(self.gpu._cache[:-1, :, : self.single._cache.shape[2]])
            self.plain[key] = self.single.stream(history, way, count, position=len(history) - 1)
        return self.plain[key]

    def speculate(
        self, history: list[int], way: DeviceSampling, count: int, **options: Any
    ) -> tuple[list[int], list[Step]]:
        self.fill(history)
        return self.gpu.speculate(history, way, count, **{"learned": True, "least_match": NEVER} | options)

    def drafter(self) -> EagleDrafter:
        return EagleDrafter(self.head, lambda ids: self.target.embed(list(ids)).numpy())

    def expected_steps(self, history: list[int], ids: list[int], most: int, least: int) -> list[Step]:
        """The steps on the way to `ids`, which is all that was asked for."""
        whole = [*history, *ids]
        features = self.target.features(whole[:-1])
        drafter, fed = self.drafter(), len(history) - 1
        drafter.extend(whole[:fed], self._rows(features, 0, fed))
        steps, done = [], 0
        learned: list[int] = []
        while done < len(ids):
            known = [*history, *ids[:done]]
            length, start = longest_match(known)
            room = min(most, len(ids) - done - 1)
            draft = learned[:room]
            match = 0
            if length >= least or not draft:
                match, draft = length, []
            while length >= least and len(draft) < room:
                draft.append([*known, *draft][start + len(draft)])
            kept = 0
            while kept < len(draft) and draft[kept] == ids[done + kept]:
                kept += 1
            steps.append(Step(kept + 1, len(draft), kept, match))
            done += kept + 1
            drafter.extend(whole[fed : fed + kept + 1], self._rows(features, fed, fed + kept + 1))
            fed += kept + 1
            learned = list(drafter.propose(whole[fed], most, Sampling()).ids) if done < len(ids) else []
        return steps

    def _rows(self, features: list[torch.Tensor], first: int, last: int) -> dict[int, np.ndarray]:
        return {layer: f[first:last].numpy() for layer, f in zip(self.shape.layers, features, strict=True)}

    def check(
        self, history: list[int], way: DeviceSampling, count: int, least: int = NEVER, **options: Any
    ) -> list[Step]:
        ids = self.single_pass(history, way, count)
        got, steps = self.speculate(history, way, count, least_match=least, **options)
        assert got == ids
        most = min(self.shape.columns - 1, options.get("most_drafts", 7))
        assert steps == self.expected_steps(history, ids, most, least)
        return steps


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Shape], Bench]:
    made: dict[Shape, Bench] = {}

    def of(shape: Shape) -> Bench:
        if shape not in made:
            made[shape] = Bench(tmp_path_factory.mktemp("drafter"), shape)
        return made[shape]

    return of


SMALL = Shape(cyclic(128, 2, 1, 64, 128), "int4", 64, None, 4, 2, 192, 131, (1, 2))
SHAPES = [
    SMALL,
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tokens_are_single_pass_s_and_steps_those_of_the_loop_written_out(bench, shape: Shape):
    both, accepted, rejected = bench(shape), 0, 0
    for history, way, count in ((REPETITIVE, GREEDY, 24), (RANDOM, WARM, 12), (PROMPTS[3], HOT, 8)):
        for step in both.check(history, way, count):
            accepted += step.accepted
            rejected += step.drafted - step.accepted
    print(f"{accepted} accepted, {rejected} rejected")
    assert accepted
    assert rejected

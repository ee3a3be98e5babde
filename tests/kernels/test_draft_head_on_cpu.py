"""The learned drafter inside the megakernel's loop, on the emulated GPU: its drafts are those of engine.drafting.eagle
in float32, the tokens are single pass', and the steps those of the same loop written out in Python.

The heads are trained for a moment on the target's own replies, so that some of their drafts hold.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
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
from kernels.cuda.driver import Driver, Module
from kernels.cuda.kv_layout import unpack_keys, unpack_values
from kernels.cuda.megakernel import DeviceSampling
from kernels.cuda.phases import DraftDims, KernelDims, phases_of, split_tiles
from kernels.cuda.reference import RandomModel, Reference, random_model
from kernels.cuda.token_ring import Step
from tests.fake_cuda import FakeLibcuda, emulator
from tests.kernels.test_megakernel_on_cpu import SHARED_LIMIT, EmulatedGpu, small
from tests.kernels.test_speculation_on_cpu import (
    GREEDY,
    HOT,
    RANDOM,
    REPETITIVE,
    WARM,
    EmulatedDoor,
    cyclic,
    longest_match,
)

pytestmark = [
    pytest.mark.slow,  # up to three minutes of fibers on an idle machine
    pytest.mark.timeout(1200),
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

    def __init__(self, folder: Path, shape: Shape, tuning: dict[str, int] | None = None) -> None:
        self.shape, self.target = shape, Target(shape)
        self.known = [self.target.reply(prompt, 60) for prompt in PROMPTS[:3]]
        self.stored, self.head = trained(self.target, self.known)
        case = Case(shape.dims, shape.kind, shape.group, shape.head)
        self.gpu = EmulatedGpu(folder, shape.dims, case, shape.columns, shape.sms, CONTEXT, tuning, self.stored)
        (folder / "single").mkdir()
        self.single = EmulatedGpu(folder / "single", shape.dims, case, 1, shape.sms, CONTEXT, tuning)
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
        drafter.extend(whole[:fed], self.rows(features, 0, fed))
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
            drafter.extend(whole[fed : fed + kept + 1], self.rows(features, fed, fed + kept + 1))
            fed += kept + 1
            learned = list(drafter.propose(whole[fed], most, Sampling()).ids) if done < len(ids) else []
        return steps

    def rows(self, features: list[torch.Tensor], first: int, last: int) -> dict[int, np.ndarray]:
        return {layer: f[first:last].numpy() for layer, f in zip(self.shape.layers, features, strict=True)}

    def first_logits(self, drafter: EagleDrafter, whole: list[int]) -> torch.Tensor:
        """Of the draft vocabulary, after `whole`, of which the drafter knows all but the last token."""
        head, row = self.head, len(whole) - 2
        hidden = drafter._features[None, row : row + 1]
        q, k, v = head.project(self.target.embed(whole[-1:])[None], hidden, torch.tensor([row]))
        keys = torch.cat((drafter._keys[:, :row], k[0]), 1).repeat_interleave(q.shape[1] // k.shape[1], 0)
        values = torch.cat((drafter._values[:, :row], v[0]), 1).repeat_interleave(q.shape[1] // k.shape[1], 0)
        weights = (q[0] @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
        return head.logits(head.finish(hidden, (weights @ values)[None]))[0, 0]

    def check(
        self, history: list[int], way: DeviceSampling, count: int, least: int = NEVER, **options: Any
    ) -> list[Step]:
        ids = self.single_pass(history, way, count)
        got, steps = self.speculate(history, way, count, least_match=least, **options)
        assert got == ids
        most = min(self.shape.columns - 1, options.get("most_drafts", 7))
        assert steps == self.expected_steps(history, ids, most, least)
        return steps


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are no work to share: beside other processes two threads trained ten times as long as one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Shape], Bench]:
    made: dict[Shape, Bench] = {}

    def of(shape: Shape) -> Bench:
        if shape not in made:
            made[shape] = Bench(tmp_path_factory.mktemp("drafter"), shape)
        return made[shape]

    return of


SMALL = Shape(cyclic(128, 2, 1, 64, 128), "int4", 64, None, 4, 2, 256, 131, (1, 2))  # two SMs are a pair
SHAPES = [
    SMALL,
    # A norm of the target's queries, which the drafter has not; a scale of attention of the target's own.
    Shape(
        replace(small(192, 3, 1, 128, 320, qk_norm=True), attention_multiplier=1 / 64),
        *("int4_asymmetric", 32, ("int8", 32), 2, 3, 384, 99, (2, 1), "int4", "int8"),
    ),
    Shape(cyclic(128, 2, 1, 64, 128, layers=1), "bf16", 0, None, 8, 2, 256, 300, (1,), "bf16", "bf16"),
    # One SM has no rows of the residual.
    Shape(cyclic(128, 2, 2, 64, 192), "int4", 64, None, 4, 9, 192, 150, (1, 2), "int4_symmetric", "int4_symmetric"),
    # Warps stage twice, and a part of an item; three blocks of queries.
    Shape(cyclic(320, 5, 1, 64, 320, layers=1), "int4_asymmetric", 32, ("int8", 32), 4, 4, 320, 81, (1,)),
    # Pairs, as in the first and the third; in two of them the second SM has no rows of the residual.
    Shape(cyclic(128, 2, 2, 64, 128, layers=1), "int4", 64, None, 2, 10, 128, 150, (1,), "int4", "int4_symmetric"),
]
PAIRED = SHAPES[0], SHAPES[2], SHAPES[5]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tokens_are_single_pass_s_and_steps_those_of_the_loop_written_out(bench, shape: Shape, record_property):
    both, accepted, rejected = bench(shape), 0, 0
    assert both.gpu.shares == (2 if shape in PAIRED else 1)
    for history, way, count in ((REPETITIVE, GREEDY, 24), (RANDOM, WARM, 12), (PROMPTS[3], HOT, 8)):
        for step in both.check(history, way, count):
            accepted += step.accepted
            rejected += step.drafted - step.accepted
    record_property("accepted", accepted)
    record_property("rejected", rejected)
    assert accepted
    assert rejected


def test_the_first_draft_s_logit(bench):
    """After a reply's last token, too, the head runs once; what its SMs agreed on is left in memory."""
    both, worst = bench(SMALL), 0.0
    for count in (1, 2, 5, 11):
        ids, _ = both.speculate(RANDOM, WARM, count)
        left = max(int(word) for word in both.gpu.candidates[-SMALL.sms :])  # of each SM, its own best
        logit, draft = ordered_float(left >> 32), ~(left >> 12) & 0xFFFFF
        whole = [*RANDOM, *ids]
        drafter = both.drafter()
        drafter.extend(whole[:-1], both.rows(both.target.features(whole[:-1]), 0, len(whole) - 1))
        assert list(drafter.propose(whole[-1], 1, Sampling()).ids) == [draft]
        expected = both.first_logits(drafter, whole)
        assert int(both.stored.target_ids[int(expected.argmax())]) == draft
        worst = max(worst, abs(logit - float(expected.max())) / float(expected.std()))
    print(f"worst distance {worst:.1e} of the logits' spread")
    assert worst < 3e-3  # an fp16 cache against float32


def test_the_order_of_the_sms_changes_nothing(bench):
    both = bench(SMALL)
    first = both.speculate(REPETITIVE, HOT, 16)
    for order in (1, 2):
        assert both.speculate(REPETITIVE, HOT, 16, order=order) == first


def test_lookup_takes_over_where_it_matches_long(bench):
    both = bench(SMALL)
    for least in (2, 4):
        steps = both.check(REPETITIVE, GREEDY, 24, least=least)
        assert (steps[0].match, steps[0].drafted) == (4, 3)  # the prompt's own repetition
        assert {step.match >= least for step in steps if step.drafted} == {True, False}
        assert {step.match for step in steps if step.match < least and step.drafted} == {0}


def test_few_drafts_and_none(bench):
    both = bench(SMALL)
    assert max(step.drafted for step in both.check(RANDOM, WARM, 12, most_drafts=2)) == 2
    assert all(step.drafted == 0 for step in both.check(RANDOM, WARM, 6, most_drafts=0))
    for count in (1, 2, 3, 5):
        assert sum(step.tokens for step in both.check(RANDOM, GREEDY, count)) == count


def test_stops_and_cancelling(bench):
    both = bench(SMALL)
    ids = both.single_pass(REPETITIVE, GREEDY, 24)
    for stop in sorted(set(ids))[:4]:
        got, steps = both.speculate(REPETITIVE, GREEDY, 24, stop=(299, stop))
        assert got == ids[: ids.index(stop) + 1]
        assert sum(step.tokens for step in steps) == len(got)
    ids, steps = both.speculate(REPETITIVE, WARM, 60, cancel=True)
    assert len(steps) <= 2
    assert ids == both.single_pass(REPETITIVE, WARM, 60)[: len(ids)]


def test_a_loop_leaves_the_drafter_s_rows_complete(bench):
    """Where one loop ends another begins, without a look back."""
    both = bench(SMALL)
    ids = both.single_pass(REPETITIVE, GREEDY, 24)
    whole, steps = both.speculate(REPETITIVE, GREEDY, 24)
    first, _ = both.speculate(REPETITIVE, GREEDY, 10)
    rest, later = both.gpu.speculate([*REPETITIVE, *first], GREEDY, 14, learned=True, least_match=NEVER)
    assert [*first, *rest] == ids == whole
    again = both.expected_steps([*REPETITIVE, *first], rest, 3, NEVER)
    assert later == again
    assert sum(step.accepted for step in later)
    assert len(steps) < len(ids)


def test_to_the_last_position_of_the_context(bench):
    both = bench(SMALL)
    long = [(3 * i * i + i) % 290 for i in range(CONTEXT - 7)]
    steps = both.check(long, WARM, 8)  # the last one fed is at CONTEXT - 1
    assert sum(step.tokens for step in steps) == 8


@pytest.mark.parametrize("sms", [5, 6])  # the latter in pairs
def test_sms_begin_to_attend_in_the_middle_of_a_reply(tmp_path: Path, sms: int):
    """The next 16 keys go to another SM: the drafter runs ahead of the step whose keys decide on the SMs."""
    shape = replace(SMALL, sms=sms)
    both = Bench(tmp_path, shape, {"BLOCKS_PER_SPLIT": 1})
    steps = both.check(REPETITIVE, GREEDY, 60)
    assert sum(step.accepted for step in steps)


def test_what_the_last_step_s_drafter_left_is_not_taken_for_this_one_s(tmp_path: Path):
    """Three layers of the loop from draft to draft, the target's, fc and a pass: as many as packets have tags."""
    shape = replace(SMALL, dims=cyclic(128, 2, 1, 64, 128, layers=1), layers=(1,))
    both = Bench(tmp_path, shape)
    steps = both.check(REPETITIVE, GREEDY, 24)
    assert sum(step.accepted for step in steps)


def test_the_same_kernel_without_the_head(bench):
    both = bench(SMALL)
    ids = both.single_pass(REPETITIVE, WARM, 12)
    got, steps = both.speculate(REPETITIVE, WARM, 12, learned=False, least_match=1)
    assert got == ids
    assert {step.match for step in steps} != {0}
    with_lookup = longest_match(REPETITIVE)[0]
    assert steps[0].match == with_lookup


def ordered_float(key: int) -> float:
    """What ordered() of primitives.cuh made of a float."""
    bits = key ^ 0x80000000 if key & 0x80000000 else ~key & 0xFFFFFFFF
    return float(np.array(bits, np.uint32).view(np.float32))


class Door(EmulatedDoor):
    """The host's side, with what holding a drafter needs of it."""

    def __init__(self, both: Bench) -> None:
        super().__init__(both.gpu)
        shape, embed = both.shape, both.target.model.matrices["embed"]
        self.kv_cache, self._matrices_embed = both.gpu._cache, embed
        self._shares = both.gpu.shares
        self.phases = phases_of(shape.dims, both.target.model.matrices, self._shares)
        self.split = split_tiles(self.phases, shape.dims.layers, shape.sms)
        self._gpu = SimpleNamespace(sm_count=shape.sms, shared_per_block=SHARED_LIMIT)
        self._tuning, self._drafting, self._drafter, self._kernels = {}, {}, None, {}
        driver = Driver(FakeLibcuda(sm_count=shape.sms, launch=emulator()))
        embedding = (embed.q, embed.scale, embed.minimum)
        self._loaded = SimpleNamespace(retile=Module(driver, b"").kernel("retile"), embedding=embedding)


def test_the_host_s_door(bench, monkeypatch: pytest.MonkeyPatch):
    both = bench(SMALL)
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    expected = both.speculate(RANDOM, WARM, 12)
    door = Door(both)
    with pytest.raises(ValueError, match="no drafter in a loop of 4 columns"):
        door.stream_speculative(len(RANDOM) - 1, WARM, 12, [299], RANDOM, columns=4, learned=True)
    cache = door.hold_drafter(both.stored)
    assert door.draft_widths == (2, 4)
    assert door._drafter is not None
    held = door._drafter.tiled.data.numel()
    assert held - 16 * 128 <= door.draft_bytes(1) <= held
    assert door.draft_bytes(3) > 2 * door.draft_bytes(1)
    both.fill(RANDOM)
    both.gpu._cache[-1].fill_(float("nan"))
    rows = dict(zip(SMALL.layers, both.target.features(RANDOM[:-1]), strict=True))
    cache.extend(RANDOM[:-1], 0, rows)
    cache.extend(RANDOM, 7, rows)  # does not follow: left out
    cache.complete(RANDOM[-1])
    ring = door.stream_speculative(len(RANDOM) - 1, WARM, 12, [299], RANDOM, columns=4, least_match=NEVER, learned=True)
    ids, _, steps = ring.poll_steps()
    assert (ids, steps) == expected
    cache.took(len(RANDOM) - 1 + len(ids))
    assert cache.position == len(RANDOM) - 1 + len(ids)
    cache.truncate(5)
    assert cache.position == 5


def test_rows_written_in_any_pieces_are_the_same(bench):
    both = bench(SMALL)
    tokens = [(5 * i * i + 3 * i) % 290 for i in range(40)]
    features, written = both.target.features(tokens), []
    for pieces in ((40,), (1, 39), (15, 2, 16, 7), (1,) * 40):
        layer = torch.full_like(both.gpu._cache[-1], float("nan"))
        cache, at = DraftCache(both.stored, both.target.embed, layer), 0
        for size in pieces:
            rows = {number: f[at : at + size] for number, f in zip(SMALL.layers, features, strict=True)}
            cache.extend(tokens[at : at + size], at, rows)
            at += size
        cache.complete(9)
        written.append(torch.stack([unpack_keys(layer[:, :, 0], 64), unpack_values(layer[:, :, 1], 64)])[:, :, :40])
    drafter = both.drafter()
    drafter.extend([*tokens, 9], both.rows([torch.cat((f, f[:1])) for f in features], 0, 41))
    truth = torch.stack([drafter._keys[:, :40], drafter._values[:, :40]])
    for rows in written:
        assert (rows.float() - truth).abs().max() < 1e-3 * truth.abs().max()  # fp16


def test_forced_acceptance_pays_for_the_head_s_passes(tmp_path: Path):
    both = Bench(tmp_path, SMALL, {"FORCED_ACCEPTANCE": 1})
    both.fill([1, 5])
    _, steps = both.gpu.speculate([1, 5], GREEDY, 40, forced_sixteenths=20, learned=True, least_match=1)
    assert sum(step.accepted for step in steps[1:9]) == 10  # the first step has no drafts yet
    assert {(step.drafted, step.match) for step in steps[1:9]} == {(3, 0)}  # its own, not the lookup's

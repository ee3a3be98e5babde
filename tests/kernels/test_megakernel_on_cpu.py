"""The decode megakernel, all its SMs at once, run on the CPU (cuda_on_cpu/sm.h): logits, streams, stops; no GPU needed.

Three to eighteen emulated SMs decode models of a layer or two; shared memory and the KV cache start as NaN. Fibers take
turns in a seeded order, so a wait that depends on luck shows as a deadlock or as a different token.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.packed.matrix import Matrix
from kernels.cuda.check import Case, plan_of
from kernels.cuda.drafting import DraftHead
from kernels.cuda.kv_layout import KV_LARGEST, cache_shape, pack_keys, pack_values, unpack_keys, unpack_values
from kernels.cuda.loading import DRAFT_NORMS, sm_tiles_of
from kernels.cuda.megakernel import DeviceSampling, _Parameters
from kernels.cuda.phases import KernelDims, plan_drafter
from kernels.cuda.plan import KV_BLOCK
from kernels.cuda.reference import RandomModel, Reference, draw, random_model
from kernels.cuda.token_ring import TOKEN_ENTRY, Step, read_entries
from tests.fake_cuda import LIBRARY_FLAGS
from tests.kernels.tiling import draft_tiled, tiled

HERE = Path(__file__).parent / "cuda_on_cpu"
SHARED_LIMIT = 150_000
TOLERANCE = 1e-3  # relative, against float32 with a cache of fp16; 5e-4 was the most
pytestmark = [
    pytest.mark.slow,  # ten seconds of g++ and as many of fibers for each
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to run the kernel on the CPU"),
]


class EmulatedGpu:
    """One random model on `sms` emulated multiprocessors."""

    def __init__(
        self,
        build: Path,
        dims: KernelDims,
        case: Case,
        columns: int,
        sms: int,
        context: int = 96,
        tuning: dict[str, int] | None = None,
        drafter: DraftHead | None = None,
        adjust: Callable[[RandomModel], None] = lambda model: None,
        shared_limit: int = SHARED_LIMIT,
    ) -> None:
        self.dims, self.columns, self.drafter = dims, columns, drafter
        self.model = random_model(dims, case.kind, case.group, head=case.head, seed=3)
        adjust(self.model)
        shares = self.shares = plan_of(dims, case, sms, shared_limit, columns, tuning).phases["o"].shares
        drafting = plan_drafter(dims, drafter.dims, drafter.matrices, sms, shares) if drafter else None
        self.plan = plan_of(dims, case, sms, shared_limit, columns, tuning, drafting)
        defines = [f"-D{name}={value}" for name, value in self.plan.constants.items()]
        library = build / "megakernel.so"
        flags = ["-std=c++17", "-O1", *LIBRARY_FLAGS, "-w", f"-I{HERE}", *defines]
        subprocess.run(["g++", *flags, str(HERE / "megakernel.cpp"), "-o", str(library)], check=True)
        self.library = ctypes.CDLL(str(library))
        self._run = self.library.run
        matrices = {name: _packed(name, m) for name, m in self.model.matrices.items()}
        weights = tiled(dims, matrices, sms, shares)
        self._weights, self._embed = _aligned(weights.data), matrices["embed"]
        self._tiles = sm_tiles_of(weights.split)
        vectors = self.model.vectors
        names = [f"layers.{i}.{n}" for i in range(dims.layers) for n in ("attn_norm", "mlp_norm")] + ["final_norm"]
        self._norms = np.concatenate([vectors[n] for n in names])
        heads = [vectors[f"layers.{i}.{n}"] for i in range(dims.layers) for n in ("q_norm", "k_norm") if dims.qk_norm]
        self._head_norms = np.concatenate(heads) if heads else None
        self._frequencies = self.model.inverse_frequencies
        if drafter and drafting:
            self._draft_weights = _aligned(draft_tiled(drafting, drafter.matrices).data)
            self._draft_tiles = sm_tiles_of(drafting.split)
            self._draft_norms = np.concatenate([drafter.vectors[name] for name in DRAFT_NORMS])
        shape = cache_shape(dims.layers + bool(drafter), dims.kv_heads, context + 2 * columns, dims.head_dim)
        self._cache = torch.full(shape, float("nan"), dtype=torch.float16)
        self._host = np.zeros(8 + 2 * (context + 1), np.uint64)
        self._sms, self.context = sms, context

    def step(self, tokens: list[int], position: int, order: int = 0) -> torch.Tensor:
        p, logits = self._parameters(), np.full((self.columns, self.dims.vocab), np.nan, np.float32)
        p.logits = logits.ctypes.data
        p.tokens[: len(tokens)] = tokens
        p.columns, p.position, p.max_tokens = len(tokens), position, 1
        assert self._run(ctypes.byref(p), ctypes.c_uint64(order)) == 0, "deadlock"
        return torch.from_numpy(logits[: len(tokens)])

    def stream(
        self,
        history: list[int],
        way: DeviceSampling,
        count: int,
        stop: tuple[int, ...] = (),
        order: int = 0,
        cancel: bool = False,
        position: int = 0,
    ) -> list[int]:
        p = self._parameters()
        window = history[-way.repeat_window :] if way.repeat_penalty != 1.0 else []
        ids, out = np.array([*stop, *window, 0], np.int32), np.full(count, -1, np.int32)
        logits = np.full(self.dims.vocab, np.nan, np.float32)
        p.stop_ids, p.stop_count = ids.ctypes.data, len(stop)
        p.window_ids, p.window_count, p.window = ids.ctypes.data + 4 * len(stop), len(window), way.repeat_window
        p.ids, p.tokens[0], p.columns, p.position, p.max_tokens = out.ctypes.data, history[-1], 1, position, count
        p.mode, p.draw_index, p.seed = 2 if way.temperature > 0 else 1, len(history), way.seed
        p.temperature, p.top_k, p.top_p, p.min_p = way.temperature, way.top_k, way.top_p, way.min_p
        p.repeat_penalty = way.repeat_penalty
        if p.mode == 2:
            p.logits = logits.ctypes.data
        self._host[:] = 0
        self._host[2] = int(cancel)
        assert self._run(ctypes.byref(p), ctypes.c_uint64(order)) == 0, "deadlock"
        return [int(i) for i in out if i >= 0]

    def speculate(
        self,
        history: list[int],
        way: DeviceSampling,
        count: int,
        stop: tuple[int, ...] = (),
        order: int = 0,
        cancel: bool = False,
        least_match: int = 1,
        most_drafts: int = 7,
        forced_sixteenths: int = 0,
        learned: bool = False,
    ) -> tuple[list[int], list[Step]]:
        """Ids and steps after `history`, of which all but the last token must be in the cache."""
        p, known = self._parameters(), len(history)
        stop_ids, ids = np.array([*stop, 0], np.int32), np.full(known + count + 8, -1, np.int32)
        ids = ids[-(ids.ctypes.data // 4) % 4 :]
        ids[:known] = history
        logits = np.full((self.columns, self.dims.vocab), np.nan, np.float32)
        self.candidates = candidates = np.zeros(self.columns * (self._sms + 1) + self._sms, np.uint64)
        p.stop_ids, p.stop_count, p.ids = stop_ids.ctypes.data, len(stop), ids.ctypes.data
        p.candidates, p.columns, p.position, p.max_tokens = candidates.ctypes.data, self.columns, known - 1, count
        p.mode, p.draw_index, p.seed = 2 if way.temperature > 0 else 1, known, way.seed
        p.temperature, p.top_k, p.top_p, p.min_p = way.temperature, way.top_k, way.top_p, way.min_p
        p.least_match, p.most_drafts, p.forced_sixteenths = least_match, most_drafts, forced_sixteenths
        p.learned = int(learned)
        if p.mode == 2:
            p.logits = logits.ctypes.data
        self._host[:] = 0
        self._host[2] = int(cancel)
        assert self._run(ctypes.byref(p), ctypes.c_uint64(order)) == 0, "deadlock"
        produced, _, steps, taken = read_entries(self._host[8:].view(TOKEN_ENTRY), 0, count)
        assert taken == len(produced)
        assert ids[: known + taken].tolist() == [*history, *produced]
        assert (ids[known + taken : known + count + 4] == -1).all()
        return produced, steps

    def _parameters(self) -> _Parameters:
        def address(array: Any) -> int:
            return 0 if array is None else array.ctypes.data

        p = _Parameters()
        self._scratch = np.zeros(self.plan.scratch_bytes // 4 + 16, np.uint32)
        p.weights, p.tiles = self._weights.data_ptr(), ctypes.addressof(self._tiles)
        p.scratch = -(-address(self._scratch) // 16) * 16
        p.kv, p.norms, p.head_norms = self._cache.data_ptr(), address(self._norms), address(self._head_norms)
        p.inverse_frequencies = address(self._frequencies)
        p.embed_q, p.embed_scale = address(self._embed.q), address(self._embed.scale)
        p.embed_minimum = address(self._embed.minimum)
        p.kv_layer_stride, p.kv_head_stride = self._cache.stride(0), self._cache.stride(1)
        if self.drafter:
            p.draft_weights, p.draft_tiles = self._draft_weights.data_ptr(), ctypes.addressof(self._draft_tiles)
            p.draft_norms, p.draft_ids = address(self._draft_norms), address(self.drafter.target_ids)
            p.draft_frequencies = address(self.drafter.inverse_frequencies)
        base = address(self._host)
        p.host_started, p.host_stop, p.host_report, p.host_tokens = base, base + 16, base + 24, base + 64
        p.repeat_penalty = p.top_p = 1.0
        return p


def _packed(name: str, m: Any) -> Matrix:
    q = m.q.numpy().view(np.uint16) if m.format == "bf16" else m.q.numpy()
    scale, minimum = (None if a is None else a.numpy() for a in (m.scale, m.minimum))
    return Matrix(name, m.format, m.n, m.k, m.group, q, scale, minimum)


def _aligned(data: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty(data.numel() + 128, dtype=torch.uint8)
    start = -buffer.data_ptr() % 128
    buffer[start : start + data.numel()] = data
    return buffer[start : start + data.numel()]


def small(
    hidden: int, heads: int, kv_heads: int, head_dim: int, inner: int, *, layers: int = 2, qk_norm: bool = False
) -> KernelDims:
    multipliers = (3.0, head_dim**-0.5, 0.5, 2.0)
    return KernelDims(hidden, layers, heads, kv_heads, head_dim, inner, 300, 1e-5, qk_norm, True, *multipliers)


SHAPES = {
    1: [
        (small(256, 4, 2, 64, 512), "int4", 128, None, 4, 3),
        (small(192, 3, 1, 128, 320, qk_norm=True), "int4_asymmetric", 32, ("int8", 32), 1, 3),
        (small(192, 3, 3, 64, 384), "bf16", 0, None, 1, 3),
        (small(128, 2, 1, 64, 192), "int4", 64, None, 1, 18),  # most SMs have no tiles of o and down
        (small(576, 9, 3, 64, 640), "int4_asymmetric", 32, ("int8", 32), 8, 5),  # warps stage twice; a part of an item
        (small(512, 8, 2, 64, 1024, layers=1), "int4_asymmetric", 64, None, 1, 3),  # whole words of int4 at once
    ],
    2: [  # SMs to a tile: pairs
        (small(256, 4, 2, 64, 512), "int4", 128, None, 4, 4),
        (small(384, 6, 3, 64, 640, qk_norm=True), "int4_asymmetric", 32, ("int8", 32), 8, 6),  # parts of an item
        (small(128, 2, 1, 64, 4352, layers=1), "bf16", 0, None, 1, 4),  # two chunks of down
        (small(512, 8, 2, 64, 512), "int4", 128, None, 1, 4),  # whole words
        (small(256, 4, 2, 64, 512), "int4", 128, None, 1, 4),  # units of one group
        (small(512, 2, 2, 256, 1024, layers=1), "int8", 64, None, 2, 4),  # four warps share a block's values
        # In the first two pairs, whose tile of o is one, the second SM keeps no rows of the residual.
        (small(128, 2, 1, 64, 256, layers=1), "int4", 64, None, 2, 10),
        (small(128, 6, 1, 64, 256), "int4", 64, None, 8, 2),  # 48 rows of queries for 2 x 16 warps
    ],
}


@pytest.mark.parametrize(
    ("shares", "dims", "kind", "group", "head", "columns", "sms"),
    [(shares, *shape) for shares, shapes in SHAPES.items() for shape in shapes],
)
def test_logits_equal_the_reference(
    tmp_path: Path, shares: int, dims, kind: str, group: int, head, columns: int, sms: int, record_property
):
    gpu = EmulatedGpu(tmp_path, dims, Case(dims, kind, group, head), columns, sms)
    assert gpu.shares == shares
    truth, position, errors = Reference(gpu.model, 128), 0, []
    for m in (1, columns, max(1, columns - 1)):
        tokens = [7 + position + i for i in range(m)]
        logits, expected = gpu.step(tokens, position), truth.step(tokens, position)[0]
        errors.append(float((logits - expected).norm() / expected.norm()))
        position += m
    record_property("worst", max(errors))
    print("relative errors", errors)
    assert max(errors) < TOLERANCE


@pytest.mark.parametrize(
    ("kind", "head", "columns"),
    [("int4", None, 4), ("int4", ("int8", 64), 1), ("int8", ("int4", 64), 2)],
    ids=lambda value: "".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_the_order_of_the_warps_changes_nothing(tmp_path: Path, kind: str, head, columns: int):
    """Where a warp waits only for those that stage what it reads, in the layers, in the head or in both."""
    dims = small(512, 4, 2, 64, 1024, layers=1)
    gpu = EmulatedGpu(tmp_path, dims, Case(dims, kind, 64, head), columns, 4)
    assert gpu.shares == 2
    tokens = [7 + i for i in range(columns)]
    first = gpu.step(tokens, 0)
    for order in (1, 2, 3):
        assert torch.equal(gpu.step(tokens, 0, order), first), order


@pytest.mark.parametrize(
    ("hidden", "head_dim", "columns", "sms"),
    [(128, 256, 8, 6), (128, 128, 1, 10), (512, 64, 1, 12), (512, 128, 1, 12)],  # the last two: items of several heads
)
def test_more_splits_than_a_warp_merges_at_once(tmp_path: Path, hidden: int, head_dim: int, columns: int, sms: int):
    heads = hidden // head_dim if hidden > 128 else 2
    dims, context = small(hidden, heads, 1, head_dim, 128, layers=1), 16 * sms
    gpu = EmulatedGpu(tmp_path, dims, Case(dims, "int4", 64), columns, sms, context, {"BLOCKS_PER_SPLIT": 1})
    truth, tokens = Reference(gpu.model, context), some_tokens(context)
    truth.step(tokens[: context - columns], 0)
    for position in (16, context - columns):  # two splits, and one on every SM
        remember(gpu, truth, position)
        new = tokens[position : position + columns]
        logits, expected = gpu.step(new, position), truth.step(new, position)[0]
        assert (logits - expected).norm() < TOLERANCE * expected.norm(), position


def some_tokens(count: int) -> list[int]:
    return [(7 * i * i + i) % 290 for i in range(count)]


def remember(gpu: EmulatedGpu, truth: Reference, count: int) -> None:
    """Fills the cache with the reference's keys and values of the first `count` positions, and with NaN after them."""
    gpu._cache[:] = float("nan")
    for part, pack in ((truth.keys, pack_keys), (truth.values, pack_values)):
        known = part.clone()
        known[:, :, count:] = float("nan")
        gpu._cache[:, :, : part.shape[2] // KV_BLOCK, int(pack is pack_values)] = pack(known).half()


@pytest.fixture(scope="module")
def replying(tmp_path_factory: pytest.TempPathFactory) -> EmulatedGpu:
    """Two layers of up to ten splits, of one block each; a head that does not repeat the last token."""
    dims, tuning = replace(small(256, 12, 1, 64, 256), tied_head=False), {"PAIRS": 0, "BLOCKS_PER_SPLIT": 1}
    case, folder = Case(dims, "int4_asymmetric", 32), tmp_path_factory.mktemp("replying")
    return EmulatedGpu(folder, dims, case, 1, 10, 160, tuning)


@pytest.mark.parametrize(("order", "first"), [(0, 0), (3, 16), (11, 112)])
def test_a_reply_whose_splits_join_in_one_by_one(replying: EmulatedGpu, order: int, first: int):
    """Twenty tokens, the first after whole blocks, add two splits. Ids hide much; the last layer's keys do not."""
    gpu, prompt, count = replying, some_tokens(first + 1), 20
    truth = Reference(gpu.model, gpu.context)
    if first:
        truth.step(prompt[:-1], 0)
    remember(gpu, truth, first)
    ids = gpu.stream(prompt, DeviceSampling(), count, order=order, position=first)
    assert len(ids) == count
    for position, (token, chosen) in enumerate(zip([prompt[-1], *ids], ids, strict=False), first):
        logits = truth.step([token], position)[0][0]
        assert logits.max() - logits[chosen] < TOLERANCE * logits.abs().max(), position
    new = slice(first, first + count)
    for part, unpack in ((truth.keys, unpack_keys), (truth.values, unpack_values)):
        found = unpack(gpu._cache[:, :, :, int(unpack is unpack_values)], gpu.dims.head_dim)[:, :, new].float()
        assert (found - part[:, :, new]).norm() < TOLERANCE * part[:, :, new].norm()


def test_pairs_read_many_long_heads(tmp_path: Path):
    """Each SM of a pair its own: sixteen heads of 128 dimensions, two to an item; one split, then two."""
    dims = small(256, 32, 4, 128, 256, layers=1)
    gpu = EmulatedGpu(tmp_path, dims, Case(dims, "int4", 128), 1, 8, 32, {"BLOCKS_PER_SPLIT": 1})
    assert gpu.shares == 2
    truth, tokens = Reference(gpu.model, 32), some_tokens(32)
    truth.step(tokens[:-1], 0)
    for position in (0, 16, 30):
        remember(gpu, truth, position)
        first, expected = gpu.step([tokens[position]], position), truth.step([tokens[position]], position)[0]
        assert (first - expected).norm() < TOLERANCE * expected.norm(), position
        for order in (1, 2):
            assert torch.equal(gpu.step([tokens[position]], position, order), first), (position, order)


@pytest.mark.parametrize(
    ("inner", "columns", "tuning", "staging"),  # of down: rounds of a warp, at once, as many for all, in whole items
    [
        (2624, 8, {"PAIRS": 0}, [8, 2, 0, 0]),  # a part of an item, and warps without any
        (8192, 4, {}, [4, 2, 1, 1]),
        (8192, 4, {"STAGE_AHEAD": 0}, [4, 2, 1, 1]),
        (8192, 2, {"PAIRS": 0}, [4, 2, 0, 1]),  # more items than warps: the second column comes before the next place
        (1280, 8, {"PAIRS": 0, "STAGE_LOADS": 2}, [3, 2, 0, 1]),  # 2 + 1, and some warps have no third
        (8192, 2, {}, [2, 2, 1, 1]),
    ],
)
def test_warps_that_stage_several_times(
    tmp_path: Path, inner: int, columns: int, tuning: dict[str, int], staging: list[int]
):
    dims = small(128, 2, 1, 64, inner, layers=1)
    gpu = EmulatedGpu(tmp_path, dims, Case(dims, "int4", 64), columns, 4, tuning=tuning, shared_limit=232448)
    found = (ctypes.c_int * 4)()
    gpu.library.staging_of_down(found)
    assert list(found) == staging
    truth, tokens = Reference(gpu.model, 96), some_tokens(columns)
    logits, expected = gpu.step(tokens, 0), truth.step(tokens, 0)[0]
    assert (logits - expected).norm() < TOLERANCE * expected.norm()
    for order in (1, 2):
        assert torch.equal(gpu.step(tokens, 0, order), logits), order


@pytest.mark.parametrize(
    ("columns", "tuning", "window"),
    [(1, {}, 2), (2, {}, 2), (4, {}, 1), (1, {"STAGES": 3, "PAIRS": 0}, 1)],  # fewer stages than a round of 16 warps
)
def test_many_keys_of_one_split(tmp_path: Path, columns: int, tuning: dict[str, int], window: int):
    """More than sixteen blocks of keys: more stages of them may be in flight than of weights."""
    dims = small(128, 2, 1, 64, 256, layers=2)
    tuning = tuning | {"BLOCKS_PER_SPLIT": 64}
    gpu = EmulatedGpu(tmp_path, dims, Case(dims, "int4", 128), columns, 2, 400, tuning)
    assert int(gpu.plan.constants["KEYS_WINDOW"]) == window
    truth, tokens = Reference(gpu.model, 400), some_tokens(330 + columns)
    truth.step(tokens[:330], 0)
    remember(gpu, truth, 330)
    logits, expected = gpu.step(tokens[330:], 330), truth.step(tokens[330:], 330)[0]
    assert (logits - expected).norm() < TOLERANCE * expected.norm()
    for order in range(1, 6):
        assert torch.equal(gpu.step(tokens[330:], 330, order), logits), order


def test_pairs_may_read_copies_of_several_columns(tmp_path: Path):
    """By default they all read one; here each of the four pairs its own."""
    dims = small(256, 4, 2, 64, 512)
    gpu = EmulatedGpu(tmp_path, dims, Case(dims, "int4", 128), 2, 8, tuning={"HOP_COPIES": 4})
    assert gpu.shares == 2
    truth, tokens = Reference(gpu.model, 96), some_tokens(2)
    logits, expected = gpu.step(tokens, 0), truth.step(tokens, 0)[0]
    assert (logits - expected).norm() < TOLERANCE * expected.norm()
    for order in (1, 2):
        assert torch.equal(gpu.step(tokens, 0, order), logits), order


DIMS = small(256, 4, 2, 64, 512, layers=1)
PAIR = [5, 37]  # two dimensions that a position turns into each other


def scaled(model: RandomModel, name: str, factor: float, rows: slice | list[int] = slice(None)) -> None:
    """Multiplies those rows of every 64: a head's dimensions."""
    scale = model.matrices[f"layers.0.{name}"].scale
    assert scale is not None
    scale.view(-1, 64, scale.shape[1])[:, rows] *= factor


def loud_keys(model: RandomModel) -> None:  # and queries so quiet that the scores stay small
    scaled(model, "k", 2.0**17, PAIR)
    scaled(model, "q", 2.0**-12, PAIR)


def loud_values(model: RandomModel) -> None:
    scaled(model, "v", 2.0**17)
    scaled(model, "o", 2.0**-14)


@pytest.mark.parametrize("loud", [loud_keys, loud_values])
def test_what_fp16_cannot_hold_is_saturated(tmp_path: Path, loud: Callable[[RandomModel], None]):
    gpu = EmulatedGpu(tmp_path, DIMS, Case(DIMS, "int4", 64), 2, 3, adjust=loud)
    truth, exact = Reference(gpu.model, 96), Reference(gpu.model, 96, cache_dtype=torch.float32)
    apart = 0.0
    for position in range(0, 20, 2):  # the tail, and a block of the cache
        tokens = [7 + position, 8 + position]
        logits, expected = gpu.step(tokens, position), truth.step(tokens, position)[0]
        assert (logits - expected).norm() < TOLERANCE * expected.norm(), position
        apart = max(apart, float((exact.step(tokens, position)[0] - expected).norm() / expected.norm()))
    assert apart > 10 * TOLERANCE
    stored = gpu._cache[0, :, :2, 0 if loud is loud_keys else 1]
    assert stored.isfinite().sum() == 2 * 20 * 64
    assert (stored.abs() == KV_LARGEST).sum() > 20


def test_queries_that_fp16_cannot_hold_are_saturated(tmp_path: Path):
    gpu = EmulatedGpu(tmp_path, DIMS, Case(DIMS, "int4", 64), 2, 3, adjust=lambda m: scaled(m, "q", 2.0**20))
    expected = Reference(gpu.model, 96).step([7], 0)[0]
    logits = gpu.step([7], 0)  # there is but one position to attend to
    assert (logits - expected).norm() < TOLERANCE * expected.norm()
    assert gpu.step([8, 9], 1).isfinite().all()


def test_a_word_keeps_nan_and_rounds_the_rest(tmp_path: Path):
    word = EmulatedGpu(tmp_path, DIMS, Case(DIMS, "int4", 64), 1, 3).library.word_and_back
    word.restype = ctypes.c_uint32

    def back(bits: int) -> float:
        return float(np.uint32(word(ctypes.c_uint32(bits), 3)).view(np.float32))

    for nan in (0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001):  # the first is a GPU's
        assert np.isnan(back(nan)), hex(nan)
    for value in (0.0, -0.0, 1.0, -3.25, 1e30, -1e-30, np.inf, -np.inf, np.pi, -np.e):
        found = back(int(np.float32(value).view(np.uint32)))
        assert found == np.float32(value) or abs(found / value - 1) < 2**-15, value


@pytest.mark.parametrize("name", ["k", "v"])
def test_nan_stays_nan_in_the_cache(tmp_path: Path, name: str):
    gpu = EmulatedGpu(tmp_path, DIMS, Case(DIMS, "int4", 64), 1, 3, adjust=lambda m: scaled(m, name, torch.nan, PAIR))
    gpu._cache[:] = 0
    assert gpu.step([7], 0).isnan().all()
    keys, values = unpack_keys(gpu._cache[0, :, :, 0], 64), unpack_values(gpu._cache[0, :, :, 1], 64)
    broken = torch.zeros_like(keys, dtype=torch.bool)
    broken[:, 0, PAIR] = True
    assert torch.equal(keys.isnan(), broken & (name == "k"))
    assert torch.equal(values.isnan(), broken & (name == "v"))


def test_streams_draw_as_the_reference_and_stop_where_told(tmp_path: Path):
    dims = small(256, 4, 2, 64, 512, layers=1)
    gpu, history = EmulatedGpu(tmp_path, dims, Case(dims, "int4", 64), 1, 3), [4, 9]
    way = DeviceSampling(1.2, top_k=20, top_p=0.9, min_p=0.01, repeat_penalty=1.2, repeat_window=4, seed=5)
    ids = gpu.stream(history, way, 8)
    assert gpu.stream(history, way, 8, order=7) == ids
    assert gpu.stream(history, way, 8, stop=(ids[3],), order=3) == ids[: ids.index(ids[3]) + 1]
    assert len(gpu.stream(history, DeviceSampling(), 40, cancel=True)) < 4
    for position, token in enumerate(ids):
        expected, distance = draw(gpu.step([history[-1]], position)[0], way, history)
        assert expected == token or distance < 1e-5
        history.append(token)

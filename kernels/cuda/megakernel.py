"""The door to the decode megakernel: weights in, tokens out."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.build import CUDA_DIRECTORY, KernelReport, architecture, compile_cubin
from kernels.cuda import plan as planning
from kernels.cuda.drafting import DraftCache, DraftHead, dequantised_rows
from kernels.cuda.driver import CudaError, Driver, Kernel, MappedMemory, Module
from kernels.cuda.kv_layout import cache_shape
from kernels.cuda.loading import DeviceDrafter, load_drafter, load_weights
from kernels.cuda.phases import (
    TILE_ROWS,
    Drafting,
    KernelDims,
    StoredMatrix,
    Unsupported,
    phases_of,
    plan_drafter,
    shares_of,
    split_tiles,
)
from kernels.cuda.plan import Plan
from kernels.cuda.tiles import TiledWeights
from kernels.cuda.token_ring import TOKEN_ENTRY, KernelStopped, TokenRing

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceSampling", "KernelDims", "Megakernel", "Unsupported"]

PROFILE_SLOTS = 32
PROFILE_NAMES = {
    0: "qkv receive, stage",
    2: "qkv multiply",
    3: "qkv sum, publish",
    4: "attention receive",
    5: "attention keys",
    6: "attention merge",
    8: "o receive, stage",
    10: "o multiply",
    11: "o sum, publish",
    12: "gate_up receive, stage",
    14: "gate_up multiply",
    15: "gate_up sum, publish",
    16: "down receive, stage",
    18: "down multiply",
    19: "down sum, publish",
    20: "head receive, stage",
    22: "head multiply",
    23: "head sum, publish",
    25: "choose token",  # and look up the next drafts
    26: "producer awaits room",
    27: "producer awaits window",
    28: "producer issues",
    29: "producer stages",
}
PLACES, STEPS_A_PLACE = 12, 6  # see Megakernel.settle
_MODE_STEP, _MODE_GREEDY, _MODE_SAMPLE = 0, 1, 2
_POINTER = ctypes.c_uint64


@dataclass(frozen=True)
class DeviceSampling:
    """engine.sampling.Sampling's fields, for the device."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_window: int = 64
    seed: int = 0


class _Parameters(ctypes.Structure):
    """struct Parameters of context.cuh."""

    _fields_ = [
        *[(name, _POINTER) for name in ("weights", "tiles", "scratch", "kv", "norms", "head_norms")],
        *[(name, _POINTER) for name in ("inverse_frequencies", "embed_q", "embed_scale", "embed_minimum", "logits")],
        *[(name, _POINTER) for name in ("features", "feature_slot", "stop_ids", "window_ids", "ids")],
        *[(name, _POINTER) for name in ("host_tokens", "host_stop", "host_report", "host_started", "profile")],
        ("candidates", _POINTER),
        ("kv_layer_stride", ctypes.c_int64),
        ("kv_head_stride", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("tokens", ctypes.c_int32 * 8),
        *[(name, ctypes.c_int32) for name in ("columns", "position", "max_tokens", "mode")],
        *[(name, ctypes.c_int32) for name in ("stop_count", "window_count", "window", "draw_index", "top_k")],
        *[(name, ctypes.c_float) for name in ("temperature", "top_p", "min_p", "repeat_penalty")],
        *[(name, ctypes.c_int32) for name in ("least_match", "most_drafts", "forced_sixteenths", "learned")],
        *[(name, _POINTER) for name in ("draft_weights", "draft_tiles", "draft_norms")],
        *[(name, _POINTER) for name in ("draft_frequencies", "draft_ids")],
    ]


class Megakernel:
    """One model on one GPU, with its KV cache.

    dims: the shape. matrices: by packed name ("embed", "layers.0.q", ..., "head" unless tied); arrays in host memory or
    tensors on the device. vectors: float32 norms by packed name. inverse_frequencies: float32 [head_dim / 2].
    context_size: positions of the KV cache. columns: the largest M of `step`, up to 8. room_for_drafter: whether the
    cache has a layer more, for `hold_drafter`. cubin_cache: where compiled kernels are kept. tuning: see
    plan.make_plan.

    Raises phases.Unsupported for a shape or format that it does not decode, CompileError, CudaError.
    """

    kv_cache: torch.Tensor  # fp16, shape and order in kv_layout.py; prefill writes it

    def __init__(
        self,
        dims: KernelDims,
        matrices: Mapping[str, StoredMatrix],
        vectors: Mapping[str, Any],
        inverse_frequencies: np.ndarray,
        context_size: int,
        *,
        columns: int = planning.MAX_COLUMNS,
        room_for_drafter: bool = False,
        cubin_cache: Path | None = None,
        progress: Callable[[str], None] | None = None,
        tuning: Mapping[str, int] | None = None,
    ) -> None:
        import torch

        self._torch, self.dims, self.context_size, self.columns = torch, dims, context_size, columns
        self._driver = Driver()
        self._gpu = self._driver.gpu()
        self._cache, self._progress, self._tuning = cubin_cache, progress, dict(tuning or {})
        self._matrices_embed = matrices["embed"]
        clusters = self._gpu.clusters and self._tuning.get("PAIRS", 1) > 0
        self._shares = shares_of(dims, matrices, self._gpu.sm_count, clusters)
        self.phases = phases_of(dims, matrices, self._shares)
        self.split = split_tiles(self.phases, dims.layers, self._gpu.sm_count)
        self._kernels: dict[tuple[int, bool], tuple[Kernel, Plan]] = {}  # by columns, and whether it holds the drafter
        self._reports: dict[tuple[int, bool], tuple[KernelReport, ...]] = {}
        self._device = torch.device("cuda", 0)
        self._loaded = load_weights(
            dims,
            matrices,
            vectors,
            inverse_frequencies,
            self.phases,
            self.split,
            self._driver,
            self._device,
            cubin_cache,
            progress,
        )
        self._drafting: dict[int, Drafting] = {}  # by columns, for those kernels that hold the drafter
        self._drafter: DeviceDrafter | None = None
        # A step of the speculative loop writes all its columns, used or not, also at the context's end; a drafter runs
        # ahead of it by as many.
        positions = context_size + columns - 1 + (columns if room_for_drafter else 0)
        shape = cache_shape(dims.layers + room_for_drafter, dims.kv_heads, positions, dims.head_dim)
        self.kv_cache = torch.zeros(shape, dtype=torch.float16, device=self._device)
        self._open_host_memory()
        self._buffers: dict[str, Any] = {}
        self._hops: dict[tuple[int, int], torch.Tensor] = {}  # by columns and bytes

    # ---- the public calls

    @property
    def weight_bytes(self) -> dict[str, int]:
        """Bytes that one step reads of each kind of tensor (as in engine's ByteLedger), padding included."""
        d, kv = self.dims, self.dims.kv_heads * self.dims.head_dim

        def rows(phase: str, n: int) -> int:
            return -(-n // TILE_ROWS) * self.phases[phase].shares * self.phases[phase].tile_bytes

        layer = {
            "q": rows("qkv", d.heads * d.head_dim),
            "k": rows("qkv", kv),
            "v": rows("qkv", kv),
            "o": rows("o", d.hidden),
            "gate": rows("gate_up", d.intermediate),
            "up": rows("gate_up", d.intermediate),
            "down": rows("down", d.hidden),
            "norm": 4 * (2 * d.hidden + (2 * d.head_dim if d.qk_norm else 0)),
        }
        total = {name: size * d.layers for name, size in layer.items()}
        total["norm"] += 4 * d.hidden
        total["head"] = rows("head", d.vocab)
        total["embed"] = int(sum(_nbytes(a) for a in self._loaded.embedding if a is not None)) // d.vocab
        return total

    def widths(self) -> list[int]:
        """Which M of 1, 2, 4 and 8 (up to `columns`) fit this GPU's shared memory; a step takes the next wider one.

        Raises Unsupported where not even one token fits."""
        found: list[int] = []
        for columns in (1, 2, 4, 8):
            try:
                if columns <= self.columns:
                    self._plan(columns)
                    found.append(columns)
            except Unsupported:
                if not found:
                    raise
        return found

    def hold_drafter(self, head: DraftHead) -> DraftCache:
        """From now on the speculative loops can draft with `head`, at the `draft_widths`; its keys and values, for the
        caller to fill outside of loops. Raises Unsupported where no width has room for it."""
        if self.kv_cache.shape[0] == self.dims.layers:
            raise Unsupported("the KV cache was opened without a layer for a drafter")
        drafting = plan_drafter(self.dims, head.dims, head.matrices, self._gpu.sm_count, self._shares)
        held: dict[int, Drafting] = {}
        refused: Unsupported | None = None
        for columns in self.widths()[1:]:
            try:
                self._plan(columns, drafting)
                held[columns] = drafting
            except Unsupported as error:
                refused = error
        if not held:
            raise refused or Unsupported("a speculative loop does not fit this GPU")

        def embed(ids: torch.Tensor) -> torch.Tensor:
            table = self._matrices_embed
            q, scale, minimum = (None if part is None else part[ids] for part in self._loaded.embedding)
            rows = dequantised_rows(str(table.format), table.group, q, scale, minimum)
            return rows * self.dims.embedding_multiplier

        drafter = load_drafter(head, drafting, self._loaded.retile, self._device)
        cache = DraftCache(head, embed, self.kv_cache[-1])
        self._drafter, self._drafting = drafter, held
        self._kernels = {key: found for key, found in self._kernels.items() if not key[1]}
        return cache

    @property
    def draft_widths(self) -> tuple[int, ...]:
        """Columns of the loops in which a held drafter can draft."""
        return tuple(self._drafting)

    def draft_bytes(self, passes: int) -> int:
        """Bytes of its weights that a held drafter reads in a step with that many passes."""
        if self._drafter is None:
            return 0
        sizes = {name: phase.total_bytes for name, phase in self._drafter.tiled.phases.items()}
        return sizes["fc"] + passes * (sum(sizes.values()) - sizes["fc"])

    @property
    def tiled_weights(self) -> TiledWeights:
        """The weights as the kernel streams them, for other kernels to read."""
        return self._loaded.tiled

    @property
    def embedding(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Values, scales and minima of the embedding, as packed, on the device."""
        return self._loaded.embedding

    def step(
        self, tokens: Sequence[int], position: int, *, all_logits: bool = True, features: Sequence[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Feed M = len(tokens) <= columns tokens at `position`.

        Returns device float32 logits [M, vocab] (or [1, vocab], the last row's) and, for each layer index in
        `features`, the residual stream entering it, float32 [M, hidden]. Enqueued on torch's current stream.
        """
        torch, m = self._torch, len(tokens)
        if not 1 <= m <= self.columns:
            raise ValueError(f"{m} tokens in a step of 1 to {self.columns}")
        if position < 0 or position + m > self.context_size:
            raise ValueError(f"positions {position} to {position + m} of {self.context_size}")
        width = next(c for c in (1, 2, 4, 8) if c >= m)
        kernel, plan = self._kernel(width)
        logits = torch.empty((width, self.dims.vocab), dtype=torch.float32, device=self._device)
        p = self._parameters(plan)
        p.logits = logits.data_ptr()
        taken: dict[int, torch.Tensor] = {}
        if features:
            slots = torch.full((self.dims.layers + 1,), -1, dtype=torch.int32)
            for slot, layer in enumerate(features):
                slots[layer] = slot
            slots = slots.to(self._device)
            out = torch.empty((len(features), width, self.dims.hidden), dtype=torch.float32, device=self._device)
            p.features, p.feature_slot = out.data_ptr(), slots.data_ptr()
            taken = {layer: out[slot, :m] for slot, layer in enumerate(features)}
        p.tokens[:m] = list(tokens)
        p.columns, p.position, p.mode, p.max_tokens = m, position, _MODE_STEP, 1
        self._launch(kernel, plan, p)
        return (logits[:m] if all_logits else logits[m - 1 : m]), taken

    def stream(
        self,
        token: int,
        position: int,
        sampling: DeviceSampling,
        max_tokens: int,
        stop_ids: Sequence[int],
        history: Sequence[int],
    ) -> TokenRing:
        """Feed `token` at `position`, sample, feed the sample, and so on, up to `max_tokens` tokens.

        history: every token up to and including `token`; its length is the index of the first draw.
        """
        torch = self._torch
        max_tokens = self._room(position, max_tokens)
        kernel, plan = self._kernel(1)
        p = self._loop_parameters(plan, sampling, position, max_tokens, len(history))
        window = list(history[-sampling.repeat_window :]) if _penalises(sampling) else []
        ids = torch.tensor([*stop_ids, *window, 0], dtype=torch.int32).to(self._device)
        produced = torch.empty(max_tokens, dtype=torch.int32, device=self._device)
        self._buffers["stream"] = (ids, produced)
        p.stop_ids, p.stop_count = ids.data_ptr(), len(stop_ids)
        p.window_ids, p.window_count = ids.data_ptr() + 4 * len(stop_ids), len(window)
        p.window = sampling.repeat_window
        p.ids = produced.data_ptr()
        p.tokens[0] = token
        p.repeat_penalty = sampling.repeat_penalty if window else 1.0
        return self._start_loop(kernel, plan, p)

    def stream_speculative(
        self,
        position: int,
        sampling: DeviceSampling,
        max_tokens: int,
        stop_ids: Sequence[int],
        history: Sequence[int],
        *,
        columns: int,
        least_match: int = 1,
        most_drafts: int = planning.MAX_COLUMNS - 1,
        learned: bool = False,
        forced_sixteenths: int = 0,
    ) -> TokenRing:
        """`stream` of the last token of `history`, verifying up to columns - 1 (or most_drafts) drafts a step.

        The tokens are those of `stream`; drafts come from the history by prompt lookup (speculate.cuh), where at least
        `least_match` tokens of its end occur again. columns: one of `widths`, above 1; a step costs what that many
        columns cost, with drafts or without. learned: where the lookup finds less, the held drafter drafts, whose rows
        of all tokens before `position` must be written; afterwards, those of all tokens fed are. forced_sixteenths:
        with tuning FORCED_ACCEPTANCE, the drafts of 16 steps that are taken for right. Raises ValueError for a repeat
        penalty, which changes from column to column.
        """
        torch, known = self._torch, len(history)
        if _penalises(sampling):
            raise ValueError("the speculative loop knows no repeat penalty")
        if columns not in (2, 4, 8) or columns > self.columns:
            raise ValueError(f"a speculative loop of {columns} columns")
        if learned and columns not in self._drafting:
            raise ValueError(f"no drafter in a loop of {columns} columns")
        max_tokens = self._room(position, max_tokens)
        if known + max_tokens >= planning.MOST_HISTORY:
            raise ValueError(f"a history of {known} and {max_tokens} more tokens: indices have 20 bits")
        kernel, plan = self._kernel(columns, learned)
        p = self._loop_parameters(plan, sampling, position, max_tokens, known)
        ids = torch.zeros(known + max_tokens + 4, dtype=torch.int32, device=self._device)  # it is read four at a time
        ids[:known] = torch.from_numpy(np.asarray(history, dtype=np.int32)).to(self._device)
        stop = torch.tensor([*stop_ids, 0], dtype=torch.int32).to(self._device)
        candidates = torch.zeros(columns * (plan.sms + 1) + plan.sms, dtype=torch.int64, device=self._device)
        self._buffers["stream"] = (ids, stop, candidates)
        p.ids, p.stop_ids, p.stop_count = ids.data_ptr(), stop.data_ptr(), len(stop_ids)
        p.candidates, p.least_match, p.most_drafts = candidates.data_ptr(), least_match, most_drafts
        p.forced_sixteenths, p.learned = forced_sixteenths, int(learned)
        return self._start_loop(kernel, plan, p)

    def _room(self, position: int, max_tokens: int) -> int:
        room = min(max_tokens, self.context_size - position)
        if room < 1 or position < 0:
            raise ValueError(f"no room for a token at position {position} of {self.context_size}")
        return room

    def _loop_parameters(
        self, plan: Plan, sampling: DeviceSampling, position: int, max_tokens: int, known: int
    ) -> _Parameters:
        p = self._parameters(plan)
        p.columns, p.position, p.max_tokens = plan.columns, position, max_tokens
        p.mode = _MODE_SAMPLE if sampling.temperature > 0 else _MODE_GREEDY
        p.draw_index, p.seed = known, sampling.seed
        p.temperature, p.top_k = sampling.temperature, sampling.top_k
        p.top_p, p.min_p = sampling.top_p, sampling.min_p
        if p.mode == _MODE_SAMPLE:
            shape = (plan.columns, self.dims.vocab)
            self._buffers["logits"] = self._torch.empty(shape, dtype=self._torch.float32, device=self._device)
            p.logits = self._buffers["logits"].data_ptr()
        return p

    def _start_loop(self, kernel: Kernel, plan: Plan, p: _Parameters) -> TokenRing:
        self._host_tokens["step"][: p.max_tokens] = 0
        self._host_control[:] = 0
        self._launch(kernel, plan, p)
        finished = self._torch.cuda.Event()
        finished.record()
        return TokenRing(self, p.max_tokens, finished)

    def profile(self) -> dict[str, tuple[float, float, float]]:
        """After a launch with tuning PROFILE: clocks of the first warp, by part: (mean, least, most) over the SMs."""
        clocks = self._buffers["profile"].cpu().numpy()
        return {
            name: (float(clocks[:, i].mean()), float(clocks[:, i].min()), float(clocks[:, i].max()))
            for i, name in PROFILE_NAMES.items()
        }

    def compile(self, columns: int, learned: bool = False) -> Plan:
        """Compile and load the kernel of that many columns now, not in the middle of a reply; its plan. learned: the
        one that holds the drafter."""
        return self._kernel(columns, learned)[1]

    def settle(self) -> list[float]:
        """Keep the hops' buffers of single passes where they are fastest; seconds a pass at each of PLACES places.

        Where in memory they lie decides over 3 % of one (H200), and nothing but trying tells; steps of several tokens
        have not been seen to gain by it. Overwrites one position of the cache, so it is for a cache that holds nothing
        yet. Takes 84 passes.

        Raises driver.NotResident, token_ring.KernelStopped.
        """
        torch, plan = self._torch, self.compile(1)
        position = min(1024, self.context_size) - 1
        events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS_A_PLACE + 1)]
        places, seconds = [], []
        for _ in range(PLACES):
            places.append(torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=self._device))
            self._hops[1, plan.scratch_bytes] = places[-1]
            for event in events:
                self.step([0], position)
                event.record()
            with contextlib.suppress(torch.AcceleratorError):  # what the kernel has reported says more
                events[-1].synchronize()
            self._raise_if_stopped()
            spans = [begin.elapsed_time(end) * 1e-3 for begin, end in itertools.pairwise(events)]
            seconds.append(statistics.median(spans))
        self._hops[1, plan.scratch_bytes] = places[seconds.index(min(seconds))]
        return seconds

    def registers(self, columns: int, learned: bool = False) -> tuple[int, int] | None:
        """Registers and bytes of spills of the kernel of that many columns; None where ptxas' report is not at hand."""
        self._kernel(columns, learned)
        found = [r for r in self._reports[columns, learned] if r.name == "megakernel"]
        return (found[0].registers, found[0].spills) if found else None

    def close(self) -> None:
        """Release the device memory. Idempotent."""
        for name in ("kv_cache", "_loaded", "_drafter", "_hops"):
            if hasattr(self, name):
                delattr(self, name)
        self._buffers.clear()
        self._kernels.clear()
        if hasattr(self, "_host"):
            del self._host_tokens, self._host_control
            self._host.close()
            del self._host

    # ---- launching

    def _kernel(self, columns: int, learned: bool = False) -> tuple[Kernel, Plan]:
        key = columns, learned
        if key not in self._kernels:
            gpu, plan = self._gpu, self._plan(columns, self._drafting[columns] if learned else None)
            cubin = compile_cubin(
                CUDA_DIRECTORY / "megakernel.cu",
                arch=architecture(gpu.capability),
                defines=plan.constants,
                cache=self._cache,
                driver_version=gpu.driver_version,
                progress=self._progress,
            )
            kernel = Module(self._driver, cubin.code).kernel("megakernel")
            kernel.allow_shared(plan.shared_bytes)
            if not kernel.blocks_per_sm(plan.threads, plan.shared_bytes):
                raise Unsupported(f"a block of {plan.shared_bytes} bytes of shared memory cannot be resident")
            self._kernels[key] = kernel, plan
            self._reports[key] = cubin.reports
        return self._kernels[key]

    def _plan(self, columns: int, drafting: Drafting | None = None) -> Plan:
        return planning.make_plan(
            self.dims,
            self.phases,
            self.split,
            self._gpu.sm_count,
            self._gpu.shared_per_block,
            columns,
            self._matrices_embed,
            self._tuning,
            drafting,
        )

    def _parameters(self, plan: Plan) -> _Parameters:
        torch, p = self._torch, _Parameters()
        w = self._loaded
        p.weights, p.tiles, p.scratch = w.tiled.data.data_ptr(), w.sm_tiles.data_ptr(), self._hops_of(plan).data_ptr()
        p.kv, p.norms = self.kv_cache.data_ptr(), w.norms.data_ptr()
        p.head_norms = w.head_norms.data_ptr() if w.head_norms is not None else 0
        p.inverse_frequencies = w.frequencies.data_ptr()
        p.embed_q, p.embed_scale, p.embed_minimum = (a.data_ptr() if a is not None else 0 for a in w.embedding)
        if (drafter := self._drafter) is not None:
            p.draft_weights, p.draft_tiles = drafter.tiled.data.data_ptr(), drafter.sm_tiles.data_ptr()
            p.draft_norms, p.draft_ids = drafter.norms.data_ptr(), drafter.target_ids.data_ptr()
            p.draft_frequencies = drafter.frequencies.data_ptr()
        p.kv_layer_stride, p.kv_head_stride = self.kv_cache.stride(0), self.kv_cache.stride(1)
        base = self._host.device
        p.host_started, p.host_stop, p.host_report, p.host_tokens = base, base + 16, base + 24, base + 64
        p.repeat_penalty, p.temperature, p.top_p = 1.0, 0.0, 1.0
        if self._tuning.get("PROFILE"):
            self._buffers["profile"] = torch.zeros(
                (self._gpu.sm_count, PROFILE_SLOTS), dtype=torch.int64, device=self._device
            )
            p.profile = self._buffers["profile"].data_ptr()
        return p

    def _hops_of(self, plan: Plan) -> torch.Tensor:
        key = plan.columns, plan.scratch_bytes
        if key not in self._hops:
            self._hops[key] = self._torch.empty(plan.scratch_bytes, dtype=self._torch.uint8, device=self._device)
        return self._hops[key]

    def _launch(self, kernel: Kernel, plan: Plan, p: _Parameters) -> None:
        self._hops_of(plan).zero_()
        stream = self._torch.cuda.current_stream().cuda_stream
        kernel.launch(plan.sms, plan.threads, [p], shared=plan.shared_bytes, stream=stream, cooperative=True)

    def _raise_if_stopped(self) -> None:
        report = int(self._host_control[3]) & 0xFFFFFFFF
        if report:
            raise KernelStopped(f"the kernel stopped waiting (wait {report & 0xFF}, block {report >> 8 & 0x7FFFFF})")
        try:
            self._driver.synchronize()
        except CudaError as error:
            raise KernelStopped(str(error)) from error

    def _open_host_memory(self) -> None:
        # | started u32, pad, clock u64 | stop u64 | report u64 | pad to 64 | one entry a token |
        self._host = MappedMemory(self._driver, 64 + TOKEN_ENTRY.itemsize * (self.context_size + 1))
        self._host_control = np.frombuffer(self._host.view[:32], dtype=np.uint64)
        self._host_tokens = np.frombuffer(self._host.view[64:], dtype=TOKEN_ENTRY)


def _penalises(sampling: DeviceSampling) -> bool:
    return sampling.repeat_penalty != 1.0 and sampling.repeat_window > 0


def _nbytes(tensor: Any) -> int:
    return tensor.numel() * tensor.element_size()

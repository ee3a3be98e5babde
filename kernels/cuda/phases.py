"""How one model is cut over one GPU: the phases' geometry, and which SM reads which rows.

A layer is four matrix phases (qkv, o, gate_up, down) and the head is a fifth. A phase's rows are cut into tiles of 16
rows. Where the GPU has clusters, two SMs share the tiles of a layer: each multiplies one half of K, so that each stages
half of the activations. A tile of the head belongs to one SM over all of K. K is cut into units, what one warp
multiplies at a time; a unit is one contiguous piece of memory (drawn in gemv.cuh). gate_up tiles hold 8 gate rows, then
their 8 up rows. A learned drafter (draft_head.cuh) is one more layer and head of the same kind in a stream of its own,
behind a phase "fc".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

TILE_ROWS = 16
BLOCK_K = 64  # K that the 32 lanes hold in one step: 16 consecutive bytes a lane in int4
CHUNK_K = 4096  # most K whose activations are staged at once for many columns


class Unsupported(ValueError):
    """A shape or a format that the megakernel does not decode; `str(error)` says which."""


@dataclass(frozen=True)
class KernelDims:
    """The shape and scalars of a model (engine.config.ModelConfig's, without what a kernel does not need)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rms_norm_eps: float
    qk_norm: bool
    tied_head: bool
    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float

    @property
    def qkv_rows(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


class StoredMatrix(Protocol):
    """A weight matrix [n, k] as engine/packed/model.py stores it."""

    @property
    def format(self) -> Any: ...  # "int4", "int8" or "bf16"
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def q(self) -> Any: ...
    @property
    def scale(self) -> Any: ...
    @property
    def minimum(self) -> Any: ...


@dataclass(frozen=True)
class DraftDims:
    """The shape of a learned drafter, where the target's does not say it already.

    feature_layers: the target's layers whose entering residual streams it reads (layers: what leaves the last one).
    """

    intermediate: int
    vocab: int
    feature_layers: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float


FORMAT_CODES = {"int4": 0, "int4_asymmetric": 1, "int8": 2, "bf16": 3}
BLOCK_BYTES = {"int4": 512, "int4_asymmetric": 512, "int8": 1024, "bf16": 2048}  # of 16 rows x 64


def format_of(matrix: StoredMatrix) -> str:
    return "int4_asymmetric" if matrix.format == "int4" and matrix.minimum is not None else str(matrix.format)


@dataclass(frozen=True)
class Phase:
    """One matrix phase. Bytes are those of the tiled copy on the device, scales included."""

    name: str
    k: int
    rows: int  # of the phase's output, before padding to whole tiles
    tiles: int
    format: str
    group: int  # 0 for bf16
    chunks: int  # pieces of an SM's part of K whose units follow one another in memory
    apart: bool = False  # the chunks' activations have scales of their own: they are staged and summed one by one
    shares: int = 1  # SMs that share K: each has one stretch of it or, if the chunks are apart, of each chunk

    @property
    def own_k(self) -> int:
        """K that one SM multiplies."""
        return self.k // self.shares

    @property
    def blocks(self) -> int:
        """Blocks of 64 along K in one SM's part of one chunk."""
        return self.own_k // BLOCK_K // self.chunks

    @property
    def unit_blocks(self) -> int:
        """Blocks of one unit: the divisor of `blocks` that brings a unit nearest to 2 KB and holds whole groups."""
        want = max(1, 2048 // BLOCK_BYTES[self.format])
        step = max(1, self.group // BLOCK_K)
        fitting = [d for d in range(step, want + 1) if self.blocks % d == 0 and d % step == 0]
        if not fitting:
            raise Unsupported(f"{self.name}: K = {self.k} in groups of {self.group}")
        return fitting[-1]

    @property
    def units(self) -> int:
        """Units of one SM's part of a tile in one chunk."""
        return self.blocks // self.unit_blocks

    @property
    def unit_bytes(self) -> int:
        scale_bytes = 0
        if self.group:
            groups = self.unit_blocks * BLOCK_K // self.group
            scale_bytes = groups * 2 * TILE_ROWS * (2 if self.format == "int4_asymmetric" else 1)
        return self.unit_blocks * BLOCK_BYTES[self.format] + scale_bytes

    @property
    def tile_bytes(self) -> int:
        """Bytes of one SM's part of a tile."""
        return self.chunks * self.units * self.unit_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all tiles, all SMs' parts of them, in one layer."""
        return self.tiles * self.shares * self.tile_bytes

    def units_per_stage(self, stage_bytes: int, warps: int) -> int:
        """A divisor of the consumer warps, so that a round of all warps is whole stages."""
        return max(d for d in range(1, warps + 1) if warps % d == 0 and (d == 1 or d * self.unit_bytes <= stage_bytes))

    @property
    def x_bytes(self) -> int:
        """Bytes of one staged activation value of one column (high and low part together)."""
        return 4 if self.format == "bf16" else 2


PHASES = ("qkv", "o", "gate_up", "down", "head")
DRAFT_PHASES = ("fc", *PHASES)  # in the order in which they are streamed


def tiles_index(phase: str) -> int:
    """Where a row of Split keeps a phase. fc's rows are o's, of the same owners."""
    return PHASES.index("o" if phase == "fc" else phase)


def shares_of(dims: KernelDims, matrices: Mapping[str, StoredMatrix], sms: int, clusters: bool) -> int:
    """How many SMs of a GPU are to share the tiles of a layer: two, where it has clusters and K can be halved."""
    if not clusters or sms % 2 or 2 * dims.kv_heads > sms:
        return 1
    try:
        phases_of(dims, matrices, 2)
    except Unsupported:
        return 1
    return 2


def phases_of(dims: KernelDims, matrices: Mapping[str, StoredMatrix], shares: int = 1) -> dict[str, Phase]:
    """The five phases, from the matrices of layer 0; checks that every layer and every part agrees. shares: SMs among
    which the K of a layer's phases is divided. Raises Unsupported."""
    head = "embed" if dims.tied_head else "head"
    parts = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
    names = {phase: [f"layers.{i}.{p}" for i in range(dims.layers) for p in parts[phase]] for phase in parts}
    names["head"] = [head]
    sizes = {
        "qkv": (dims.qkv_rows, dims.hidden),
        "o": (dims.hidden, dims.heads * dims.head_dim),
        "gate_up": (2 * dims.intermediate, dims.hidden),
        "down": (dims.hidden, dims.intermediate),
        "head": (dims.vocab, dims.hidden),
    }
    if shares > 1 and dims.heads % shares:
        raise Unsupported(f"{dims.heads} heads for {shares} multiprocessors")
    # down has the widest input; the others' are at most a few thousand channels
    return {
        name: _phase(
            name, names[name], matrices, *sizes[name], wide=name == "down", shares=1 if name == "head" else shares
        )
        for name in PHASES
    }


def draft_matrix_sizes(dims: KernelDims, draft: DraftDims) -> dict[str, tuple[int, int]]:
    """Rows and input channels of the matrices of a learned drafter for a model of shape `dims`, by name."""
    hidden, queries, keys = dims.hidden, dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    return {
        "fc": (hidden, len(draft.feature_layers) * hidden),
        "q": (queries, 2 * hidden),
        "k": (keys, 2 * hidden),
        "v": (keys, 2 * hidden),
        "o": (hidden, queries),
        "gate": (draft.intermediate, hidden),
        "up": (draft.intermediate, hidden),
        "down": (hidden, draft.intermediate),
        "head": (draft.vocab, hidden),
    }


def draft_phases(
    dims: KernelDims, draft: DraftDims, matrices: Mapping[str, StoredMatrix], sms: int, shares: int = 1
) -> dict[str, Phase]:
    """The phases of a learned drafter for a model of shape `dims`, from its matrices, named as in draft_matrix_sizes.
    shares: the model's. Raises Unsupported."""
    own, epsilon = (draft.heads, draft.kv_heads, draft.head_dim), draft.rms_norm_eps
    same = math.isclose(epsilon, dims.rms_norm_eps, rel_tol=1e-4)  # a GGUF file has it in single precision
    if own != (dims.heads, dims.kv_heads, dims.head_dim) or not same:
        raise Unsupported(f"a drafter's heads {own} and epsilon {epsilon} are not the model's")
    read = draft.feature_layers
    if not read or len(set(read)) < len(read) or any(not 0 < layer <= dims.layers for layer in read):
        raise Unsupported(f"a drafter that reads the model at layers {draft.feature_layers}")
    # What only the layers wrote of a narrower one's hop, fc and one pass later would bear the tag of the layer at hand.
    if draft.intermediate < dims.intermediate:
        raise Unsupported(f"a drafter whose MLP has {draft.intermediate} channels, the model's {dims.intermediate}")
    parts = {"qkv": ["q", "k", "v"], "gate_up": ["gate", "up"]}
    sizes = draft_matrix_sizes(dims, draft)

    def phase(name: str) -> Phase:
        of = parts.get(name, [name])
        rows, inputs = sum(sizes[part][0] for part in of), sizes[of[0]][1]
        wide, own = name in ("fc", "down"), 1 if name == "head" else shares
        return _phase(name, of, matrices, rows, inputs, wide=wide, shares=own)

    phases = {name: phase(name) for name in DRAFT_PHASES}
    wide = phases["qkv"]  # a token's embedding, then the hidden state: each has a norm of its own
    if dims.hidden % (shares * max(wide.group, BLOCK_K)):
        raise Unsupported(f"a drafter's qkv in groups of {wide.group}")
    phases["qkv"] = replace(wide, chunks=2, apart=True)
    # Whoever chooses a draft must have had a share in what led to it, so that nobody is overtaken.
    if min(phases["head"].tiles, phases["gate_up"].tiles) < sms:
        raise Unsupported(
            f"a drafter of {draft.vocab} tokens and {draft.intermediate} channels on {sms} multiprocessors"
        )
    return phases


def _phase(
    name: str,
    parts: Sequence[str],
    matrices: Mapping[str, StoredMatrix],
    rows: int,
    inputs: int,
    *,
    wide: bool,
    shares: int,
) -> Phase:
    """A phase of these matrices, which must agree. wide: K may be staged in pieces. shares: SMs that share K."""
    found = {(format_of(matrices[n]), matrices[n].group, matrices[n].k) for n in parts}
    if len(found) != 1:
        raise Unsupported(f"the matrices of {name} are stored in different formats: {sorted(found)}")
    kind, group, k = found.pop()
    if k != inputs:
        raise Unsupported(f"{name} has {k} input channels, the shape says {inputs}")
    if k % BLOCK_K or (rows % TILE_ROWS and name != "head"):
        raise Unsupported(f"{name} is {rows} x {k}: not a multiple of {TILE_ROWS} x {BLOCK_K}")
    step = shares * max(group or 0, BLOCK_K)
    if k % step:
        sharing = "two multiprocessors share" if shares > 1 else "a multiprocessor reads"
        raise Unsupported(f"{name} has {k} input channels: {sharing} a multiple of {step}")
    chunks, own = 1, k // shares
    if wide:
        chunks = next(
            c
            for c in range(1, own // BLOCK_K + 1)
            if own // BLOCK_K % c == 0
            and own // c <= (CHUNK_K // 2 if kind == "bf16" else CHUNK_K)
            and (not group or own // c % max(group, BLOCK_K) == 0)
        )
    return Phase(name, k, rows, -(-rows // TILE_ROWS), kind, group or 0, chunks, shares=shares)


@dataclass(frozen=True)
class Split:
    """Which tiles each SM multiplies, in one table row per SM: `first` and `count` by phase, in the order of PHASES.
    Where SMs share tiles, they have the same; the sums of every second one are an SM's own (own_tiles)."""

    first: list[list[int]]
    count: list[list[int]]
    layer_bytes: list[int]  # of one layer, per SM
    offset: list[int]  # where each SM's stream begins
    total_bytes: int


def split_tiles(phases: Mapping[str, Phase], layers: int, sms: int) -> Split:
    """Contiguous tiles for every SM, or for those that share them. o and down have one assignment, because the owner
    keeps the residual's rows.

    Each phase is spread evenly, whatever an SM reads elsewhere: the ring absorbs an imbalance within a layer, but the
    SM with the most rows of a phase is also the last to publish them.
    """

    def even(name: str, heavy_last: bool) -> list[int]:
        groups = sms // phases[name].shares
        base, extra = divmod(phases[name].tiles, groups)
        return [base + (g >= groups - extra if heavy_last else g < extra) for g in range(groups)]

    # SMs with low numbers attend to the keys, so those with high numbers take the larger shares.
    counts = {name: even("o" if name == "down" else name, name in ("qkv", "o", "down")) for name in PHASES}
    starts = {name: [sum(found[:g]) for g in range(len(found))] for name, found in counts.items()}
    shares = {name: phases[name].shares for name in PHASES}
    first = [[starts[name][s // shares[name]] for name in PHASES] for s in range(sms)]
    count = [[counts[name][s // shares[name]] for name in PHASES] for s in range(sms)]
    layer_bytes = [
        sum(count[s][tiles_index(n)] * phase.tile_bytes for n, phase in phases.items() if n != "head")
        for s in range(sms)
    ]
    offset, at = [], 0
    for s in range(sms):
        offset.append(at)
        at += layers * layer_bytes[s] + count[s][PHASES.index("head")] * phases["head"].tile_bytes
        at = -(-at // 128) * 128
    return Split(first, count, layer_bytes, offset, at)


def own_tiles(tiles: int, shares: int, rank: int) -> range:
    """Of `tiles` tiles that some SMs share, those whose sums the SM of that rank brings to an end."""
    return range(rank, tiles, shares)


@dataclass(frozen=True)
class Drafting:
    """A learned drafter as the kernel holds it."""

    dims: DraftDims
    phases: dict[str, Phase]
    split: Split


def plan_drafter(
    dims: KernelDims, draft: DraftDims, matrices: Mapping[str, StoredMatrix], sms: int, shares: int = 1
) -> Drafting:
    """A drafter for a model of shape `dims`; matrices and shares as in draft_phases. Raises Unsupported."""
    phases = draft_phases(dims, draft, matrices, sms, shares)
    return Drafting(draft, phases, split_tiles(phases, 1, sms))

"""What the decode kernel is compiled with for one model on one GPU: shared memory's budget, tuning, and the header."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kernels.cuda.phases import (
    FORMAT_CODES,
    PHASES,
    TILE_ROWS,
    Drafting,
    KernelDims,
    Phase,
    Split,
    StoredMatrix,
    Unsupported,
    format_of,
    own_tiles,
    tiles_index,
)

KV_BLOCK = 16
MAX_COLUMNS = 8
MOST_HISTORY = 1 << 20  # tokens that the speculative loop can look up in: its indices have 20 bits

CONSUMER_WARPS = 16
MAX_SPLITS = 16  # of the keys of one KV head
# Wanted; 8 KB stages already stream at 95 % of the H200's bandwidth, smaller ones do not.
STAGE_BYTES = 17408
SLOW_COLUMNS, LONG_LAYER, SHORTEST_STAGE = 8, 524288, 8192  # see wanted_stage; bytes an SM of a layer, of a stage
BLOCKS_PER_SPLIT = 5  # of 16 positions; 1,024 positions then make thirteen splits
WINDOW = 1  # stages in flight in the layers; more of them only lengthen the hops
HEAD_WINDOW = 4  # and in the head, where there are none; of half stages twice as many
LATE_WINDOW = 3  # and while a phase is multiplied whose weights are more than the ring holds, of what follows
KEYS_WINDOW = 2  # and among many keys, for which all other SMs wait; with one or two columns
L2_AHEAD = 65536  # bytes that the producer asks the L2 cache for beyond what it copies
HOP_COPIES = 4  # of what all SMs read; one, where SMs share tiles and there are several columns to be written
STAGE_LOADS = 3  # items of a warp that are polled and staged at once; where it has more, two at a time
DRAFTER_STAGE_LOADS = 2  # with a drafter, whose kernels have no registers for more
EMPTY_ARRIVALS = 128  # arrivals that free a ring stage: an upper bound on the warps that read one
SHARED_RESERVE = 1024  # static shared memory and the runtime's own kilobyte


@dataclass(frozen=True)
class Plan:
    """Everything the host must know to compile, fill and launch the kernel for one number of columns."""

    dims: KernelDims
    phases: dict[str, Phase]
    split: Split
    sms: int
    columns: int
    shared_bytes: int  # dynamic shared memory of a block
    constants: dict[str, str]  # the kernel's macros
    scratch_bytes: int  # of the hop buffers, zeroed before each launch
    threads: int


def wanted_stage(phases: Mapping[str, Phase], split: Split, columns: int, warps: int, kv_bytes: int) -> int:
    """Most bytes of a stage of the ring. kv_bytes: of 16 positions' keys and values of one head.

    Eight columns are so slow that half as many bytes in flight do, and hops wait for fewer, unless a layer is long (on
    an H200 Granite-3B's, 300 KB an SM, took 1,069 instead of 1,085 us, Mistral-7B's, 870 KB, 1,885 instead of 1,751),
    or half a stage would hold too little.
    """
    half = STAGE_BYTES // 2
    held = min(p.units_per_stage(half, warps) * p.unit_bytes for p in phases.values() if p.name != "head")
    halved = columns >= SLOW_COLUMNS and max(split.layer_bytes) < LONG_LAYER and held >= SHORTEST_STAGE
    return half if halved and kv_bytes <= half else STAGE_BYTES


def make_plan(
    dims: KernelDims,
    phases: dict[str, Phase],
    split: Split,
    sms: int,
    shared_limit: int,
    columns: int,
    embed: StoredMatrix,
    tuning: Mapping[str, int] | None = None,
    drafting: Drafting | None = None,
) -> Plan:
    """The plan for one GPU of `sms` SMs whose blocks may have `shared_limit` bytes of shared memory.

    drafting: of a learned drafter that the speculative loop (columns > 1) shall hold.
    tuning: overrides of WINDOW, HEAD_WINDOW, LATE_WINDOW, KEYS_WINDOW, L2_AHEAD, HOP_COPIES, STAGE_LOADS, STAGE_AHEAD,
    BLOCKS_PER_SPLIT, STAGES, STAGE_BYTES and CONSUMER_WARPS; PROFILE=1 stamps clocks by phase, NO_WAIT=1 waits for no
    other SM, NO_COPY=1 reads no weights, FORCED_ACCEPTANCE=1 takes as many drafts for right as it is told (all three:
    wrong results, for diagnosis and cost curves). LANES_ARRIVE=1 tells racecheck more about the ring's order. (PAIRS=0,
    which Megakernel heeds, lets no SMs share tiles.)
    """
    tuning = dict(tuning or {})
    hd, group_heads = dims.head_dim, dims.heads // dims.kv_heads
    if drafting and columns == 1:
        raise ValueError("a drafter is for several columns")
    if hd not in (64, 128, 256) or dims.heads % dims.kv_heads:
        raise Unsupported(f"head dimension {hd}, {dims.heads} query and {dims.kv_heads} KV heads")
    if dims.kv_heads > sms:
        raise Unsupported(f"{dims.kv_heads} KV heads on {sms} multiprocessors")
    query_blocks, value_parts = -(-group_heads * columns // 8), hd // 64  # warps that read one block of the cache
    warps = tuning.get("CONSUMER_WARPS", CONSUMER_WARPS)
    if query_blocks * value_parts > warps:
        raise Unsupported(f"{group_heads} query heads per KV head with {columns} columns")
    lanes = warps // (query_blocks * value_parts)  # warps that share the keys of one block of eight queries
    kv_bytes = 4 * KV_BLOCK * hd
    shares = phases["o"].shares
    copies = 1 if shares > 1 and columns > 1 else HOP_COPIES
    wanted = tuning.get("STAGE_BYTES", wanted_stage(phases, split, columns, warps, kv_bytes))
    head_window, copies = HEAD_WINDOW * max(1, STAGE_BYTES // wanted), tuning.get("HOP_COPIES", copies)
    kv_per_stage = 1 << int(math.log2(max(1, wanted // kv_bytes)))

    held = {name: (phase, split) for name, phase in phases.items()}  # what the kernel runs
    if drafting:
        held |= {f"d_{name}": (phase, drafting.split) for name, phase in drafting.phases.items()}
    most = {name: max(row[tiles_index(p.name)] for row in s.count) for name, (p, s) in held.items()}
    part_unit = columns * TILE_ROWS + 8  # floats; the 8 spread four units over all banks

    def pieces(phase: Phase) -> int:
        return 1 if columns * phase.own_k * phase.x_bytes <= 40000 and not phase.apart else phase.chunks

    def align(size: int) -> int:
        return -(-size // 128) * 128

    def staged(phase: Phase) -> int:
        return align(2 * columns * (phase.own_k // pieces(phase) * phase.x_bytes // 2 + 16))

    # The arena holds a phase's x and, behind it, the sums of its tiles (where these are too many, of two batches in
    # turns); or attention's queries, newest keys and sums.
    queries = query_blocks * 2 * 8 * hd * 2
    arena = align(queries + kv_bytes + lanes * group_heads * columns * (hd + 8 + 2) * 4)
    layers_budget = {1: 10752, 2: 13312, 4: 24576, 8: 45056}[columns]
    batch = {}
    for name, (phase, _) in sorted(held.items(), key=lambda item: item[1][0].name == "head"):
        per_tile = phase.chunks * phase.units * part_unit * 4
        # The heads come last and make do with what the layers' phases need, if that is enough for four tiles.
        budget = max(arena - staged(phase), 4 * per_tile) if phase.name == "head" else layers_budget
        batch[name] = most[name] if most[name] * per_tile <= budget else max(phase.shares, budget // 2 // per_tile)
        if phase.name == "head" and most[name] > warps:  # its sums are read while the next are multiplied
            batch[name] = min(batch[name], -(-most[name] // 2))
        per_stage = phase.units_per_stage(wanted, warps)
        whole = per_stage // math.gcd(per_stage, phase.units)  # tiles that fill whole stages
        whole = math.lcm(whole, phase.shares)  # and of which each SM owns as many
        if batch[name] < most[name]:
            batch[name] -= batch[name] % (whole if whole < batch[name] else phase.shares)
        if phase.name == "down" or phase.chunks > 1:
            batch[name] = most[name]  # the residual's owner reduces all its rows at once
        arena = max(arena, align(staged(phase) + batch[name] * per_tile * (2 if batch[name] < most[name] else 1)))

    stage = max([p.units_per_stage(wanted, warps) * p.unit_bytes for p, _ in held.values()] + [kv_per_stage * kv_bytes])
    stage = align(stage)
    groups = max(p.own_k // pieces(p) // (p.group or 64) for p, _ in held.values()) + 4  # of x, by the weights' scales
    seen = most["head"] * TILE_ROWS * 4
    own = {name: len(own_tiles(tiles, held[name][0].shares, 0)) for name, tiles in most.items()}
    resid = own["o"] * TILE_ROWS * (columns + 2) * 4  # and the norms' weights of its rows
    rope = columns * hd * 4
    small = 8 * (-(-columns // 4) * 4) * groups + seen + resid + rope + 3584
    small += 4 * columns * (dims.hidden // 256 + 2)  # the embedding's squares
    if drafting:
        small += 4 * TILE_ROWS * (most["d_head"] + 4 * own["o"]) + 512  # ids and norms' weights of the owned rows
    received = [0] * len(PHASES)  # tiles whose words come from the other SM of a pair; a drafter's replace the model's
    for name, (phase, _) in held.items():
        if phase.shares > 1:
            index = tiles_index(phase.name)
            received[index] = max(received[index], own[name])
    small += 4 * columns * TILE_ROWS * sum(received)
    room = shared_limit - SHARED_RESERVE - arena - small
    stages = min(tuning.get("STAGES", 32), room // (stage + 16))
    # A round of the warps must fit the ring (gemv.cuh), and loads need a stage to run ahead.
    fewest = max(3, *(warps // phase.units_per_stage(wanted, warps) for phase, _ in held.values()))
    if stages < fewest:
        raise Unsupported(f"{shared_limit} bytes of shared memory are too few for this model")

    rounds = {warps // phase.units_per_stage(wanted, warps) for phase, _ in held.values()}  # of the warps, in stages
    rounds.add(min(stages, -(-lanes // kv_per_stage)))  # and of those that share keys: no more do than the ring holds

    def window(most: int) -> int:
        """Stages in flight. Copies end in any order, and a warp that waits for a slot knows only that the stage a round
        before its own has come: what the slot held before must not be among those still in flight then."""
        assert max(rounds) <= stages, "a round of the warps fits the ring"
        return max(1, min(most, stages - max(rounds)))  # one in flight at a time is always in order

    def f(value: float) -> str:
        return f"{float(value)!r}f"

    splits = max(1, min(MAX_SPLITS, sms // dims.kv_heads))
    constants: dict[str, str] = {
        "COLUMNS": str(columns),
        "SMS": str(sms),
        "RANKS": str(shares),
        "HIDDEN": str(dims.hidden),
        "LAYERS": str(dims.layers),
        "HEADS": str(dims.heads),
        "KV_HEADS": str(dims.kv_heads),
        "HEAD_DIM": str(hd),
        "INTERMEDIATE": str(dims.intermediate),
        "VOCAB": str(dims.vocab),
        "QK_NORM": str(int(dims.qk_norm)),
        "RMS_EPS": f(dims.rms_norm_eps),
        "EMBEDDING_MULTIPLIER": f(dims.embedding_multiplier),
        "ATTENTION_MULTIPLIER": f(dims.attention_multiplier),
        "RESIDUAL_MULTIPLIER": f(dims.residual_multiplier),
        "LOGITS_SCALING": f(dims.logits_scaling),
        "CONSUMER_WARPS": str(warps),
        "MAX_SPLITS": str(splits),
        "BLOCKS_PER_SPLIT": str(tuning.get("BLOCKS_PER_SPLIT", BLOCKS_PER_SPLIT)),
        "KV_PER_STAGE": str(kv_per_stage),
        "STAGE_BYTES": str(stage),
        "STAGES": str(stages),
        "LAYER_WINDOW": str(window(tuning.get("WINDOW", WINDOW))),
        "HEAD_WINDOW": str(window(tuning.get("HEAD_WINDOW", head_window))),
        "LATE_WINDOW": str(window(tuning.get("LATE_WINDOW", LATE_WINDOW))),
        "KEYS_WINDOW": str(window(tuning.get("KEYS_WINDOW", KEYS_WINDOW if columns <= 2 else WINDOW))),
        "L2_AHEAD": str(tuning.get("L2_AHEAD", L2_AHEAD)),
        "STAGE_LOADS": str(tuning.get("STAGE_LOADS", DRAFTER_STAGE_LOADS if drafting else STAGE_LOADS)),
        "STAGE_AHEAD": str(tuning.get("STAGE_AHEAD", 0 if drafting else 1)),  # the next two are under way meanwhile
        "EMPTY_ARRIVALS": str(EMPTY_ARRIVALS),
        "ARENA_BYTES": str(arena),
        "SEEN_ROWS": str(most["head"] * TILE_ROWS),
        "RESIDUAL_TILES": str(own["o"]),
        "EMBED_FORMAT": str(FORMAT_CODES[format_of(embed)]),
        "EMBED_GROUP": str(embed.group or 64),
    }
    for name, (phase, _) in held.items():
        prefix = name.upper()
        constants |= {
            f"{prefix}_FORMAT": str(FORMAT_CODES[phase.format]),
            f"{prefix}_K": str(phase.own_k),
            f"{prefix}_SHARES": str(phase.shares),
            f"{prefix}_ROWS": str(phase.rows),
            f"{prefix}_GROUP": str(phase.group or 64),
            f"{prefix}_CHUNKS": str(phase.chunks),
            f"{prefix}_PIECES": str(pieces(phase)),
            f"{prefix}_UNIT_BLOCKS": str(phase.unit_blocks),
            f"{prefix}_UNITS_PER_STAGE": str(phase.units_per_stage(wanted, warps)),
            f"{prefix}_BATCH": str(batch[name]),
            f"{prefix}_MOST_TILES": str(most[name]),
        }
    gated, extra = dims.intermediate, 0
    if drafting:
        d = drafting.dims
        constants |= {
            "DRAFTER": "1",
            "D_INTERMEDIATE": str(d.intermediate),
            "D_VOCAB": str(d.vocab),
            "D_QUERY_SCALE": f(hd**-0.5 / dims.attention_multiplier),
            "D_FEATURES": str(len(d.feature_layers)),
            "D_FEATURE_LAYERS": ",".join(map(str, d.feature_layers)),
        }
        gated, extra = max(gated, d.intermediate), (len(d.feature_layers) + 1) * dims.hidden // 2
    for switch in ("PROFILE", "NO_WAIT", "NO_COPY", "FORCED_ACCEPTANCE", "LANES_ARRIVE"):
        if tuning.get(switch):
            constants[switch] = "1"
    constants["HOP_COPIES"] = str(copies)
    copied = dims.hidden + (gated + dims.heads * hd) // 2 + 2 * dims.hidden // TILE_ROWS + 32 + extra
    words = copies * columns * copied
    words += columns * (dims.qkv_rows + dims.heads * splits * (hd // 2 + 2))
    scratch = 4 * words + 8 * sms + 1024
    shared = arena + small + stages * (stage + 16)
    constants["SHARED_BYTES"] = str(shared)
    return Plan(dims, phases, split, sms, columns, shared, constants, scratch, warps * 32 + 128)

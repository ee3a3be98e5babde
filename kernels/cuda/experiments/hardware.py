"""Levers of the GPU itself: how fast memory streams at all, and how long all SMs take to meet."""

from __future__ import annotations

from ctypes import c_int, c_uint32, c_uint64

import numpy as np

from kernels.cuda.experiments.launching import PIPELINE_BYTES, too_large
from kernels.cuda.experiments.sweep import Device, Fill, Launch, Step, Variant, Weights

STAGE_BYTES = 16384  # of the bare read: 95 % of the peak on an H200, where 4 KB stages reached 87 %
DEPTHS = (2, 3, 4, 6, 8, 12)
BARRIERS = 2000
LINE_WORDS = 32
TREE_BLOCKS = 12


def reads(device: Device, w: Weights) -> list[Variant]:
    """How fast memory can be streamed at all: the measured roof of everything else."""
    lever, out = "streaming read", device.put(np.zeros(1, np.uint32))
    items = w.nbytes // STAGE_BYTES
    nbytes = items * STAGE_BYTES

    def variant(name: str, why: str, launch: Launch, base: bool = False) -> Variant:
        def check() -> float:
            device.run([Fill(out, 0), launch])
            truth = int(device.read(w.words, np.uint32, 0, nbytes // 4).sum(dtype=np.uint64)) % 2**32
            return float(int(device.read(out, np.uint32)[0]) != truth)

        return Variant(lever, name, why, "pass", (launch,), 1, nbytes, check, 0.0, base)

    blocks = device.sms * 8
    arguments = (w.words.address, c_uint64(nbytes // 16), c_uint64(blocks * 256), out.address)
    variants = [
        variant(
            "16-byte loads, 8 blocks an SM",
            "many threads with four independent loads each cover the latency without any machinery",
            Launch("ring", "read_plain", blocks, 256, arguments),
            base=True,
        )
    ]
    for stages in DEPTHS:
        name = f"bulk copies, {stages} x {STAGE_BYTES // 1024} KB"
        in_flight = stages * STAGE_BYTES // 1024
        why = (
            f"{in_flight} KB an SM, less the stage that is being emptied; an H200's bandwidth x latency is about 40 KB"
        )
        shared = PIPELINE_BYTES + stages * STAGE_BYTES
        if shared > device.shared_bytes:
            variants.append(too_large(lever, name, why, "pass", shared, device))
            continue
        given = (w.words.address, c_int(items), c_int(STAGE_BYTES), c_int(stages), c_uint32(device.sms), out.address)
        variants.append(variant(name, why, Launch("ring", "read_ring", device.sms, 288, given, shared)))
    return variants


def barriers(device: Device, w: Weights) -> list[Variant]:
    """How long until every SM knows that all have come."""
    lever, blocks = "grid barrier", device.sms
    lines = 2 + -(-blocks // TREE_BLOCKS)
    words = device.put(np.zeros(max(lines * LINE_WORDS, blocks), np.uint32))
    notes, errors = device.put(np.zeros(2 * blocks, np.uint32)), device.put(np.zeros(1, np.uint32))

    def variant(kind: str, name: str, why: str, base: bool = False) -> Variant:
        def steps(count: int, checked: bool) -> list[Step]:
            given = (words.address, c_int(count), c_uint32(blocks), notes.address, errors.address if checked else 0)
            return [Fill(words, 0), Launch("barriers", f"barrier_{kind}", blocks, 256, given, 0, cooperative=True)]

        def check() -> float:
            device.run([Fill(errors, 0), Fill(notes, 0), *steps(50, checked=True)])
            passed = (device.read(notes, np.uint32) >= 49).all()
            return float(device.read(errors, np.uint32)[0]) if passed else float("inf")

        return Variant(lever, name, why, "barrier", tuple(steps(BARRIERS, False)), BARRIERS, 0, check, 0.0, base)

    return [
        variant(
            "cooperative_groups",
            "cooperative_groups",
            "an atomic that must return before it polls, between two fences",
            base=True,
        ),
        variant(
            "counter", "one counter, one poller", "an addition with release semantics needs no answer and no fence"
        ),
        variant(
            "every_warp_polls", "one counter, every warp polls", "polls queue at one address, in front of the arrivals"
        ),
        variant("flags", "a flag for each SM", f"arrivals do not queue, but every SM reads {blocks} words"),
        variant(
            "tree",
            f"a tree of {TREE_BLOCKS}",
            "shorter queues, but three trips through the L2 cache one after the other",
        ),
    ]

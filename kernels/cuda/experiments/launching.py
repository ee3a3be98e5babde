"""How the experiments' kernels are launched: blocks, stages and shared memory, as the sources expect them."""

from __future__ import annotations

from kernels.cuda.experiments.sweep import Device, Variant

BLOCKS_PER_SM = 4  # 256 threads of 64 registers: as many as fit
MOST_STAGES = 16
PIPELINE_BYTES = 256  # of barriers, before the slots
TABLE_BYTES = 2048
CHUNK = 1024  # channels that a warp multiplies at once; x is staged in whole chunks


def staged(channels: int) -> int:
    """Bytes of x in shared memory, in whole chunks."""
    return 4 * -(-channels // CHUNK) * CHUNK


def too_large(lever: str, name: str, why: str, unit: str, shared: int, device: Device) -> Variant:
    missing = f"needs {shared:,} bytes of shared memory, a block may have {device.shared_bytes:,}"
    return Variant(lever, name, why, unit, missing=missing)

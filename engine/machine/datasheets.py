"""What GPU datasheets promise: peak arithmetic by precision, and memory bandwidth."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import UsageError


@dataclass(frozen=True)
class Datasheet:
    """One GPU. bandwidth_gb_s: 1e9 bytes a second. tflops: precision ("bf16", "int8", "fp8", "fp4") -> 1e12 operations
    a second on the tensor cores, dense (datasheets like to print twice that, "with sparsity")."""

    name: str
    bandwidth_gb_s: float
    tflops: Mapping[str, float]


# NVIDIA's datasheets; of the GeForce cards, the architecture white papers, with sums in 32 bits.
DATASHEETS: dict[str, Datasheet] = {
    key: Datasheet(name, bandwidth, tflops)
    for key, name, bandwidth, tflops in (
        ("a100-40gb", "A100 40GB", 1555, {"bf16": 312, "int8": 624}),
        ("a100-pcie", "A100 80GB PCIe", 1935, {"bf16": 312, "int8": 624}),
        ("a100-sxm", "A100 80GB SXM", 2039, {"bf16": 312, "int8": 624}),
        ("h100-pcie", "H100 PCIe", 2000, {"bf16": 756, "int8": 1513, "fp8": 1513}),
        ("h100-sxm", "H100 SXM", 3350, {"bf16": 989, "int8": 1979, "fp8": 1979}),
        ("h200", "H200 SXM", 4800, {"bf16": 989, "int8": 1979, "fp8": 1979}),
        ("b200", "B200 (HGX)", 7700, {"bf16": 2250, "int8": 4500, "fp8": 4500, "fp4": 9000}),
        ("a10", "A10", 600, {"bf16": 125, "int8": 250}),
        ("l4", "L4", 300, {"bf16": 121, "int8": 242, "fp8": 242}),
        ("l40s", "L40S", 864, {"bf16": 362, "int8": 733, "fp8": 733}),
        ("rtx-3090", "GeForce RTX 3090", 936, {"bf16": 71, "int8": 284}),
        ("rtx-4090", "GeForce RTX 4090", 1008, {"bf16": 165, "int8": 661, "fp8": 330}),
        ("rtx-5090", "GeForce RTX 5090", 1792, {"bf16": 209, "int8": 838, "fp8": 419, "fp4": 1676}),
    )
}


def datasheet(name: str) -> Datasheet:
    """By its short name, in any case, spaces or dashes. Raises UsageError with near matches."""
    wanted = "-".join(name.lower().replace("_", "-").split())
    if wanted in DATASHEETS:
        return DATASHEETS[wanted]
    near = [key for key in DATASHEETS if wanted and (key.startswith(wanted) or wanted in key)]
    near = near or difflib.get_close_matches(wanted, list(DATASHEETS), n=3)
    raise UsageError(
        f"No datasheet for a GPU named {name[:60]!r}",
        f"known: {', '.join(near or DATASHEETS)}; or give --bandwidth (GB/s) and --flops (TFLOP/s)",
    )


def recognise(device_name: str, memory_bytes: int) -> Datasheet | None:
    """The datasheet of a GPU by the name its driver gives ("NVIDIA H100 80GB HBM3"), or None."""
    name = device_name.upper()
    if "A100" in name:
        key = "a100-40gb" if memory_bytes < 60e9 else "a100-pcie" if "PCIE" in name else "a100-sxm"
    elif "H100" in name:
        key = "h100-pcie" if "PCIE" in name else "h100-sxm" if "HBM3" in name else None
    else:
        words = set(name.replace("-", " ").split())
        plain = {"H200": "h200", "B200": "b200", "A10": "a10", "L4": "l4", "L40S": "l40s"}
        key = next((key for word, key in plain.items() if word in words), None)
        if "RTX" in words and not words & {"TI", "LAPTOP", "SUPER", "D"}:
            key = next((f"rtx-{number}" for number in ("3090", "4090", "5090") if number in words), key)
    return DATASHEETS[key] if key else None

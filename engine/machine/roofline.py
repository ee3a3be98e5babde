"""The arithmetic of decoding: what a model must read for one token, and so how fast a machine could decode it at most.

Decoding reads every weight once for each token and spends two operations on it (a multiplication and an addition):
2 / (bytes per weight) FLOP per byte, far below what a machine needs to be busy (its ridge point, peak FLOP/s over
bandwidth). So tok/s <= bandwidth / bytes per token, whatever the processor. Williams, Waterman and Patterson,
"Roofline", CACM 52(4), 2009.

Units: bytes, FLOP, seconds; GB and TFLOP are 1e9 and 1e12. Attention's own arithmetic is left out of FLOP counts (it
reads the KV cache at about 1 FLOP per byte, times the query heads that share a KV head).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from engine.config import ModelConfig
from engine.meter import tensor_kind
from engine.packed.tensors import tensor_shapes

BYTES_PER_WEIGHT = {"bf16": 2.0, "int8": 1.0, "int4": 0.5}  # without scales
KV_BYTES = 2  # of one stored key or value element (fp16)


@dataclass(frozen=True)
class Machine:
    """Where to decode. tflops: peak for the matrix products (None: not known). Sources name each figure's kind."""

    name: str
    gb_s: float
    gb_s_source: str
    tflops: float | None = None
    tflops_source: str = ""

    @property
    def ridge(self) -> float | None:
        """FLOP per byte from which on arithmetic, not memory, is the limit."""
        return None if self.tflops is None else ridge_point(self.tflops * 1e12, self.gb_s * 1e9)


@dataclass(frozen=True)
class Workload:
    """What decoding one token reads.

    weights: elements of all matrices that are read for a token (of an embedding that is not tied: none).
    kv_per_position: bytes of keys and values that one position of context adds. context: most positions.
    packed: (variant, bytes) of the weights as they are stored, scales and norms included; None where nothing is packed.
    """

    name: str
    weights: int
    kv_per_position: int
    context: int
    packed: tuple[str, int] | None = None


@dataclass(frozen=True)
class Ceiling:
    """One precision of the weights on one machine, batch 1 where nothing else is said.

    flop_per_byte: of the weights alone. tok_s: with an empty KV cache; tok_s_context: at the roofline's context. Both
    are the memory's limit, or that of the arithmetic where a known one is lower.
    kv_equals_weights: positions at which the KV cache is as many bytes as the weights. batch_at_ridge: sequences at
    once from which on arithmetic is the limit, at the roofline's context (None: never, KV traffic caps the intensity
    below the ridge point; or that point is not known). flop_per_byte_limit: that cap, for ever larger batches; None
    without context.
    """

    precision: str
    bytes_per_weight: float
    weight_bytes: int
    flop_per_byte: float
    tok_s: float
    tok_s_context: float
    kv_equals_weights: float
    batch_at_ridge: float | None
    flop_per_byte_limit: float | None


@dataclass(frozen=True)
class Roofline:
    """A workload on a machine, at `context` positions."""

    machine: Machine
    workload: Workload
    context: int
    ceilings: tuple[Ceiling, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.workload.name,
            "machine": self.machine.name,
            "peak_gb_s": self.machine.gb_s,
            "peak_source": self.machine.gb_s_source,
            "peak_tflops": self.machine.tflops,
            "peak_tflops_source": self.machine.tflops_source,
            "ridge_flop_per_byte": self.machine.ridge,
            "weights_per_token": self.workload.weights,
            "kv_bytes_per_position": self.workload.kv_per_position,
            "context": self.context,
            "ceilings": [asdict(ceiling) for ceiling in self.ceilings],
        }


def intensity(bytes_per_weight: float, batch: float = 1) -> float:
    """FLOP per byte of reading weights once for `batch` tokens: 1 for bf16, 4 for int4 at batch 1."""
    return 2 * batch / bytes_per_weight


def ridge_point(flop_s: float, bytes_s: float) -> float:
    """FLOP per byte at which a machine is equally limited by arithmetic and by memory."""
    return flop_s / bytes_s


def attainable(flop_per_byte: float, flop_s: float, bytes_s: float) -> float:
    """FLOP/s under the roof."""
    return min(flop_s, flop_per_byte * bytes_s)


def token_rate(bytes_s: float, bytes_per_token: float) -> float:
    """tok/s at most."""
    return bytes_s / bytes_per_token


def kv_bytes(layers: int, kv_heads: int, head_dim: int, element_bytes: float = KV_BYTES, context: int = 1) -> float:
    """Bytes of keys and values of `context` positions: what a token reads at that depth."""
    return 2 * kv_heads * head_dim * element_bytes * layers * context


def batch_at_ridge(weights: float, weight_bytes: float, ridge: float, kv_per_sequence: float = 0.0) -> float | None:
    """Sequences decoded at once that bring the intensity up to the ridge point.

    B tokens take 2 B weights FLOP and weight_bytes + B kv_per_sequence bytes. None where even endless batches stay
    below: 2 weights / kv_per_sequence <= ridge.
    """
    spare = 2 * weights - ridge * kv_per_sequence
    return ridge * weight_bytes / spare if spare > 0 else None


def workload(name: str, config: ModelConfig, packed: tuple[str, dict[str, int]] | None = None) -> Workload:
    """packed: variant, and stored bytes by kind of tensor (`meter.packed_weight_bytes`)."""
    untied = not config.tie_word_embeddings
    shapes = {name: shape for name, shape in tensor_shapes(config).items() if len(shape) == 2}
    weights = sum(math.prod(shape) for name, shape in shapes.items() if not (untied and tensor_kind(name) == "embed"))
    stored = None
    if packed is not None:
        variant, sizes = packed
        stored = (variant, sum(size for kind, size in sizes.items() if not (untied and kind == "embed")))
    kv = int(kv_bytes(config.num_layers, config.num_kv_heads, config.head_dim))
    return Workload(name, weights, kv, config.max_position_embeddings, stored)


def roofline(load: Workload, machine: Machine, context: int) -> Roofline:
    """Ceilings of bf16, int8 and int4 weights without scales, and of the packed form if there is one."""
    forms = [(name, load.weights * size) for name, size in BYTES_PER_WEIGHT.items()]
    if load.packed is not None:
        forms.append((load.packed[0], float(load.packed[1])))
    return Roofline(machine, load, context, tuple(_ceiling(name, size, load, machine, context) for name, size in forms))


def _ceiling(precision: str, weight_bytes: float, load: Workload, machine: Machine, context: int) -> Ceiling:
    kv = load.kv_per_position * context
    bytes_s = machine.gb_s * 1e9
    arithmetic = math.inf if machine.tflops is None else machine.tflops * 1e12 / (2 * load.weights)
    bytes_per_weight = weight_bytes / load.weights
    return Ceiling(
        precision=precision,
        bytes_per_weight=bytes_per_weight,
        weight_bytes=round(weight_bytes),
        flop_per_byte=intensity(bytes_per_weight),
        tok_s=min(arithmetic, token_rate(bytes_s, weight_bytes)),
        tok_s_context=min(arithmetic, token_rate(bytes_s, weight_bytes + kv)),
        kv_equals_weights=weight_bytes / load.kv_per_position,
        batch_at_ridge=None if machine.ridge is None else batch_at_ridge(load.weights, weight_bytes, machine.ridge, kv),
        flop_per_byte_limit=2 * load.weights / kv if kv else None,
    )

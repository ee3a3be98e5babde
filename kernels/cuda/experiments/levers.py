"""The levers by name: each builds its variants, how a sweep launches them, and why one should win."""

from __future__ import annotations

from collections.abc import Callable

from kernels.cuda.experiments.hardware import barriers, reads
from kernels.cuda.experiments.mlps import fusion, stacks
from kernels.cuda.experiments.products import products, sparsity, splits, tensor_cores
from kernels.cuda.experiments.sweep import Device, Variant, Weights

# In the order of their tables; a key is what --only names.
LEVERS: dict[str, Callable[[Device, Weights], list[Variant]]] = {
    "read": reads,
    "gemv": products,
    "tensor": tensor_cores,
    "split": splits,
    "sparsity": sparsity,
    "fusion": fusion,
    "mlp": stacks,
    "barrier": barriers,
}

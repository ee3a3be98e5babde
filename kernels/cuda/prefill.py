"""Prefill on the GPU: weights dequantised matrix by matrix into tensor-core products, keys and values written in place.

Each layer is, per chunk of M tokens: one dequantisation and one cuBLAS product for q+k+v, for o, for gate+up and for
down, flash attention over the cache, and four small kernels between them (prefill.cu). A dequantised matrix lives in
one scratch buffer until the next takes its place, so a model needs its packed weights plus the largest product's
fp16 weights, not a second copy of itself.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Mapping, Sequence
from ctypes import c_float, c_int, c_longlong, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from kernels.cuda.driver import Kernel, Module
from kernels.cuda.kv_layout import KV_BLOCK

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

SOURCE = Path(__file__).parent / "prefill.cu"
CHUNK = 2048  # tokens; large enough to fill the tensor cores, small enough to cancel within 0.1 s

HEAD_DIMS = (64, 128)

_THREADS = 256  # of every kernel in prefill.cu
_WARPS = _THREADS // 32
_DEQUANTISED_PER_WARP = 1024
_KERNELS = ("dequantise", "embed", "add_and_norm", "rotate", "gate")
_PRODUCTS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))


class Shape(Protocol):
    """What prefill must know of a model; engine.config.ModelConfig is one."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def embedding_multiplier(self) -> float: ...
    @property
    def attention_multiplier(self) -> float: ...
    @property
    def residual_multiplier(self) -> float: ...
    @property
    def logits_scaling(self) -> float: ...


class MatrixArgument(ctypes.Structure):
    """`Matrix` of prefill_weights.cuh."""

    _fields_ = (
        ("q", c_void_p),
        ("scale", c_void_p),
        ("minimum", c_void_p),
        ("k", c_int),
        ("bits", c_int),
        ("group_log2", c_int),
        ("reserved", c_int),
    )


@dataclass(frozen=True)
class DeviceMatrix:
    """One weight matrix [n, k] on the device, in the packed format's layout (engine/packed.py)."""

    n: int
    k: int
    bits: int  # 4, 8 or 16
    group: int  # 0 for bf16
    q: Tensor
    scale: Tensor | None
    minimum: Tensor | None

    @classmethod
    def upload(
        cls, q: np.ndarray, scale: np.ndarray | None, minimum: np.ndarray | None, *, group: int, device: torch.device
    ) -> DeviceMatrix:
        """Copy a stored matrix to the device; the type of q tells the format (int32: int4, int8, uint16: bf16)."""
        import torch

        def copied(array: np.ndarray | None) -> Tensor | None:
            if array is None:
                return None
            with warnings.catch_warnings():  # a memory map is read-only, and torch only reads it here
                warnings.simplefilter("ignore", UserWarning)
                return torch.from_numpy(array).to(device, copy=True)

        bits, per_element = {"int32": (4, 8), "int8": (8, 1), "uint16": (16, 1)}[q.dtype.name]
        stored = copied(q)
        assert stored is not None
        return cls(q.shape[0], q.shape[1] * per_element, bits, group, stored, copied(scale), copied(minimum))

    def argument(self) -> MatrixArgument:
        """The kernel parameter that describes it."""
        return MatrixArgument(
            self.q.data_ptr(),
            self.scale.data_ptr() if self.scale is not None else None,
            self.minimum.data_ptr() if self.minimum is not None else None,
            self.k,
            self.bits,
            max(self.group, 1).bit_length() - 1,
            0,
        )


@dataclass(frozen=True)
class PrefillOutput:
    """Device tensors, float32. logits [M, vocab], [1, vocab] or None; features: layer -> [M, hidden]."""

    logits: Tensor | None
    features: dict[int, Tensor]


def scratch_weights(shape: Shape) -> int:
    """Elements of the dequantised weights' buffer: the largest fused product of a layer."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    rows_times_k = (
        (q + 2 * kv) * shape.hidden_size,
        shape.hidden_size * q,
        2 * shape.intermediate_size * shape.hidden_size,
    )
    return max(rows_times_k)


def workspace_bytes(shape: Shape, context: int, tokens: int = CHUNK) -> int:
    """Device memory that a chunk of that many tokens needs beside weights and cache, cuBLAS's workspace included.
    context: positions, because attention reads one layer's keys and values from a plain copy."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    per_token = (
        4 * shape.hidden_size * 2  # residual stream, a product's output
        + 2 * shape.hidden_size  # normed
        + 4 * (q + 2 * kv)  # q+k+v
        + 2 * q * 2  # rotated queries, attention's output
        + 2 * shape.intermediate_size * 3  # gate+up, gated
    )
    return 2 * scratch_weights(shape) + tokens * per_token + 2 * 2 * kv * context + (64 << 20)


class Prefill:
    """Feeds chunks of a prompt. Not thread-safe; works on the calling thread's current torch stream."""

    def __init__(
        self,
        shape: Shape,
        matrices: Mapping[str, DeviceMatrix],
        vectors: Mapping[str, Tensor],
        inverse_frequencies: Tensor,
        module: Module,
    ) -> None:
        """matrices, vectors: by canonical name (engine/packed.py), on the device; vectors and inverse_frequencies
        [head_dim / 2] are float32. module: the loaded cubin of SOURCE."""
        import torch

        self._shape = shape
        self._vectors = vectors
        self._inverse_frequencies = inverse_frequencies
        self._device = inverse_frequencies.device
        if shape.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim is {shape.head_dim}, the kernels know {HEAD_DIMS}")
        copies = [f"{copy}_{shape.head_dim}" for copy in ("read_cache", "write_cache")]
        self._kernels: dict[str, Kernel] = {name: module.kernel(name) for name in (*_KERNELS, *copies)}
        self._layers = [
            {names: [matrices[f"layers.{i}.{name}"] for name in names] for names in _PRODUCTS}
            for i in range(shape.num_layers)
        ]
        self._embed = matrices["embed"]
        self._head = matrices["embed" if shape.tie_word_embeddings else "head"]
        self._scratch = torch.empty(scratch_weights(shape), dtype=torch.float16, device=self._device)
        self._stream = 0

    def run(
        self,
        tokens: Sequence[int],
        start: int,
        cache: Tensor,
        *,
        logits: Literal["all", "last", "none"],
        features: Sequence[int] = (),
    ) -> PrefillOutput:
        """Feed M tokens at positions start .. start + M - 1.

        cache: the decoder's KV cache (kv_layout.cache_shape), written at those positions; after them, the rest of the
        last block of 16 becomes zeros.
        features: layers whose entering residual stream is wanted (num_layers: before the final norm).
        """
        import torch

        shape = self._shape
        self._stream = torch.cuda.current_stream().cuda_stream if self._device.type == "cuda" else 0
        with torch.inference_mode(), _full_precision_reductions():
            ids = torch.tensor(tokens, dtype=torch.int32, device=self._device)
            positions = torch.arange(start, start + len(tokens), device=self._device)
            angles = positions[:, None].float() * self._inverse_frequencies
            rotation = angles.cos(), angles.sin()
            x = torch.empty(len(tokens), shape.hidden_size, dtype=torch.float32, device=self._device)
            self._launch("embed", len(tokens), self._embed.argument(), ids, c_float(shape.embedding_multiplier), x)

            taken: dict[int, Tensor] = {}
            update: tuple[Tensor | None, Tensor | None] = (None, None)  # what x still lacks, and its row scales
            for i in range(shape.num_layers):
                normed = self._add_and_norm(x, *update, f"layers.{i}.attn_norm")
                if i in features:
                    taken[i] = x.clone()
                qkv = self._product(normed, self._layers[i]["q", "k", "v"], torch.float32)
                mixed = self._attention(i, qkv, rotation, start, cache[i])
                attended = self._product(mixed, self._layers[i][("o",)], torch.float32)
                normed = self._add_and_norm(x, attended, None, f"layers.{i}.mlp_norm")
                gate_up = self._product(normed, self._layers[i]["gate", "up"], torch.float16)
                gated, row_scale = self._gate(gate_up)
                update = self._product(gated, self._layers[i][("down",)], torch.float32), row_scale
            normed = self._add_and_norm(x, *update, "final_norm")
            if shape.num_layers in features:
                taken[shape.num_layers] = x.clone()
            rows = {"all": normed, "last": normed[-1:], "none": None}[logits]
            return PrefillOutput(None if rows is None else self._logits(rows), taken)

    def _add_and_norm(self, x: Tensor, update: Tensor | None, row_scale: Tensor | None, norm: str) -> Tensor:
        """x += residual_multiplier * row_scale * update; returns fp16 rms_norm(x) * weight."""
        import torch

        out = torch.empty(x.shape, dtype=torch.float16, device=self._device)
        alpha, eps = c_float(self._shape.residual_multiplier), c_float(self._shape.rms_norm_eps)
        weight = self._vectors[norm]
        self._launch("add_and_norm", len(x), x, update, row_scale, alpha, weight, eps, out, c_int(x.shape[1]))
        return out

    def _product(self, x: Tensor, matrices: Sequence[DeviceMatrix], dtype: torch.dtype) -> Tensor:
        """x [M, k] times the matrices' rows, side by side: [M, sum of n]."""
        rows = sum(m.n for m in matrices)
        weights = self._scratch[: rows * x.shape[1]].view(rows, x.shape[1])
        first = 0
        for matrix in matrices:
            self._dequantise(matrix, 0, weights[first : first + matrix.n])
            first += matrix.n
        return self._matmul(x, weights, dtype)

    def _dequantise(self, matrix: DeviceMatrix, first_row: int, out: Tensor) -> None:
        rows = out.shape[0]
        grid = (-(-rows // _WARPS), -(-matrix.k // _DEQUANTISED_PER_WARP), 1)
        self._launch("dequantise", grid, matrix.argument(), c_int(first_row), c_int(rows), out)

    def _attention(self, layer: int, qkv: Tensor, rotation: tuple[Tensor, Tensor], start: int, cache: Tensor) -> Tensor:
        """Rotate, attend, write the layer's cache: fp16 [M, heads * head_dim]."""
        import torch

        shape, tokens = self._shape, len(qkv)
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        end = start + tokens
        q = torch.empty(tokens, heads, dim, dtype=torch.float16, device=self._device)
        keys, values = torch.empty(2, kv_heads, end, dim, dtype=torch.float16, device=self._device)
        head_units = c_longlong(cache.stride(0) // 8)  # of 16 bytes

        def copy(name: str, first_block: int, end_block: int, end: int) -> None:
            sizes = (c_int(first_block), c_int(end), c_int(keys.shape[1]))
            grid = (end_block - first_block, kv_heads, 1)
            self._launch(f"{name}_{dim}", grid, cache, head_units, keys, values, *sizes)

        if start > 0:
            copy("read_cache", 0, -(-start // KV_BLOCK), start)
        norms = (self._vectors.get(f"layers.{layer}.q_norm"), self._vectors.get(f"layers.{layer}.k_norm"))
        sizes = [c_int(size) for size in (heads, kv_heads, dim, start, end)]
        grid = (tokens, -(-(heads + 2 * kv_heads) // _WARPS), 1)
        self._launch("rotate", grid, qkv, *rotation, *norms, c_float(shape.rms_norm_eps), q, keys, values, *sizes)
        copy("write_cache", start // KV_BLOCK, -(-end // KV_BLOCK), end)
        mixed = self._attend(q.transpose(0, 1), keys, values)
        return mixed.transpose(0, 1).reshape(tokens, heads * dim)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Causal attention [heads, M, dim] of the last M positions over keys, values [kv_heads, N, dim]."""
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        batch, scale = [t.unsqueeze(0) for t in (q, keys, values)], self._shape.attention_multiplier
        if q.is_cuda and torch.backends.cuda.is_flash_attention_available():
            # The operator itself, not the public function: its causal mask is aligned to the last key, and it reads
            # grouped keys in place.
            return torch.ops.aten._scaled_dot_product_flash_attention(*batch, 0.0, True, False, scale=scale)[0][0]
        first = keys.shape[1] - q.shape[1]
        mask = torch.ones(q.shape[1], keys.shape[1], dtype=torch.bool, device=q.device).tril(first)
        return scaled_dot_product_attention(*batch, attn_mask=mask, scale=scale, enable_gqa=True)[0]

    def _gate(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """silu(gate) * up over a power of two a row: fp16 [M, inner] and those powers, float32 [M]."""
        import torch

        tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
        gated = torch.empty(tokens, inner, dtype=torch.float16, device=self._device)
        row_scale = torch.empty(tokens, dtype=torch.float32, device=self._device)
        self._launch("gate", tokens, gate_up, gated, row_scale, c_int(inner))
        return gated, row_scale

    def _logits(self, rows: Tensor) -> Tensor:
        """float32 [len(rows), vocab]; the head is dequantised in slices that fit the scratch buffer."""
        import torch

        shape = self._shape
        logits = torch.empty(len(rows), shape.vocab_size, dtype=torch.float32, device=self._device)
        step = min(self._scratch.numel() // shape.hidden_size, shape.vocab_size)
        for first in range(0, shape.vocab_size, step):
            count = min(step, shape.vocab_size - first)
            weights = self._scratch[: count * shape.hidden_size].view(count, shape.hidden_size)
            self._dequantise(self._head, first, weights)
            logits[:, first : first + count] = self._matmul(rows, weights, torch.float32)
        return logits.div_(shape.logits_scaling)

    def _matmul(self, x: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """x [M, k] fp16 times weights [n, k] fp16, accumulated in float32, as `dtype`."""
        import torch

        return torch.mm(x, weights.t(), out_dtype=dtype) if dtype == torch.float32 else torch.mm(x, weights.t())

    def _launch(self, name: str, grid: int | tuple[int, int, int], *arguments: object) -> None:
        self._kernels[name].launch(grid, _THREADS, arguments, stream=self._stream)


class _full_precision_reductions:
    """Within it, cuBLAS adds the parts of a split fp16 product in float32, not in fp16 (torch's default)."""

    def __enter__(self) -> None:
        import torch

        self._before = torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def __exit__(self, *_: object) -> None:
        import torch

        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = self._before

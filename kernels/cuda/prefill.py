"""Prefill on the GPU: weights dequantised phase by phase into tensor-core products, keys and values written in place.

Each layer is, per chunk of M tokens: one dequantisation and one cuBLAS product for q+k+v, for o, for gate+up and for
down, flash attention, and five small kernels between them (prefill.cu). Weights come out of the decode kernel's own
tiles; a dequantised phase lives in one scratch buffer until the next takes its place. So a model needs no second copy
of itself, only the largest phase in fp16.

The host must enqueue some 600 operations a chunk faster than the GPU runs them, so launches are bound to their
arguments once (per model or per chunk) and only pointers and layer numbers change between them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_float, c_int, c_longlong, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kernels.cuda.driver import BoundLaunch, Kernel, Module
from kernels.cuda.kv_layout import KV_BLOCK
from kernels.cuda.phases import FORMAT_CODES, TILE_ROWS, KernelDims, Phase
from kernels.cuda.tiles import TiledWeights

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SOURCE = Path(__file__).parent / "prefill.cu"
CHUNK = 2048  # tokens; large enough to fill the tensor cores, small enough to cancel within 0.1 s
HEAD_DIMS = (64, 128, 256)

_THREADS = 256  # of every kernel in prefill.cu
_WARPS = _THREADS // 32
_KERNELS = ("dequantise", "embed", "add_and_norm", "rotate", "gate")


class _PackedRows(ctypes.Structure):
    """`PackedRows` of prefill_weights.cuh."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "scale", "minimum")),
        *((name, c_int) for name in ("k", "format", "group", "reserved")),
    )


class _Tiles(ctypes.Structure):
    """`Tiles` of prefill_weights.cuh."""

    _fields_ = (
        *((name, c_void_p) for name in ("data", "place")),
        *((name, c_int) for name in ("k", "format", "group_log2", "chunks", "chunk_blocks", "unit_blocks")),
        *((name, c_int) for name in ("unit_bytes", "rows_per_tile", "high_row")),
    )


@dataclass(frozen=True)
class EmbeddingTable:
    """The embedding [vocab, hidden] as packed, on the device; format: a key of FORMAT_CODES."""

    format: str
    group: int  # 0 for bf16
    q: Tensor
    scale: Tensor | None
    minimum: Tensor | None

    def rows(self, hidden: int) -> _PackedRows:
        """The kernel parameter that describes it."""
        return _PackedRows(
            q=self.q.data_ptr(),
            scale=self.scale.data_ptr() if self.scale is not None else None,
            minimum=self.minimum.data_ptr() if self.minimum is not None else None,
            k=hidden,
            format=FORMAT_CODES[self.format],
            group=self.group,
        )


@dataclass(frozen=True)
class PrefillOutput:
    """Device tensors, float32. logits [M, vocab], [1, vocab] or None; features: layer -> [M, hidden]."""

    logits: Tensor | None
    features: dict[int, Tensor]


def scratch_weights(dims: KernelDims) -> int:
    """Elements of the dequantised weights' buffer: the largest phase of a layer."""
    return dims.hidden * max(dims.qkv_rows, dims.heads * dims.head_dim, 2 * dims.intermediate)


def workspace_bytes(dims: KernelDims, context: int, tokens: int = CHUNK) -> int:
    """Device memory that a chunk of that many tokens needs beside weights and cache, cuBLAS's workspace included.
    context: positions, because attention reads one layer's keys and values from a plain copy."""
    per_token = (
        4 * dims.hidden * 2  # residual stream, a product's output
        + 2 * dims.hidden  # normed
        + 4 * dims.qkv_rows
        + 2 * dims.heads * dims.head_dim * 2  # rotated queries, attention's output
        + 2 * dims.intermediate * 3  # gate+up, gated
    )
    plain_cache = 2 * 2 * dims.kv_heads * dims.head_dim * context
    return 2 * scratch_weights(dims) + tokens * per_token + plain_cache + (64 << 20)


class Prefill:
    """Feeds chunks of a prompt. Not thread-safe; works on the calling thread's current torch stream."""

    def __init__(
        self,
        dims: KernelDims,
        weights: TiledWeights,
        embedding: EmbeddingTable,
        vectors: Mapping[str, Tensor],
        inverse_frequencies: Tensor,
        module: Module,
    ) -> None:
        """vectors: norms by canonical name; they and inverse_frequencies [head_dim / 2] are float32
        on the device. module: the loaded cubin of SOURCE. Raises ValueError for a head_dim not in HEAD_DIMS."""
        import torch

        if dims.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim is {dims.head_dim}, the kernels know {HEAD_DIMS}")
        self._dims, self._embedding, self._vectors, self._frequencies = dims, embedding, vectors, inverse_frequencies
        self._device = inverse_frequencies.device
        self._kernels = {name: module.kernel(name) for name in _KERNELS}
        self._kernels |= {name: module.kernel(f"{name}_{dims.head_dim}") for name in ("read_cache", "write_cache")}
        self._module = module
        self._scratch = torch.empty(scratch_weights(dims), dtype=torch.float16, device=self._device)
        dequantise = self._kernels["dequantise"]
        self._phases = {
            name: _PhaseWeights(dequantise, weights, name, self._scratch) for name in ("qkv", "o", "gate_up", "down")
        }
        self._head = _PhaseWeights(dequantise, weights, "head", self._scratch)
        self._norms = [
            tuple(self._pointer(f"layers.{i}.{name}") for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm"))
            for i in range(dims.layers)
        ]
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
        last block of 16 becomes zeros. features: layers whose entering residual stream is wanted (`layers` itself:
        before the final norm).
        """
        import torch

        self._module.use_device()
        self._stream = torch.cuda.current_stream().cuda_stream if self._device.type == "cuda" else 0
        taken: dict[int, Tensor] = {}
        with torch.inference_mode(), _full_precision_reductions():
            chunk = _Chunk(self, tokens, start)
            for layer in range(self._dims.layers):
                attn_norm, mlp_norm, q_norm, k_norm = self._norms[layer]
                self._add_and_norm(chunk.enter_layer, attn_norm)
                if layer in features:
                    taken[layer] = chunk.x.clone()
                self._product("qkv", layer, chunk.normed, chunk.qkv)
                mixed = self._attention(chunk, cache[layer], q_norm, k_norm)
                self._product("o", layer, mixed, chunk.update)
                self._add_and_norm(chunk.enter_mlp, mlp_norm)
                self._product("gate_up", layer, chunk.normed, chunk.gate_up)
                self._enqueue(chunk.gate)
                self._product("down", layer, chunk.gated, chunk.update)
                chunk.enter_layer.values[1].value = chunk.update.data_ptr()
            self._add_and_norm(chunk.enter_layer, self._pointer("final_norm"))
            if self._dims.layers in features:
                taken[self._dims.layers] = chunk.x.clone()
            rows = {"all": chunk.normed, "last": chunk.normed[-1:], "none": None}[logits]
            return PrefillOutput(None if rows is None else self._logits(rows), taken)

    def _add_and_norm(self, launch: BoundLaunch, weight: int | None) -> None:
        launch.values[4].value = weight
        self._enqueue(launch)

    def _product(self, phase: str, layer: int, x: Tensor, out: Tensor) -> None:
        """out [M, n] = x [M, k] times the phase's rows."""
        weights = self._phases[phase]
        weights.launch.values[1].value = layer
        self._enqueue(weights.launch)
        self._matmul(x, weights.transposed, out)

    def _attention(self, chunk: _Chunk, cache: Tensor, q_norm: int | None, k_norm: int | None) -> Tensor:
        """Rotate, write the layer's cache, attend: fp16 [M, heads * head_dim]."""
        place = cache.data_ptr()
        head_units = cache.stride(0) // 8  # of 16 bytes
        if chunk.read_cache is not None:
            chunk.read_cache.values[0].value, chunk.read_cache.values[1].value = place, head_units
            self._enqueue(chunk.read_cache)
        chunk.rotate.values[3].value, chunk.rotate.values[4].value = q_norm, k_norm
        self._enqueue(chunk.rotate)
        chunk.write_cache.values[0].value, chunk.write_cache.values[1].value = place, head_units
        self._enqueue(chunk.write_cache)
        mixed = self._attend(*chunk.attention_operands)
        return mixed.transpose(1, 2).reshape(len(chunk.x), -1)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Causal attention [1, heads, M, dim] of the last M positions over keys, values [1, kv_heads, N, dim]."""
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        scale = self._dims.attention_multiplier
        if q.is_cuda and torch.backends.cuda.is_flash_attention_available():
            # The operator itself, not the public function: its causal mask is aligned to the last key, and it reads
            # grouped keys in place.
            flash = torch.ops.aten._scaled_dot_product_flash_attention.default
            return flash(q, keys, values, 0.0, True, False, scale=scale)[0]
        mask = torch.ones(q.shape[2], keys.shape[2], dtype=torch.bool, device=q.device)
        mask = mask.tril(keys.shape[2] - q.shape[2])
        return scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)

    def _logits(self, rows: Tensor) -> Tensor:
        """float32 [len(rows), vocab]; the head is dequantised in slices that fit the scratch buffer."""
        import torch

        dims, head = self._dims, self._head
        logits = torch.empty(len(rows), dims.vocab, dtype=torch.float32, device=self._device)
        most = self._scratch.numel() // (TILE_ROWS * dims.hidden)
        for first in range(0, head.tiles, most):
            count = min(most, head.tiles - first)
            begin, end = first * TILE_ROWS, min((first + count) * TILE_ROWS, dims.vocab)
            self._enqueue(head.bind(first, count, end - begin))
            weights = self._scratch[: (end - begin) * dims.hidden].view(end - begin, dims.hidden)
            part = torch.empty(len(rows), end - begin, dtype=torch.float32, device=self._device)
            self._matmul(rows, weights.t(), part)
            logits[:, begin:end] = part
        return logits.div_(dims.logits_scaling)

    def _matmul(self, x: Tensor, weights: Tensor, out: Tensor) -> None:
        """out [M, n] fp16 or float32 = x [M, k] times weights [k, n], fp16, accumulated in float32."""
        import torch

        if out.dtype == x.dtype:
            torch.mm(x, weights, out=out)
        else:
            torch.mm(x, weights, out_dtype=out.dtype, out=out)

    def _enqueue(self, launch: BoundLaunch) -> None:
        launch.launch(self._stream)

    def _pointer(self, vector: str) -> int | None:
        return self._vectors[vector].data_ptr() if vector in self._vectors else None


class _PhaseWeights:
    """One phase's matrices, and the launch that dequantises a layer of them into the scratch buffer."""

    def __init__(self, kernel: Kernel, weights: TiledWeights, name: str, scratch: Tensor) -> None:
        import torch

        phase: Phase = weights.phases[name]
        self.tiles, self._kernel, self._scratch = phase.tiles, kernel, scratch
        self._places = torch.from_numpy(weights.places(name)).to(scratch.device)
        self._data = weights.data
        self._units = phase.k // 64 // phase.unit_blocks
        paired = name == "gate_up"
        self._argument = _Tiles(
            data=weights.data.data_ptr(),
            place=self._places.data_ptr(),
            k=phase.k,
            format=FORMAT_CODES[phase.format],
            group_log2=max(phase.group, 1).bit_length() - 1,
            chunks=phase.chunks,
            chunk_blocks=phase.blocks,
            unit_blocks=phase.unit_blocks,
            unit_bytes=phase.unit_bytes,
            rows_per_tile=TILE_ROWS // 2 if paired else TILE_ROWS,
            high_row=phase.rows // 2 if paired else TILE_ROWS // 2,
        )
        if name != "head":
            self.launch = self.bind(0, phase.tiles, phase.rows)
            self.transposed = scratch[: phase.rows * phase.k].view(phase.rows, phase.k).t()

    def bind(self, first_tile: int, count: int, rows: int) -> BoundLaunch:
        """Dequantises `rows` rows of tiles first_tile .. first_tile + count - 1; its second argument is the layer."""
        arguments = [self._argument, c_int(0), c_int(first_tile), c_int(count), c_int(rows), self._scratch]
        return self._kernel.bind(-(-count * self._units // _WARPS), _THREADS, arguments)


class _Chunk:
    """The buffers of one chunk at positions start .. end - 1, x filled with embeddings, and its launches."""

    def __init__(self, owner: Prefill, tokens: Sequence[int], start: int) -> None:
        import torch

        dims, device, kernels = owner._dims, owner._device, owner._kernels
        count, end, dim = len(tokens), start + len(tokens), dims.head_dim

        def buffer(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        half, single = torch.float16, torch.float32
        self.x = buffer(count, dims.hidden, dtype=single)
        self.normed = buffer(count, dims.hidden, dtype=half)
        self.update = buffer(count, dims.hidden, dtype=single)  # what attention, then the MLP, adds to x
        self.qkv = buffer(count, dims.qkv_rows, dtype=single)
        self.gate_up = buffer(count, 2 * dims.intermediate, dtype=half)
        self.gated = buffer(count, dims.intermediate, dtype=half)
        row_scale = buffer(count, dtype=single)
        q = buffer(count, dims.heads, dim, dtype=half)
        keys, values = buffer(2, dims.kv_heads, end, dim, dtype=half)
        self.attention_operands = q.transpose(0, 1).unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0)

        ids = torch.tensor(tokens, dtype=torch.int32, device=device)
        angles = torch.arange(start, end, device=device)[:, None].float() * owner._frequencies
        cosine, sine = angles.cos(), angles.sin()
        self._alive = ids, cosine, sine, row_scale  # launches hold bare pointers

        arguments = [owner._embedding.rows(dims.hidden), ids, c_float(dims.embedding_multiplier), self.x]
        embed = kernels["embed"].bind(count, _THREADS, arguments)
        owner._enqueue(embed)

        def add_and_norm(scale: Tensor | None, update: Tensor | None) -> BoundLaunch:
            alpha, eps, n = c_float(dims.residual_multiplier), c_float(dims.rms_norm_eps), c_int(dims.hidden)
            arguments = [self.x, update, scale, alpha, None, eps, self.normed, n]
            return kernels["add_and_norm"].bind(count, _THREADS, arguments)

        self.enter_layer = add_and_norm(row_scale, None)  # the first layer adds nothing
        self.enter_mlp = add_and_norm(None, self.update)
        sizes = [c_int(size) for size in (dims.heads, dims.kv_heads, dim, start, end)]
        heads = (count, -(-(dims.heads + 2 * dims.kv_heads) // _WARPS), 1)
        eps = c_float(dims.rms_norm_eps)
        arguments = [self.qkv, cosine, sine, None, None, eps, q, keys, values, *sizes]
        self.rotate = kernels["rotate"].bind(heads, _THREADS, arguments)

        def copy(name: str, first_block: int, last: int) -> BoundLaunch:
            sizes = (c_int(first_block), c_int(last), c_int(end))
            grid = (-(-last // KV_BLOCK) - first_block, dims.kv_heads, 1)
            return kernels[name].bind(grid, _THREADS, [None, c_longlong(0), keys, values, *sizes])

        self.read_cache = copy("read_cache", 0, start) if start else None
        self.write_cache = copy("write_cache", start // KV_BLOCK, end)
        arguments = [self.gate_up, self.gated, row_scale, c_int(dims.intermediate)]
        self.gate = kernels["gate"].bind(count, _THREADS, arguments)


class _full_precision_reductions:
    """Within it, cuBLAS adds the parts of a split fp16 product in float32, not in fp16 (torch's default)."""

    def __enter__(self) -> None:
        import torch

        self._before = torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def __exit__(self, *_: object) -> None:
        import torch

        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = self._before

"""What a user of stock PyTorch would write: the same packed weights through torch's own int4 matrix product and
attention, a step captured in a CUDA graph, eager or compiled.

int4 matrices keep their codes; torch's operator wants scale and zero in bfloat16, so the values differ by bfloat16's
rounding of the scales. int8 and bf16 matrices become bfloat16 (torch has no operator for our int8 groups). Activations
and KV cache are bfloat16. A step samples greedily on the device and feeds itself, so that nothing waits for the host.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.packed.matrix import Matrix
from engine.packed.model import PackedModel
from engine.packed.quantize import dequantize, unpack_nibbles

ZERO_CODE = 8  # torch's operator computes (q - 8) * scale + zero


def codes_and_scales(matrix: Matrix) -> tuple[Tensor, Tensor]:
    """An int4 matrix as torch's operator takes it: codes uint8 [n, k], scales and zeros bfloat16 [k/g, n, 2]."""
    assert matrix.format == "int4"
    assert matrix.scale is not None
    scale = matrix.scale.astype(np.float32)
    zero = np.zeros_like(scale) if matrix.minimum is None else matrix.minimum.astype(np.float32) + ZERO_CODE * scale
    both = torch.from_numpy(np.stack([scale.T, zero.T], axis=-1)).to(torch.bfloat16).contiguous()
    return torch.from_numpy(unpack_nibbles(matrix.q)), both


class Linear:
    """y = W x for x [1, k] bfloat16; by torch's int4 operator where the matrix is int4 and its shape is allowed."""

    def __init__(self, matrix: Matrix, device: torch.device) -> None:
        self.group = matrix.group
        self._on_cpu = device.type == "cpu"
        inner = next((tiles for tiles in (8, 4, 2) if matrix.k % (16 * tiles) == 0), 0)
        if matrix.format == "int4" and inner and matrix.n % 8 == 0:
            codes, scales = codes_and_scales(matrix)
            codes = codes.to(device)
            if self._on_cpu:
                self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), inner)
            else:
                pairs = (codes[:, 0::2] << 4) | codes[:, 1::2]
                self.packed = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), inner)
            self.scales: Tensor | None = scales.to(device)
        else:
            self.packed = torch.from_numpy(dequantize(matrix)).to(device, torch.bfloat16)
            self.scales = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.scales is None:
            return F.linear(x, self.packed)
        operator = torch.ops.aten._weight_int4pack_mm_for_cpu if self._on_cpu else torch.ops.aten._weight_int4pack_mm
        return operator(x, self.packed, self.group, self.scales)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + (0 if self.scales is None else self.scales.nbytes)


class Int4Decoder:
    """Decodes greedily from an empty cache of `context` positions; every step attends to all of them, masked."""

    def __init__(self, model: PackedModel, context: int, compiled: bool = False, device: str = "cuda") -> None:
        self.config, self.context = model.config, context
        self.device = torch.device(device)
        self.description = (
            f"torch {torch.__version__} int4 operators, {'compiled' if compiled else 'eager'}, CUDA graph"
        )
        config = model.config

        def linear(name: str) -> Linear:
            return Linear(model.matrix(name), self.device)

        def norm(name: str) -> Tensor:
            return torch.from_numpy(np.array(model.vector(name))).to(self.device)

        norms = ("attn_norm", "mlp_norm", *(("q_norm", "k_norm") if config.qk_norm else ()))
        self.layers: list[dict[str, Any]] = [
            {name: linear(f"layers.{i}.{name}") for name in ("q", "k", "v", "o", "gate", "up", "down")}
            | {name: norm(f"layers.{i}.{name}") for name in norms}
            for i in range(config.num_layers)
        ]
        self.embed = torch.from_numpy(dequantize(model.matrix("embed"))).to(self.device, torch.bfloat16)
        self.head = linear("embed" if config.tie_word_embeddings else "head")
        self.final_norm = norm("final_norm")
        angles = np.outer(np.arange(context), config.rope_inverse_frequencies())
        self.cos, self.sin = (torch.from_numpy(f(angles)).float().to(self.device) for f in (np.cos, np.sin))
        shape = (config.num_layers, 1, config.num_kv_heads, context, config.head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=torch.bfloat16, device=self.device) for _ in range(2))
        self.token, self.position = (torch.zeros(1, dtype=torch.long, device=self.device) for _ in range(2))
        self.ids = torch.zeros(context, dtype=torch.long, device=self.device)
        self._run = self._captured(compiled) if self.device.type == "cuda" else self._step

    @property
    def weight_bytes(self) -> int:
        """That one step reads."""
        linears = [part for layer in self.layers for part in layer.values()]
        return sum(part.nbytes for part in linears) + self.head.nbytes + self.final_norm.nbytes

    @property
    def kv_bytes(self) -> int:
        """Of one position."""
        return (self.keys.nbytes + self.values.nbytes) // self.context

    def decode(self, prompt: list[int], count: int) -> tuple[list[int], float]:
        """(`count` tokens, seconds of all but the first)."""
        if len(prompt) + count > self.context:
            raise ValueError(f"{len(prompt)} + {count} tokens do not fit {self.context}")
        self.position.zero_()
        with torch.inference_mode():
            for token in prompt:
                self.token.fill_(token)
                self._run()
            self._wait()
            start = time.perf_counter()
            for _ in range(count - 1):
                self._run()
            self._wait()
            seconds = time.perf_counter() - start
        return self.ids[len(prompt) - 1 : len(prompt) + count - 1].tolist(), seconds

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _captured(self, compiled: bool) -> Any:
        """The step as a CUDA graph's replay."""
        forward = torch.compile(self._forward, mode="max-autotune-no-cudagraphs") if compiled else self._forward

        def step() -> None:
            self._choose(forward(self.token, self.position))

        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.inference_mode(), torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        self.position.zero_()
        with torch.inference_mode(), torch.cuda.graph(graph):
            step()
        return graph.replay

    def _step(self) -> None:
        self._choose(self._forward(self.token, self.position))

    def _choose(self, logits: Tensor) -> None:
        best = logits.argmax(-1)
        self.ids.index_copy_(0, self.position, best)
        self.token.copy_(best)
        self.position.add_(1)

    def _forward(self, token: Tensor, position: Tensor) -> Tensor:
        """Logits [1, vocab] of feeding `token` [1] at `position` [1]."""
        config = self.config
        cos, sin = self.cos[position], self.sin[position]
        seen = (torch.arange(self.context, device=self.device) <= position).view(1, 1, 1, -1)
        x = self.embed[token] * config.embedding_multiplier
        for index, layer in enumerate(self.layers):
            h = self._norm(x, layer["attn_norm"])
            q, k, v = (layer[name](h).view(1, -1, 1, config.head_dim) for name in "qkv")
            if config.qk_norm:
                q, k = self._norm(q, layer["q_norm"]), self._norm(k, layer["k_norm"])
            keys, values = self.keys[index], self.values[index]
            keys.index_copy_(2, position, _rotate(k, cos, sin))
            values.index_copy_(2, position, v)
            mixed = F.scaled_dot_product_attention(
                _rotate(q, cos, sin), keys, values, attn_mask=seen, scale=config.attention_multiplier, enable_gqa=True
            )
            x = x + layer["o"](mixed.reshape(1, -1)) * config.residual_multiplier
            h = self._norm(x, layer["mlp_norm"])
            x = x + layer["down"](F.silu(layer["gate"](h)) * layer["up"](h)) * config.residual_multiplier
        return self.head(self._norm(x, self.final_norm)).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), weight, self.config.rms_norm_eps).to(torch.bfloat16)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split RoPE of x [..., head_dim] by cos, sin [1, head_dim / 2]."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)

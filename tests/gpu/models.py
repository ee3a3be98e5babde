"""Models for the GPU's tests: the real shapes, filled with random weights in memory, and the reference for them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from engine.backends.torch_reference import TorchReference
from engine.config import Family, Llama3RopeScaling, ModelConfig
from engine.packed.matrix import Matrix, Storage
from engine.packed.tensors import tensor_shapes
from kernels.cuda.kv_layout import unpack_keys, unpack_values

_LLAMA3 = Llama3RopeScaling(32.0, 1.0, 4.0, 8192)

# family, hidden, layers, heads, kv heads, head_dim, intermediate, vocabulary, tied, RoPE's theta
_SHAPES: dict[str, tuple[Family, int, int, int, int, int, int, int, bool, float]] = {
    "granite-3b": ("granite", 2560, 40, 40, 8, 64, 8192, 100352, True, 1e7),
    "granite-8b": ("granite", 4096, 40, 32, 8, 128, 12800, 100352, True, 1e7),
    "llama-3.2-1b": ("llama", 2048, 16, 32, 8, 64, 8192, 128256, True, 5e5),
    "llama-3.2-3b": ("llama", 3072, 28, 24, 8, 128, 8192, 128256, True, 5e5),
    "qwen3-0.6b": ("qwen3", 1024, 28, 16, 8, 128, 3072, 151936, True, 1e6),
    "qwen3-1.7b": ("qwen3", 2048, 28, 16, 8, 128, 6144, 151936, True, 1e6),
    "mistral-7b": ("mistral", 4096, 32, 32, 8, 128, 14336, 32768, False, 1e6),
    "smollm2-135m": ("llama", 576, 30, 9, 3, 64, 1536, 49152, True, 1e5),
}
SHAPES = tuple(_SHAPES)


def config_of(name: str, *, layers: int | None = None, vocab: int | None = None) -> ModelConfig:
    """The ModelConfig of a known shape, with fewer layers or a smaller vocabulary where asked."""
    family, hidden, depth, heads, kv_heads, dim, inner, words, tied, theta = _SHAPES[name]
    granite = family == "granite"
    return ModelConfig(
        family=family,
        hidden_size=hidden,
        num_layers=layers or depth,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        intermediate_size=inner,
        vocab_size=vocab or words,
        max_position_embeddings=131072,
        rms_norm_eps=1e-6 if family == "qwen3" else 1e-5,
        rope_theta=theta,
        rope_scaling=_LLAMA3 if name.startswith("llama-3.2") else None,
        tie_word_embeddings=tied,
        qk_norm=family == "qwen3",
        embedding_multiplier=12.0 if granite else 1.0,
        attention_multiplier=1 / dim if granite else dim**-0.5,
        residual_multiplier=0.22 if granite else 1.0,
        logits_scaling=10.0 if granite else 1.0,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


class RandomModel:
    """What a backend reads of a PackedModel, with uniformly random codes; a matrix has standard deviation K^-0.5.

    storage: of every matrix; single ones may be overridden by name.
    """

    def __init__(
        self,
        config: ModelConfig,
        storage: Storage | None = None,
        *,
        overrides: Mapping[str, Storage] | None = None,
        seed: int = 0,
    ) -> None:
        self.config = config
        rng = np.random.default_rng(seed)
        default = storage or Storage("int4", 128)
        self._matrices: dict[str, Matrix] = {}
        self._vectors: dict[str, np.ndarray] = {}
        for name, shape in tensor_shapes(config).items():
            if len(shape) == 1:
                self._vectors[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
            else:
                self._matrices[name] = _random(name, shape[0], shape[1], (overrides or {}).get(name, default), rng)

    def names(self) -> list[str]:
        return [*self._vectors, *self._matrices]

    def matrix_names(self) -> list[str]:
        return list(self._matrices)

    def matrix(self, name: str) -> Matrix:
        return self._matrices[name]

    def vector(self, name: str) -> np.ndarray:
        return self._vectors[name]

    @property
    def nbytes(self) -> int:
        return sum(m.nbytes for m in self._matrices.values()) + sum(v.nbytes for v in self._vectors.values())

    def reference(self, context_size: int) -> TorchReference:
        """torch_reference in float32 on the GPU, on the dequantised weights."""

        def tensor(name: str) -> Tensor:
            if name in self._vectors:
                return torch.from_numpy(self._vectors[name])
            return dequantised(self._matrices[name])

        return TorchReference(self.config, tensor, context_size=context_size, device="cuda")


def dequantised(matrix: Matrix) -> Tensor:
    """float32 [n, k] on the GPU, by the formulas of engine/packed/model.py."""
    q = torch.from_numpy(np.array(matrix.q)).cuda()
    if matrix.format == "bf16":
        return (q.to(torch.int32) << 16).view(torch.float32)
    if matrix.format == "int4":
        shifts = torch.arange(0, 32, 4, device="cuda", dtype=torch.int32)
        codes = ((q[:, :, None] >> shifts) & 15).view(matrix.n, matrix.k).float()
    else:
        codes = q.float()
    assert matrix.scale is not None
    scale = torch.from_numpy(np.array(matrix.scale)).cuda().float().repeat_interleave(matrix.group, dim=1)
    if matrix.minimum is not None:
        minimum = torch.from_numpy(np.array(matrix.minimum)).cuda().float().repeat_interleave(matrix.group, dim=1)
        return codes * scale + minimum
    return (codes - 8 if matrix.format == "int4" else codes) * scale


def plain_cache(cache: Tensor, config: ModelConfig, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` keys and values of the GPU's cache, float32 [layers, kv_heads, count, head_dim]."""
    keys, values = unpack_keys(cache[:, :, :, 0], config.head_dim), unpack_values(cache[:, :, :, 1], config.head_dim)
    return keys[:, :, :count].float(), values[:, :, :count].float()


def own_cache(reference: TorchReference) -> tuple[Tensor, Tensor]:
    """The reference's keys and values, as `plain_cache` gives the GPU's."""
    cache = reference._open_cache()
    return cache.keys[:, :, : cache.position], cache.values[:, :, : cache.position]


def adopt_cache(reference: TorchReference, cache: Tensor) -> float:
    """Let the reference go on from the GPU's keys and values; returns how far they were from its own.

    The cache rounds to fp16, and values that differ by a hair round apart: with random weights that alone moves the
    next logits (by 3e-3 when the cache was bf16). From a common cache, the next step compares arithmetic with
    arithmetic.
    """
    mine = own_cache(reference)
    theirs = plain_cache(cache, reference.config, reference.position)
    distance = max(relative_error(t, m) for t, m in zip(theirs, mine, strict=True))
    with torch.inference_mode():  # the reference's tensors were made in it
        for own, other in zip(mine, theirs, strict=True):
            own.copy_(other)
    return distance


def relative_error(value: np.ndarray | Tensor, truth: np.ndarray | Tensor) -> float:
    """|value - truth| / |truth|, Euclidean, over everything."""
    value, truth = (torch.as_tensor(t).double().cpu() for t in (value, truth))
    return float((value - truth).norm() / truth.norm())


def _random(name: str, n: int, k: int, storage: Storage, rng: np.random.Generator) -> Matrix:
    if storage.format == "bf16":
        values = rng.standard_normal((n, k), dtype=np.float32) * np.float32(k**-0.5)
        return Matrix(name, "bf16", n, k, 0, (values.view(np.uint32) >> 16).astype(np.uint16), None, None)
    levels, shape = {"int4": 16, "int8": 256}[storage.format], (n, k // storage.group)
    step = k**-0.5 * 12**0.5 / levels
    scale = (step * rng.uniform(0.5, 1.5, shape) * rng.choice([-1, 1], shape)).astype(np.float16)
    raw = rng.integers(0, 256, (n, k if storage.format == "int8" else k // 2), dtype=np.uint8)
    if storage.format == "int8":
        return Matrix(name, "int8", n, k, storage.group, raw.view(np.int8), scale, None)
    minimum = None if storage.symmetric else (-7.5 * scale.astype(np.float32)).astype(np.float16)
    return Matrix(name, "int4", n, k, storage.group, raw.view(np.int32), scale, minimum)

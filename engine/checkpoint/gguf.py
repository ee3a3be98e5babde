"""A GGUF model as a checkpoint: canonical names, un-permuted rows, and lossless repacking of its blocks."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import NoReturn

import numpy as np

from engine.checkpoint.base import Checkpoint
from engine.checkpoint.gguf_blocks import STORAGE, dequantize_rows, repack
from engine.checkpoint.gguf_config import config_from_gguf
from engine.checkpoint.gguf_file import GgufFile
from engine.config import ModelConfig
from engine.errors import CheckpointError, UnsupportedModel
from engine.packed.matrix import Matrix, Storage, all_finite
from engine.packed.quantize import dequantize
from engine.packed.tensors import tensor_shapes

_TOP = {"token_embd.weight": "embed", "output_norm.weight": "final_norm", "output.weight": "head"}
_LAYER = {
    "attn_norm": "attn_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "attn_output": "o",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}
_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,3})\.(\w+)\.(weight|bias)")
_ROPE_FREQS = "rope_freqs.weight"
# llama.cpp's converter reorders the rows of Q and K for its interleaved RoPE in these architectures only.
_PERMUTED = ("llama", "granite")


class GgufCheckpoint(Checkpoint):
    """Opens in about 0.1 s (the tokenizer's texts are most of it)."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self._where = str(path)
        self.metadata = self._file.metadata
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise UnsupportedModel(
                f"{path}: one part of a split GGUF is not supported",
                hint="join the parts with `llama-gguf-split --merge`",
            )
        self.directory = None
        self._source = {canonical: name for name in self._file.tensors if (canonical := self._canonical(name))}
        self.config = self._config()
        self._permuted = self.metadata["general.architecture"] in _PERMUTED
        self._check_shapes()
        types = Counter(self._type(name) for name in self.names() if len(self.shape(name)) == 2)
        self.format = f"gguf {types.most_common(1)[0][0]}"
        self._last: str | None = None

    def storage(self, name: str) -> Storage | None:
        return STORAGE.get(self._type(name)) if len(self.shape(name)) == 2 else None

    def exact(self, name: str) -> bool:
        return self._type(name) != "Q4_K"

    def quantized(self, name: str) -> bool:
        return self._type(name) not in ("F32", "F16", "BF16")

    def read_matrix(self, name: str) -> Matrix | None:
        return None if self.storage(name) is None else self._repack(name, slice(None))

    def read_float(self, name: str, rows: slice | None = None) -> np.ndarray:
        rows = rows or slice(None)
        if self.storage(name) is not None and self.exact(name):
            return dequantize(self._repack(name, rows))
        values = dequantize_rows(self._type(name), self._rows(name, rows))
        if not all_finite(values):
            self._fail_finite(name)
        return values if len(self.shape(name)) == 2 else values[0]

    def close(self) -> None:
        if self._last is not None:
            self._file.release(self._last)
            self._last = None

    def _type(self, name: str) -> str:
        return self._file.tensors[self._source[name]].type

    def _repack(self, name: str, rows: slice) -> Matrix:
        matrix = repack(name, self._type(name), self._rows(name, rows))
        if not matrix.is_finite():
            self._fail_finite(name)
        return matrix

    def _fail_finite(self, name: str) -> NoReturn:
        raise CheckpointError(f"{self._where}: {self._source[name]}: contains a value that is not finite")

    def _rows(self, name: str, rows: slice) -> np.ndarray:
        """The stored bytes of some rows, in the canonical row order."""
        source = self._source[name]
        if self._last not in (None, source):
            self._file.release(self._last)
        self._last = source
        stored = self._file.rows(source)
        heads = {"q": self.config.num_heads, "k": self.config.num_kv_heads}.get(name.rpartition(".")[2])
        if heads is None or not self._permuted:
            return stored[rows]
        return stored[half_split_order(heads, self.config.head_dim)[rows]]

    def _canonical(self, name: str) -> str | None:
        """Canonical name of a stored tensor; None for one that is not a weight. Refuses what it does not know."""
        if name == _ROPE_FREQS:
            return None
        if name in _TOP:
            return _TOP[name]
        match = _BLOCK.fullmatch(name)
        if match and match[2] in _LAYER and match[3] == "weight":
            return f"layers.{int(match[1])}.{_LAYER[match[2]]}"
        what = "a bias" if name.endswith(".bias") else "mixture of experts" if "_exp" in name else "an unknown tensor"
        raise UnsupportedModel(f"{self._where}: {name}: {what} is not supported")

    def _config(self) -> ModelConfig:
        embed = self._file.tensors.get("token_embd.weight")
        divisors = self._file.tensors.get(_ROPE_FREQS)
        if divisors is not None and (divisors.type != "F32" or len(divisors.shape) != 1):
            raise CheckpointError(f"{self._where}: {_ROPE_FREQS}: expected an F32 vector")
        return config_from_gguf(
            self.metadata,
            tied="head" not in self._source,
            vocab_size=embed.shape[0] if embed is not None and len(embed.shape) == 2 else None,
            rope_divisors=_floats(self._file.rows(_ROPE_FREQS)) if divisors is not None else None,
            where=self._where,
        )

    def _check_shapes(self) -> None:
        expected = tensor_shapes(self.config)
        for name, shape in expected.items():
            if name not in self._source:
                raise CheckpointError(f"{self._where}: missing tensor {name} (the file is incomplete)")
            stored = self._file.tensors[self._source[name]].shape
            if stored != shape:
                raise CheckpointError(
                    f"{self._where}: {self._source[name]}: shape {list(stored)}, the metadata needs {list(shape)}"
                )
        for name, source in self._source.items():
            if name not in expected:
                raise CheckpointError(f"{self._where}: {source}: not a tensor of this {self.config.family} model")


def half_split_order(heads: int, head_dim: int) -> np.ndarray:
    """Row order that undoes llama.cpp's Q/K permutation: result[r] is the stored row that belongs at row r.

    Its converter stores component i and i + head_dim/2 of a head side by side (rows 2i and 2i+1).
    """
    rows = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def _floats(rows: np.ndarray) -> tuple[float, ...]:
    return tuple(rows.reshape(-1).view("<f4").tolist())

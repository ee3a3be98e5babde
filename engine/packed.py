"""The packed format: what `flint pack` writes and every backend reads.

    <models_dir>/<name>/<variant>/     variant, e.g. "int4-g32", "int4-g128", "int8-g128", "bf16"
        manifest.json                  format version, ModelConfig, quantisation, source, licence, sha256 of every file
        weights.safetensors            the tensors below, memory-mapped
        tokenizer.json  chat_template.jinja   (optional: drafter.safetensors)

Tensor names (i is the layer): embed, layers.i.attn_norm, layers.i.q, .k, .v, .q_norm, .k_norm, .o, .mlp_norm, .gate,
.up, .down, final_norm, and head where the embedding is not tied. Rows of q and k are in half-split (NEOX) RoPE
order. Norms are float32 [n]. A matrix is [N, K] (out, in), stored as

    int4   <name>.q      int32 [N, K/8]   eight consecutive k per word, k = 8j in the low nibble, values 0..15
    int8   <name>.q      int8  [N, K]
    bf16   <name>        bf16  [N, K]     (held here as uint16, numpy has no bf16)
           <name>.scale  fp16  [N, K/g]
           <name>.min    fp16  [N, K/g]   only asymmetric int4

    w = (q - 8) * scale                symmetric int4
    w = q * scale + min                asymmetric int4
    w = q * scale                      int8
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

MatrixFormat = Literal["int4", "int8", "bf16"]


@dataclass(frozen=True)
class Matrix:
    """One weight matrix [n, k] (rows: outputs) in its stored form; arrays are usually views of a memory map."""

    name: str
    format: MatrixFormat
    n: int
    k: int
    group: int  # 32, 64 or 128 input channels per scale; 0 for bf16
    q: np.ndarray  # int4: int32 [n, k/8]; int8: int8 [n, k]; bf16: uint16 [n, k]
    scale: np.ndarray | None  # float16 [n, k/group]
    minimum: np.ndarray | None  # float16 [n, k/group], asymmetric int4 only

    @property
    def nbytes(self) -> int:
        """Bytes of values, scales and minima."""
        return self.q.nbytes + sum(a.nbytes for a in (self.scale, self.minimum) if a is not None)

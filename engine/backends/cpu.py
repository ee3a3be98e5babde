"""Decoding on the CPU through the native library of kernels/cpu.

Weights are re-tiled at load into the order in which a pass streams them, and the packed file's pages are let go: one
copy stays in memory. Matrices multiply as int4/int8 weights times int8 activations (a scale per 32 channels), bf16
weights times float32 ones; the KV cache is fp16 and its memory grows as it fills. A step of up to 8 tokens streams
the weights once and costs little more than one token; longer ones run in blocks as matrix products. Results are
bitwise the same for every number of threads and however tokens are split into steps.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from engine.backends.base import ByteLedger, StepOutput, TokenBatch
from engine.config import ModelConfig
from engine.errors import BackendError, ContextOverflow, DeviceOutOfMemory
from engine.files.paths import cache_dir
from engine.meter import step_ledger, tensor_kind
from engine.packed.matrix import Matrix
from engine.packed.model import PackedModel
from engine.sampling import Sampling
from kernels import native
from kernels.cpu.threads import default_threads

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
NORMS = ("attn_norm", "mlp_norm", "q_norm", "k_norm")
POLL_NS = 8_000_000  # a stream's tokens are handed over this often at most: two per frame at 60 Hz, and few wake-ups
PREFILL_BLOCK = 64  # tokens per matrix product in the library
_PADDED_HEAD = 16


def native_library() -> ctypes.CDLL:
    """The library, built into the cache on first use where it was not installed. Raises native.LibraryMissing."""
    return native.load(cache_dir() / "kernels")


class CpuBackend:
    """One model in the native library. One caller at a time; a forked child may go on using its copy."""

    name = "cpu"
    verify_width = 8

    def __init__(self, model: PackedModel, *, context_size: int | None = None, threads: int | None = None) -> None:
        """Load every tensor of `model`.

        context_size: most positions of the KV cache (None: the model's own limit; memory is taken as it fills).
        threads: None takes one per physical core within affinity and cgroup limits.

        Raises native.LibraryMissing where there is no library for this machine, DeviceOutOfMemory, BackendError.
        """
        self.config: ModelConfig = model.config
        self.context_size = context_size or model.config.max_position_embeddings
        self.threads = threads or default_threads()
        self._library = native_library()
        isa = native.isa(self._library)
        self.description = f"cpu {isa}, {self.threads} thread{'s' if self.threads > 1 else ''}"
        self._weight_bytes: dict[str, int] = {}
        self._stream: _CpuStream | None = None
        handle = self._create(model, isa)
        self._close = weakref.finalize(self, self._library.flint_model_free, handle)
        self._handle: int | None = handle
        self._load(model)

    @property
    def position(self) -> int:
        return self._library.flint_model_position(self._open())

    def step(
        self, tokens: Sequence[int], *, logits: Literal["all", "last"] = "all", features: Sequence[int] = ()
    ) -> StepOutput:
        handle, config, count = self._open(), self.config, len(tokens)
        if count == 0:
            raise ValueError("a step needs at least one token")
        if min(tokens) < 0 or max(tokens) >= config.vocab_size:
            raise ValueError(f"token ids must be in 0..{config.vocab_size - 1}")
        if self.position + count > self.context_size:
            raise ContextOverflow(f"{self.position + count} tokens do not fit the context of {self.context_size}")
        rows = count if logits == "all" else 1
        out = np.empty((rows, config.vocab_size), np.float32)
        taken = {layer: np.empty((count, config.hidden_size), np.float32) for layer in features}
        ids = np.asarray(tokens, np.int32)
        status = self._library.flint_model_step(
            handle,
            ids.ctypes.data,
            count,
            rows,
            out.ctypes.data,
            len(taken),
            (ctypes.c_int32 * len(taken))(*taken),
            (ctypes.c_void_p * len(taken))(*(array.ctypes.data for array in taken.values())),
        )
        _check(status, "step")
        return StepOutput(out, taken)

    def stream(
        self,
        token: int,
        *,
        sampling: Sampling,
        max_tokens: int,
        stop_ids: frozenset[int],
        history: Sequence[int],
    ) -> _CpuStream:
        """The whole loop in a native thread (engine/backends/base.py: WholeLoop).

        Raises ContextOverflow when the cache is full already, BackendError while another stream runs.
        """
        handle = self._open()
        if not history or history[-1] != token:
            raise ValueError("history must end with the token to be fed")
        if not 0 <= token < self.config.vocab_size:
            raise ValueError(f"token ids must be in 0..{self.config.vocab_size - 1}")
        if self.position >= self.context_size:
            raise ContextOverflow(f"the context of {self.context_size} tokens is full")
        options = native.SamplingOptions(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repeat_penalty=sampling.repeat_penalty if sampling.repeat_window > 0 else 1.0,
            top_k=min(sampling.top_k, self.config.vocab_size),
            repeat_window=min(sampling.repeat_window, 2**31 - 1),
            seed=sampling.seed,
        )
        ids = np.asarray(history, np.int32)
        stops = np.asarray(sorted(stop_ids), np.int32)
        stream = self._library.flint_stream_start(
            handle, ids.ctypes.data, len(ids), options, max_tokens, stops.ctypes.data, len(stops)
        )
        if not stream:
            raise BackendError("the cpu backend could not start a stream", "Another one may still be running.")
        self._stream = _CpuStream(self, stream)
        return self._stream

    def prefill_chunk(self) -> int:
        """Blocks of 64; 4 of them take about as long as a person notices on a 100 MB model, 1 on a larger one."""
        return PREFILL_BLOCK * (4 if sum(self._weight_bytes.values()) < 500e6 else 1)

    def truncate(self, position: int) -> None:
        if not 0 <= position <= self.position:
            raise ValueError(f"cannot truncate to {position}: the cache holds {self.position} tokens")
        _check(self._library.flint_model_truncate(self._open(), position), "truncate")

    def ledger(self, tokens: int, position: int) -> ByteLedger:
        ledger = step_ledger(self.config, self._weight_bytes, tokens, position, kv_element_bytes=2)
        head = self.config.head_dim
        padded = -(-head // _PADDED_HEAD) * _PADDED_HEAD
        return replace(ledger, kv_read=ledger.kv_read // head * padded, kv_written=ledger.kv_written // head * padded)

    def profile(self, on: bool = True) -> dict[str, float]:
        """Milliseconds per pass and phase since the clocks were switched on; then restart them, or switch them off."""
        sums = (ctypes.c_int64 * (len(native.PHASES) + 1))()
        self._library.flint_model_profile(self._open(), int(on), sums)
        passes = max(1, sums[len(native.PHASES)])
        return {name: sums[i] / passes / 1e6 for i, name in enumerate(native.PHASES)}

    def active_threads(self) -> int:
        """Threads in use: fewer than `threads` while other processes take the cores away."""
        return self._library.flint_model_active_threads(self._open())

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._handle = None
        self._close()

    # --- loading --------------------------------------------------------------------------------------------------

    def _create(self, model: PackedModel, isa: str) -> int:
        config = self.config
        weight_bytes = 0
        for name in model.names():
            if tensor_kind(name) == "norm":
                size = -(-4 * len(model.vector(name)) // 64) * 64
            else:
                size = self._library.flint_tiled_bytes(_packed(model.matrix(name)))
                if size == 0:
                    raise BackendError(f"the cpu backend cannot hold {name} as {model.storage(name)}")
            kind = tensor_kind(name)
            self._weight_bytes[kind] = self._weight_bytes.get(kind, 0) + size
            weight_bytes += size
        model.release()  # the scales were read, to check them
        shape = native.Shape(
            config.hidden_size,
            config.num_layers,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.intermediate_size,
            config.vocab_size,
            self.context_size,
            config.rms_norm_eps,
            config.embedding_multiplier,
            config.attention_multiplier,
            config.residual_multiplier,
            config.logits_scaling,
        )
        frequencies = np.ascontiguousarray(config.rope_inverse_frequencies(), np.float32)
        handle = self._library.flint_model_new(shape, frequencies.ctypes.data, isa.encode(), self.threads, weight_bytes)
        if not handle:
            raise DeviceOutOfMemory(
                f"Out of memory: {weight_bytes / 1e9:.2f} GB of weights and a context of {self.context_size} tokens",
                "Use a smaller model or a smaller --ctx.",
            )
        return handle

    def _load(self, model: PackedModel) -> None:
        """Tile matrix after matrix, letting go of each part of the file: the largest, the embedding, comes first, so
        that its two copies are never in memory on top of everything else."""
        embed = model.matrix("embed")
        head = None if self.config.tie_word_embeddings else model.matrix("head")
        final_norm = np.ascontiguousarray(model.vector("final_norm"))
        status = self._library.flint_model_set_ends(
            self._handle, _packed(embed), None if head is None else _packed(head), final_norm.ctypes.data
        )
        _check(status, "load the embedding")
        model.release()
        names = [name for name in NORMS if self.config.qk_norm or name not in ("q_norm", "k_norm")]
        for i in range(self.config.num_layers):
            matrices = [model.matrix(f"layers.{i}.{name}") for name in MATRICES]
            norms = [np.ascontiguousarray(model.vector(f"layers.{i}.{name}")) for name in names]
            packed = (native.PackedMatrix * len(MATRICES))(*(_packed(matrix) for matrix in matrices))
            pointers = (ctypes.c_void_p * len(NORMS))(*(norm.ctypes.data for norm in norms))  # absent ones stay null
            _check(self._library.flint_model_set_layer(self._handle, i, packed, pointers), f"load layer {i}")
            model.release()

    def _open(self) -> int:
        if self._handle is None:
            raise BackendError("the cpu backend is closed")
        return self._handle


class _CpuStream:
    """Tokens of a native decoding thread; `backend` is kept alive until the stream is done."""

    def __init__(self, backend: CpuBackend, handle: int) -> None:
        self._library: Any = backend._library
        self._backend = backend
        self._handle = handle
        self._close = weakref.finalize(self, self._library.flint_stream_free, handle)

    def __iter__(self) -> Iterator[TokenBatch]:
        ids = self._library.flint_stream_ids(self._handle)
        seconds = self._library.flint_stream_seconds(self._handle)
        state = ctypes.c_int()
        seen = 0
        try:
            while True:
                count = self._library.flint_stream_wait(self._handle, seen, POLL_NS, state)
                error = native.STREAM_ERRORS.get(state.value, "")
                if count > seen or error:
                    yield TokenBatch(ids[seen:count], seconds[seen:count], error)
                    seen = count
                if state.value != native.STREAM_RUNNING:
                    return
        finally:
            self.close()

    def cancel(self) -> None:
        if self._close.alive:
            self._library.flint_stream_cancel(self._handle)

    def close(self) -> None:
        """Cancel and wait for the decoding thread. Idempotent."""
        self._close()


def _packed(matrix: Matrix) -> native.PackedMatrix:
    """Pointers into the matrix's arrays, which the caller keeps alive."""
    format = "int4-min" if matrix.minimum is not None else matrix.format
    return native.PackedMatrix(
        native.FORMATS[format],
        matrix.n,
        matrix.k,
        matrix.group,
        matrix.q.ctypes.data,
        None if matrix.scale is None else matrix.scale.ctypes.data,
        None if matrix.minimum is None else matrix.minimum.ctypes.data,
    )


def _check(status: int, what: str) -> None:
    if status != 0:
        raise BackendError(f"the cpu backend failed to {what}: {native.ERRORS.get(status, status)}")

"""Decoding on an NVIDIA GPU: the megakernel for one to eight tokens and for whole replies, cuBLAS for the prompt.

A prompt's chunk runs through kernels.cuda.prefill, which writes the same KV cache. A reply is one launch: the kernel
samples, embeds its own samples and puts ids into pinned memory, where the stream below picks them up. With drafts by
prompt lookup, or by a learned head that the kernel holds, it is one launch, too, unless there is a repeat penalty,
which is another one after each draft: those replies are verified step by step from the host. A stream that brings
nothing for WATCHDOG_SECONDS is given up: the reply ends with an error and the app lives.

A held head has a layer of the KV cache. Steps fill it from the features of their tokens, which stay on the device;
single-pass streams leave it behind, and the next loop that needs it feeds what is missing again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from engine.backends.base import ByteLedger, LoopStep, StepOutput, TokenBatch
from engine.config import ModelConfig
from engine.errors import BackendError, ContextOverflow, DeviceOutOfMemory
from engine.files.paths import cache_dir
from engine.meter import step_ledger
from engine.packed.model import PackedModel
from engine.sampling import Sampling
from kernels.build import CompileError
from kernels.cuda.driver import OUT_OF_MEMORY, CudaError, Driver, Gpu, GpuUnavailable, NotResident
from kernels.cuda.phases import KernelDims

if TYPE_CHECKING:
    import torch

    from kernels.cuda.drafting import DraftCache, DraftHead
    from kernels.cuda.megakernel import DeviceSampling, Megakernel
    from kernels.cuda.prefill import Prefill
    from kernels.cuda.token_ring import TokenRing

DEFAULT_CONTEXT = 32768  # positions, where the model allows and memory has room
COLUMNS = 8  # most tokens that one pass of the megakernel takes
PASSES = 4  # longer steps run as prefill: 11 ms up to 512 tokens, as four passes of 8 (Granite-3B shape, H200)
POLL_SECONDS = 0.001  # between looks into pinned memory; the kernel does not notice
WATCHDOG_SECONDS = 10.0  # without a token; the slowest known one (8B in bf16, 128k positions) takes 0.05
CANCEL_SECONDS = 2.0  # that a cancelled kernel may take to end

_RESERVE_BYTES = 512 << 20  # cuBLAS, the CUDA context's own, and what torch's allocator rounds up


def find_gpu() -> Gpu:
    """The GPU this backend would use, asked without importing torch. BackendError says why there is none."""
    try:
        return Driver().gpu()
    except GpuUnavailable as error:
        raise BackendError(f"No GPU for the cuda backend: {error}", _sentence(error.hint)) from None
    except CudaError as error:
        raise BackendError(f"The NVIDIA driver failed: {error}", "Try nvidia-smi, or use --backend cpu.") from None


class CudaBackend:
    """One model on one GPU. One caller at a time; a stream's `cancel` may come from any thread."""

    name = "cuda"

    def __init__(
        self,
        config: ModelConfig,
        gpu: Gpu,
        megakernel: Megakernel,
        prefill: Prefill,
        *,
        context_size: int,
        columns: int = COLUMNS,
    ) -> None:
        """Over an opened megakernel and prefill, whose cache holds `context_size` positions. columns: the most tokens
        of one pass that this model and GPU allow."""
        self.verify_width = columns
        self.loop_widths = tuple(width for width in (2, 4, 8) if width <= columns)
        self.head_widths: tuple[int, ...] = ()  # of the loops in which a held head drafts
        self.config, self.context_size, self.gpu = config, context_size, gpu
        self.description = f"cuda {gpu.name}"
        self._megakernel: Megakernel | None = megakernel
        self._prefill: Prefill | None = prefill
        self._position = 0
        self._stream: _CudaStream | None = None
        self._drafts: DraftCache | None = None  # of a held head
        self._read: tuple[int, ...] = ()  # the layers whose features it needs
        self._lost = ""  # why the device is of no use any more

    @classmethod
    def from_packed(
        cls,
        model: PackedModel,
        *,
        context_size: int | None = None,
        progress: Callable[[str], None] | None = None,
        room_for_head: bool = False,
    ) -> CudaBackend:
        """Open a packed model on the GPU.

        context_size: positions of the KV cache; None takes the model's own, up to DEFAULT_CONTEXT and to what fits.
        progress: called with a line where something takes seconds (the first use compiles the kernels).
        room_for_head: whether the cache has a layer more, for `hold_head`.

        Raises BackendError (no GPU, an old driver, a torch without CUDA, a shape the kernels do not know),
        DeviceOutOfMemory.
        """
        gpu = find_gpu()
        try:
            import torch
        except ImportError:
            raise BackendError("The cuda backend needs torch", "Run: pip install torch") from None
        from kernels.cuda.token_ring import KernelStopped

        if not torch.cuda.is_available():
            raise BackendError(
                f"torch {torch.__version__} cannot use {gpu.name}",
                "Install a CUDA build of torch (https://pytorch.org/get-started), or use --backend cpu.",
            )
        config, driver = model.config, Driver()
        context_size = _fitting_context(model, context_size, driver.memory()[0])
        try:
            megakernel, prefill, columns = _open(model, gpu, driver, context_size, progress, room_for_head)
        except torch.OutOfMemoryError:
            raise _out_of_memory(model, context_size, driver.memory()[0]) from None
        except NotResident as error:
            raise _cannot_start(error) from error
        except (KernelStopped, CudaError, torch.AcceleratorError) as error:
            if isinstance(error, CudaError) and error.code == OUT_OF_MEMORY:
                raise _out_of_memory(model, context_size, driver.memory()[0]) from None
            raise BackendError(f"The GPU failed: {_line(error)}", "Try nvidia-smi, or use --backend cpu.") from error
        except CompileError as error:
            raise BackendError(
                f"The CUDA kernels cannot be built: {error}", "Run: pip install 'flint[cuda]'"
            ) from error
        return cls(config, gpu, megakernel, prefill, context_size=context_size, columns=columns)

    @property
    def position(self) -> int:
        self._settle_stream()
        return self._position

    def step(
        self, tokens: Sequence[int], *, logits: Literal["all", "last"] = "all", features: Sequence[int] = ()
    ) -> StepOutput:
        self._check_open()
        self._settle_stream()
        if not tokens:
            raise ValueError("a step needs at least one token")
        if min(tokens) < 0 or max(tokens) >= self.config.vocab_size:
            raise ValueError(f"token ids must be in 0..{self.config.vocab_size - 1}")
        end = self._position + len(tokens)
        if end > self.context_size:
            raise ContextOverflow(f"{end} tokens do not fit the context of {self.context_size}")
        with self._failures():
            if len(tokens) > PASSES * self.verify_width:
                output = self._run_prefill(tokens, logits, features)
            else:
                output = self._run_passes(tokens, logits, features)
        self._position = end
        return output

    def stream(
        self,
        token: int,
        *,
        sampling: Sampling,
        max_tokens: int,
        stop_ids: frozenset[int],
        history: Sequence[int],
    ) -> _CudaStream:
        megakernel, room = self._begin_stream(token, history)
        with self._failures():
            ring = megakernel.stream(
                token, self._position, _on_device(sampling), min(max_tokens, room), sorted(stop_ids), list(history)
            )
        self._stream = _CudaStream(self, ring)
        return self._stream

    def can_speculate(self, sampling: Sampling) -> bool:
        """Not with a repeat penalty: its window differs from draft to draft. Nor with a million tokens of context."""
        from kernels.cuda.plan import MOST_HISTORY

        penalised = sampling.repeat_penalty != 1.0 and sampling.repeat_window > 0
        return bool(self.loop_widths) and not penalised and self.context_size < MOST_HISTORY - 1

    def stream_speculative(
        self,
        token: int,
        *,
        sampling: Sampling,
        max_tokens: int,
        stop_ids: frozenset[int],
        history: Sequence[int],
        width: int,
        most_drafts: int | None = None,
        least_match: int = 1,
        learned: bool = False,
    ) -> _CudaStream:
        if width not in (self.head_widths if learned else self.loop_widths) or not self.can_speculate(sampling):
            raise ValueError(f"no speculative loop of {width} tokens with {sampling}")
        megakernel, room = self._begin_stream(token, history)
        if learned:
            self._catch_up(history)
        with self._failures():
            ring = megakernel.stream_speculative(
                self._position,
                _on_device(sampling),
                min(max_tokens, room),
                sorted(stop_ids),
                list(history),
                columns=width,
                most_drafts=width - 1 if most_drafts is None else most_drafts,
                least_match=least_match,
                learned=learned,
            )
        self._stream = _CudaStream(self, ring, self._drafts if learned else None)
        return self._stream

    # --- a learned head -------------------------------------------------------------------------------------------

    def hold_head(self, head: DraftHead, width: int) -> None:
        """Let the loops of `head_widths` draft with `head`. Compiles the kernel of the one of `width` tokens, or the
        next narrower, which takes seconds at first use; others are compiled when they are asked for.

        Raises BackendError where the kernel does not run this head, or has no room for it."""
        megakernel = self._check_open()
        self._settle_stream()
        with self._failures():
            try:
                drafts = megakernel.hold_drafter(head)
                widths = megakernel.draft_widths
                narrow = [held for held in widths if held <= width]
                megakernel.compile(narrow[-1] if narrow else widths[0], learned=True)
            except (ValueError, CompileError) as error:
                raise BackendError(f"the GPU's loop does not run this drafter: {error}") from None
        self._drafts, self._read, self.head_widths = drafts, head.dims.feature_layers, widths

    def head_bytes(self, passes: int) -> int:
        """Bytes of its weights that the held head reads after a step, to draft `passes` tokens."""
        return self._check_open().draft_bytes(passes)

    def _catch_up(self, history: Sequence[int]) -> None:
        """Bring the head's cache to the position, from which the last token of `history` will be fed."""
        drafts, position = self._drafts, self._position
        assert drafts is not None
        self._position = drafts.position
        while self._position < position:
            end = min(position, self._position + self.prefill_chunk())
            self.step(history[self._position : end], logits="last")
        with self._failures():
            drafts.complete(history[position])

    def _follow(self, tokens: Sequence[int], start: int, features: dict[int, torch.Tensor]) -> None:
        if self._drafts is not None:
            self._drafts.extend(tokens, start, features)

    def _begin_stream(self, token: int, history: Sequence[int]) -> tuple[Megakernel, int]:
        """The kernel, and the positions left; raises where `token` cannot be fed."""
        megakernel = self._check_open()
        self._settle_stream()
        if not history or history[-1] != token:
            raise ValueError("history must end with the token to be fed")
        if not 0 <= token < self.config.vocab_size:
            raise ValueError(f"token ids must be in 0..{self.config.vocab_size - 1}")
        room = self.context_size - self._position
        if room < 1:
            raise ContextOverflow(f"the context of {self.context_size} tokens is full")
        return megakernel, room

    def prefill_chunk(self) -> int:
        from kernels.cuda.prefill import CHUNK

        return CHUNK

    def truncate(self, position: int) -> None:
        self._check_open()
        if not 0 <= position <= self.position:
            raise ValueError(f"cannot truncate to {position}: the cache holds {self.position} tokens")
        self._position = position
        if self._drafts is not None:
            self._drafts.truncate(position)

    def ledger(self, tokens: int, position: int) -> ByteLedger:
        weights = self._check_open().weight_bytes
        return step_ledger(self.config, weights, tokens, position, kv_element_bytes=2)

    def close(self) -> None:
        megakernel, self._megakernel, self._prefill, self._drafts = self._megakernel, None, None, None
        if megakernel is None:
            return
        if self._stream is not None and not self._lost:
            self._stream.finish()
            self._stream = None  # it may hold the head's cache
        if not self._lost:  # freeing memory under a kernel that hangs would wait for it
            with contextlib.suppress(Exception):
                megakernel.close()

    def lose(self, reason: str) -> None:
        """Give the device up: every later call raises BackendError with that reason."""
        self._lost = self._lost or reason

    # --- one step -------------------------------------------------------------------------------------------------

    def _run_passes(self, tokens: Sequence[int], logits: Literal["all", "last"], features: Sequence[int]) -> StepOutput:
        """Up to verify_width tokens a pass of the megakernel."""
        import torch

        megakernel, width = self._check_open(), self.verify_width
        rows: list[torch.Tensor] = []
        wanted = sorted({*features, *self._read})
        taken: dict[int, list[torch.Tensor]] = {layer: [] for layer in wanted}
        for first in range(0, len(tokens), width):
            part = tokens[first : first + width]
            out, found = megakernel.step(part, self._position + first, all_logits=logits == "all", features=wanted)
            rows.append(out)
            for layer, tensor in found.items():
                taken[layer].append(tensor)
        kept = rows if logits == "all" else rows[-1:]
        joined = {layer: torch.cat(parts) for layer, parts in taken.items()}
        self._follow(tokens, self._position, joined)
        return StepOutput(torch.cat(kept).cpu().numpy(), {layer: joined[layer].cpu().numpy() for layer in features})

    def _run_prefill(
        self, tokens: Sequence[int], logits: Literal["all", "last"], features: Sequence[int]
    ) -> StepOutput:
        megakernel = self._check_open()
        assert self._prefill is not None
        wanted = sorted({*features, *self._read})
        output = self._prefill.run(tokens, self._position, megakernel.kv_cache, logits=logits, features=wanted)
        assert output.logits is not None
        self._follow(tokens, self._position, output.features)
        return StepOutput(
            output.logits.cpu().numpy(), {layer: output.features[layer].cpu().numpy() for layer in features}
        )

    # --- state and failure ----------------------------------------------------------------------------------------

    def _check_open(self) -> Megakernel:
        if self._lost:
            raise BackendError(self._lost, "Restart flint.")
        if self._megakernel is None:
            raise BackendError("the cuda backend is closed")
        return self._megakernel

    def _settle_stream(self) -> None:
        """End a stream that nobody read to its end, so that the position is known."""
        if self._stream is not None:
            self._stream.finish()
            self._stream = None
        if self._lost:
            raise BackendError(self._lost, "Restart flint.")

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Turns what the kernels, the driver and torch raise into one line."""
        import torch

        from kernels.cuda.token_ring import KernelStopped

        try:
            yield
        except torch.OutOfMemoryError as error:
            raise _no_memory_left() from error
        except NotResident as error:
            raise _cannot_start(error) from error
        except (KernelStopped, CudaError, torch.AcceleratorError) as error:
            if isinstance(error, CudaError) and error.code == OUT_OF_MEMORY:  # of a kernel to be loaded or launched
                raise _no_memory_left() from error
            self.lose(f"the GPU failed: {_line(error)}")  # a sticky CUDA error ends the whole context
            raise BackendError(self._lost, "Restart flint.") from error


class _CudaStream:
    """A reply under way: looks into the ring until the kernel ends, fails, or stops answering."""

    def __init__(self, backend: CudaBackend, ring: TokenRing, drafts: DraftCache | None = None) -> None:
        """drafts: the cache of the head that drafts in this loop."""
        self._backend, self._ring, self._drafts = backend, ring, drafts
        self._start = backend._position
        self._tokens = 0
        self._ended = False

    def __iter__(self) -> Iterator[TokenBatch]:
        heard = time.monotonic()
        while not self._ended:
            over = self._ring.done  # read first: tokens may arrive between the two looks, none after the end
            batch = self._poll()
            if batch.ids or batch.error:
                heard = time.monotonic()
                yield batch
            elif over:
                self._ended = True
                if self._drafts is not None:
                    self._drafts.took(self._backend._position)
            elif time.monotonic() - heard > WATCHDOG_SECONDS:
                yield self._give_up()
            else:
                time.sleep(POLL_SECONDS)

    def cancel(self) -> None:
        self._ring.cancel()

    def finish(self) -> None:
        """Cancel, and read to the end what was decoded by then."""
        if not self._ended:
            self.cancel()
            for _ in self:
                pass

    def _poll(self) -> TokenBatch:
        from kernels.cuda.token_ring import KernelStopped

        try:
            ids, seconds, steps = self._ring.poll_steps()
        except (KernelStopped, CudaError) as error:
            self._ended = True
            self._backend.lose(f"the GPU failed: {error}")
            return TokenBatch([], [], f"the GPU failed: {error}")
        self._tokens += len(ids)
        self._backend._position = self._start + self._tokens
        told = [LoopStep(step.tokens, step.drafted, step.accepted, step.match) for step in steps]
        return TokenBatch(ids, seconds, steps=told)

    def _give_up(self) -> TokenBatch:
        """The watchdog: a kernel that still obeys the stop flag costs the reply, one that does not costs the device."""
        self._ended = True
        silence = f"the GPU kernel brought no token for {WATCHDOG_SECONDS:.0f} s"
        self._ring.cancel()
        deadline = time.monotonic() + CANCEL_SECONDS
        while not self._ring.done and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if self._ring.done:
            return TokenBatch([], [], f"{silence}; it was stopped")
        self._backend.lose(f"{silence} and does not stop")
        return TokenBatch([], [], f"{silence} and does not stop")


# --- opening ------------------------------------------------------------------------------------------------------


def _on_device(sampling: Sampling) -> DeviceSampling:
    from kernels.cuda.megakernel import DeviceSampling

    return DeviceSampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repeat_penalty=sampling.repeat_penalty,
        repeat_window=sampling.repeat_window,
        seed=sampling.seed,
    )


def kernel_dims(config: ModelConfig) -> KernelDims:
    """What the kernels need to know of a model."""
    return KernelDims(
        hidden=config.hidden_size,
        layers=config.num_layers,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        qk_norm=config.qk_norm,
        tied_head=config.tie_word_embeddings,
        embedding_multiplier=config.embedding_multiplier,
        attention_multiplier=config.attention_multiplier,
        residual_multiplier=config.residual_multiplier,
        logits_scaling=config.logits_scaling,
    )


def _open(
    model: PackedModel,
    gpu: Gpu,
    driver: Driver,
    context_size: int,
    progress: Callable[[str], None] | None,
    room_for_head: bool,
) -> tuple[Megakernel, Prefill, int]:
    import numpy as np
    import torch

    from kernels.build import architecture, compile_cubin
    from kernels.cuda.driver import Module
    from kernels.cuda.megakernel import Megakernel
    from kernels.cuda.phases import format_of
    from kernels.cuda.prefill import SOURCE, EmbeddingTable, Prefill

    config, cache, dims = model.config, cache_dir() / "kernels", kernel_dims(model.config)
    matrices = {name: model.matrix(name) for name in model.matrix_names()}
    vectors = {name: np.array(model.vector(name)) for name in model.names() if name not in matrices}
    frequencies = config.rope_inverse_frequencies()
    try:
        megakernel = Megakernel(
            dims,
            matrices,
            vectors,
            frequencies,
            context_size,
            columns=COLUMNS,
            room_for_drafter=room_for_head,
            cubin_cache=cache,
            progress=progress,
        )
        widths = megakernel.widths()
        columns = max(widths)
        for width in widths:
            megakernel.compile(width)
        megakernel.settle()
        cubin = compile_cubin(
            SOURCE,
            arch=architecture(gpu.capability),
            cache=cache,
            driver_version=gpu.driver_version,
            progress=progress,
        )
        embed = matrices["embed"]
        opened = Prefill(
            dims,
            megakernel.tiled_weights,
            EmbeddingTable(format_of(embed), embed.group, *megakernel.embedding),
            {name: torch.from_numpy(vector).cuda() for name, vector in vectors.items()},
            torch.from_numpy(frequencies).cuda(),
            Module(driver, cubin.code),
        )
        # cuBLAS and flash attention load their kernels at first use (0.2 s): here, not before the first token.
        opened.run([0] * min(64, context_size), 0, megakernel.kv_cache, logits="last")
        return megakernel, opened, columns
    except ValueError as error:
        raise BackendError(f"The cuda backend does not decode this model: {error}", "Use --backend cpu.") from error


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _cannot_start(error: NotResident) -> BackendError:
    return BackendError(
        f"The kernel cannot start: {error}", "Another program holds the GPU; close it, or use --backend cpu."
    )


def _fixed_bytes(model: PackedModel) -> int:
    """Device memory that does not depend on the context: tiled weights, the embedding as packed, the workspace."""
    from kernels.cuda.prefill import workspace_bytes

    embedding = model.matrix("embed").nbytes if model.config.tie_word_embeddings else 0  # else it is not tiled
    return model.nbytes + embedding + workspace_bytes(kernel_dims(model.config), context=0) + _RESERVE_BYTES


def _position_bytes(config: ModelConfig) -> int:
    """Device memory of one position: fp16 keys and values of every layer and a drafter's, and prefill's plain copy of
    one layer."""
    return 2 * 2 * config.kv_size * (config.num_layers + 2)


def _fitting_context(model: PackedModel, wanted: int | None, free: int) -> int:
    """The context to open with; raises DeviceOutOfMemory where `wanted`, or any context at all, does not fit."""
    fits = (free - _fixed_bytes(model)) // _position_bytes(model.config) // 16 * 16
    context = wanted or min(model.config.max_position_embeddings, DEFAULT_CONTEXT, max(fits, 16))
    if context > fits:
        raise _out_of_memory(model, context, free)
    return context


def _out_of_memory(model: PackedModel, context: int, free: int) -> DeviceOutOfMemory:
    fixed, per_position = _fixed_bytes(model), _position_bytes(model.config)
    fits = (free - fixed) // per_position // 16 * 16
    message = (
        f"Out of GPU memory: weights and workspace {fixed / 1e9:.2f} GB, KV cache for {context} positions "
        f"{context * per_position / 1e9:.2f} GB, free {free / 1e9:.2f} GB"
    )
    if fits >= 256:
        return DeviceOutOfMemory(message, f"The largest context that fits is --ctx {fits}.")
    return DeviceOutOfMemory(message, "No context fits: use a smaller model or fewer bits, or --backend cpu.")


def _no_memory_left() -> DeviceOutOfMemory:
    return DeviceOutOfMemory(
        "The GPU is out of memory in the middle of a step", "Close what else uses it, or take a smaller --ctx."
    )


def _sentence(hint: str) -> str:
    return hint[:1].upper() + hint[1:] + "." if hint else ""

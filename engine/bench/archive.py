"""A benchmark as one file for strangers: a zip of JSON documents, scrubbed on the way in, distrusted on the way out.

    manifest.json      format version, flint's version and commit, when, and the command
    environment.json   machine, software, clocks (engine/bench/environment.py)
    quick.json         `flint bench quick --json`
    compare.json       `flint bench compare --json`, with every sample

Nothing is ever unpacked to disk. Reading takes these names and no others, each up to MAX_BYTES.
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

from engine.bench.privacy import Scrubber
from engine.errors import ArchiveError, CheckpointError, DiskFull
from engine.files.reading import open_regular
from engine.files.strict_json import parse_object

FORMAT_VERSION = 1
PARTS = ("manifest", "environment", "quick", "compare")
MAX_BYTES = 4 << 20  # of one document; a comparison of 100 rounds takes 50 kB
MAX_ARCHIVE = (len(PARTS) + 1) * MAX_BYTES
_NEVER = (1980, 1, 1, 0, 0, 0)  # a zip's entries need a date; the manifest has the true one


def write(path: Path, parts: dict[str, dict[str, Any]], scrub: Scrubber | None = None) -> None:
    """Scrub and write PARTS, atomically. Raises ArchiveError where the file exists or cannot be written."""
    assert set(parts) == set(PARTS)
    scrub = scrub or Scrubber.of_this_machine()
    partial = require_new(path)
    try:
        with zipfile.ZipFile(partial, "x", zipfile.ZIP_DEFLATED) as archive:
            for name in PARTS:
                entry = zipfile.ZipInfo(f"{name}.json", _NEVER)
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, json.dumps(scrub(parts[name]), indent=1, allow_nan=False) + "\n")
        os.replace(partial, path)
    except OSError as error:
        kind = DiskFull if error.errno == 28 else ArchiveError
        raise kind(f"{path} cannot be written: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def require_new(path: Path) -> Path:
    """Where the archive is written before it takes its name. Raises ArchiveError, also where no file can be made."""
    if path.exists():
        raise ArchiveError(f"{path} exists already", "Give another name with -o.")
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        partial.touch(exist_ok=False)
        partial.unlink()
    except OSError as error:
        raise ArchiveError(f"{path} cannot be written: {error.strerror}", "Give another place with -o.") from None
    return partial


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The documents by name. Raises ArchiveError, in one line, for whatever `write` could not have written."""
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > MAX_ARCHIVE:  # its table of contents would be read whole
                raise ArchiveError(f"{path.name} is not a benchmark archive: larger than {MAX_ARCHIVE >> 20} MiB")
            with zipfile.ZipFile(file) as archive:
                return _documents(archive, path.name)
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise ArchiveError(f"{path.name} is not a benchmark archive ({error or type(error).__name__})") from None
    except CheckpointError as error:
        raise ArchiveError(str(error)) from None


def _documents(archive: zipfile.ZipFile, where: str) -> dict[str, dict[str, Any]]:
    names = archive.namelist()
    if sorted(names) != sorted(f"{name}.json" for name in PARTS):
        raise ArchiveError(f"{where} is not a benchmark archive: it holds {len(names)} entries, not the four of one")
    documents = {}
    for name in PARTS:
        with archive.open(f"{name}.json") as file:
            data = file.read(MAX_BYTES + 1)  # what an entry says of its own size is not believed
        if len(data) > MAX_BYTES:
            raise ArchiveError(f"{where}: {name}.json is larger than {MAX_BYTES >> 20} MiB")
        documents[name] = parse_object(data, f"{where}: {name}.json")
    version = documents["manifest"].get("format_version")
    if version != FORMAT_VERSION:
        raise ArchiveError(f"{where}: format version {version!r}; this flint reads version {FORMAT_VERSION}")
    return documents

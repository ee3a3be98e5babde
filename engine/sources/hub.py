"""Downloads a model from the Hugging Face hub into its standard cache: resumed after a cut, every digest checked.

huggingface_hub decides endpoint, token, cache folder and offline mode (HF_ENDPOINT, HF_TOKEN, HF_HOME,
HF_HUB_OFFLINE) and links the finished files into a snapshot. The bytes are streamed here, because its own download
starts from zero after an interruption and does not compare digests. Its cache names each file by digest
(`blobs/<digest>`), so a file that has been verified can be put there for every other tool to use.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine.errors import FetchError, FlintError, UnsupportedModel, printable
from engine.files.locking import locked
from engine.progress import Progress, Report, check_cancelled, silent
from engine.sources import catalog
from engine.sources.catalog import HubSource

CHUNK_BYTES = 1 << 20
CHANGED_HINT = "try again; if it persists, the mirror in HF_ENDPOINT or a proxy changes files"
ATTEMPTS = 5  # in a row without a single new byte
TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
REVISION = re.compile(r"[A-Za-z0-9][\w.-]*")
SHARD = re.compile(r"model-\d{5}-of-(?P<count>\d{5})\.safetensors")


@dataclass(frozen=True)
class RemoteFile:
    """One file of a repository. digest: sha256 of the content for a large (LFS) file, else git's sha1 of the blob."""

    name: str
    size: int
    digest: str


@dataclass(frozen=True)
class Listing:
    """The files that packing needs, at one commit of a branch or tag (`revision`)."""

    repo: str
    revision: str
    commit: str
    licence: str
    files: tuple[RemoteFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def list_files(source: HubSource) -> Listing:
    """Ask the hub which files there are, how large they are and what their digests must be; the cache, when offline.

    Raises FetchError, or UnsupportedModel for a repository without safetensors weights.
    """
    _check_endpoint()
    from huggingface_hub import HfApi, constants

    try:
        timeout = constants.HF_HUB_ETAG_TIMEOUT  # without it a silent network would hang for minutes
        info = HfApi().model_info(source.repo, revision=source.revision, files_metadata=True, timeout=timeout)
    except Exception as error:
        cached = _cached_listing(source) if _is_network_error(error) else None
        if cached is not None:
            return cached
        raise _explain(error, source.repo) from error
    present: dict[str, RemoteFile] = {}
    for sibling in info.siblings or ():
        digest = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
        # What a hub says becomes a file's name and its expected length.
        if isinstance(sibling.size, int) and sibling.size >= 0 and isinstance(digest, str) and DIGEST.fullmatch(digest):
            present[sibling.rfilename] = RemoteFile(sibling.rfilename, sibling.size, digest)
    licence = printable(str((info.card_data or {}).get("license") or ""))[:60]
    commit = info.sha or source.revision
    if not REVISION.fullmatch(commit):
        raise _no_hub(constants.ENDPOINT)
    return Listing(source.repo, source.revision, commit, licence, _needed(source.repo, present))


def _check_endpoint() -> None:
    """huggingface_hub fails at its import, or at its first request, with a traceback for what is no address."""
    endpoint = os.environ.get("HF_ENDPOINT")
    if endpoint is None:
        return
    try:
        parts = urlsplit(endpoint)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port out of range, a bracket that does not close
        sound = False
    if not (sound and endpoint.isprintable()):
        raise FetchError(f"HF_ENDPOINT is {endpoint!r}, which is no address", "unset it, or write http(s)://HOST")


def missing_bytes(listing: Listing) -> int:
    """What a download would still have to transfer, partial files counted."""
    return sum(file.size - _bytes_here(listing, file) for file in listing.files)


def download(listing: Listing, report: Report = silent, cancel: threading.Event | None = None) -> Path:
    """Bring every file of the listing into the hub's cache and return the snapshot folder that holds them.

    An interrupted download continues where it stopped, also in another process. Raises FetchError and Cancelled.
    """
    from huggingface_hub import hf_hub_download

    meter = _Meter(listing.size, report, cancel)
    folders = set()
    for file in listing.files:
        _ensure(listing, file, meter)
        try:
            path = Path(hf_hub_download(listing.repo, file.name, revision=listing.commit))
        except Exception as error:
            raise _explain(error, listing.repo) from error
        if path.resolve().name != file.digest and _digest(path, file) != file.digest:
            raise _wrong_digest(listing.repo, file)
        folders.add(path.parent)
    with contextlib.suppress(Exception):  # asking by branch notes in the cache which commit it is, for offline use
        hf_hub_download(listing.repo, listing.files[0].name, revision=listing.revision)
    (snapshot,) = folders
    return snapshot


def hub_folder() -> Path:
    """The hub's cache folder, as huggingface_hub sees it."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _needed(repo: str, present: dict[str, RemoteFile]) -> tuple[RemoteFile, ...]:
    """Configuration and text files, then the weights in safetensors; duplicates in other formats are left out."""
    if INDEX_FILE in present:
        weights = [INDEX_FILE, *sorted(name for name in present if SHARD.fullmatch(name))]
    else:
        weights = [SINGLE_FILE] if SINGLE_FILE in present else []
    if not weights or "config.json" not in present:
        raise UnsupportedModel(
            f"{repo} has no config.json with safetensors weights",
            "if it offers a GGUF file, download that and run `flint pack FILE.gguf`",
        )
    return tuple(present[name] for name in [*TEXT_FILES, *weights] if name in present)


def _cached_listing(source: HubSource) -> Listing | None:
    """The listing of a complete snapshot in the hub's cache, or None. Its files are named by their digests."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(source.repo, "config.json", revision=source.revision)
    if not isinstance(config, str):
        return None
    snapshot = Path(config).parent
    present = {
        path.name: RemoteFile(path.name, path.stat().st_size, path.resolve().name)
        for path in snapshot.iterdir()
        if path.is_file() and DIGEST.fullmatch(path.resolve().name)
    }
    try:
        files = _needed(source.repo, present)
    except UnsupportedModel:
        return None
    shards = [match for file in files if (match := SHARD.fullmatch(file.name))]
    if any(int(match["count"]) != len(shards) for match in shards):
        return None  # some were never downloaded
    return Listing(source.repo, source.revision, snapshot.name, "", files)


class _Meter:
    """Adds up the bytes of all files and looks at the cancel flag on each report."""

    def __init__(self, total: int, report: Report, cancel: threading.Event | None) -> None:
        self.done = 0  # bytes of finished files
        self.total = total
        self.report = report
        self.cancel = cancel

    def __call__(self, stage: Any, name: str, here: int) -> None:
        check_cancelled(self.cancel)
        self.report(Progress(stage, name, self.done + here, self.total))


def _ensure(listing: Listing, file: RemoteFile, meter: _Meter) -> None:
    """Make the file's verified blob exist in the cache."""
    blob = _blob(listing, file)
    here = _cached(listing, file)
    if here is not None and _digest(here, file, meter) == file.digest:
        meter.done += file.size
        return
    blob.parent.mkdir(parents=True, exist_ok=True)
    lock = hub_folder() / ".locks" / blob.parent.parent.name / f"{file.digest}.lock"  # huggingface_hub's own
    with locked(lock, meter.cancel, lambda: meter("wait", file.name, 0)):
        if here is None and blob.exists() and _digest(blob, file, meter) == file.digest:  # another process was faster
            meter.done += file.size
            return
        part = blob.with_name(f"{file.digest}.flint-part")
        _stream(listing, file, part, meter)
        os.replace(part, blob)
        if here is not None and here != blob:  # a copy outside blobs/, where links are not possible, and a corrupt one
            here.unlink()
    meter.done += file.size


def _stream(listing: Listing, file: RemoteFile, part: Path, meter: _Meter) -> None:
    """Fill `part` with the file, from where it ends now, and check the digest. The part survives an interruption."""
    from huggingface_hub import hf_hub_url

    url = hf_hub_url(listing.repo, file.name, revision=listing.commit)
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            digest = _append(url, file, part, meter)
            break
        except Exception as error:
            if not _is_transient(error):
                raise _explain(error, listing.repo) from error
            gained = (part.stat().st_size if part.exists() else 0) > before
            failures = 0 if gained else failures + 1
            if failures >= ATTEMPTS:
                raise _explain(error, listing.repo) from error
            _pause(min(2.0**failures / 2, 8.0), meter.cancel)
    if digest != file.digest:
        part.unlink()
        raise _wrong_digest(listing.repo, file)


def _append(url: str, file: RemoteFile, part: Path, meter: _Meter) -> str:
    """One request for what `part` lacks; returns the digest of the whole. Raises when the connection is cut."""
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    with part.open("a+b") as out:
        if out.tell() > file.size:
            out.truncate(0)
        digest = _hasher(file)
        out.seek(0)
        while chunk := out.read(CHUNK_BYTES):
            digest.update(chunk)
            check_cancelled(meter.cancel)
        start = out.tell()
        if start == file.size:
            return digest.hexdigest()
        headers = build_hf_headers() | {"Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
            if response.status_code >= 400:
                response.read()
            hf_raise_for_status(response)
            if start and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                out.truncate(0)  # the server ignored the range and sends the whole file
                digest, start = _hasher(file), 0
            for chunk in response.iter_bytes():  # as they arrive: a larger chunk would be lost in a cut
                start += len(chunk)
                if start > file.size:
                    raise FetchError(
                        f"{file.name} is longer than the {file.size} bytes that the hub announces", CHANGED_HINT
                    )
                out.write(chunk)
                digest.update(chunk)
                meter("download", file.name, start)
        out.flush()
        os.fsync(out.fileno())
    if start < file.size:
        raise ConnectionError(f"{file.name} ended after {start} of {file.size} bytes")
    return digest.hexdigest()


def _pause(seconds: float, cancel: threading.Event | None) -> None:
    if cancel is None:
        time.sleep(seconds)
    else:
        cancel.wait(seconds)
        check_cancelled(cancel)


def _blob(listing: Listing, file: RemoteFile) -> Path:
    from huggingface_hub.file_download import repo_folder_name

    return hub_folder() / repo_folder_name(repo_id=listing.repo, repo_type="model") / "blobs" / file.digest


def _cached(listing: Listing, file: RemoteFile) -> Path | None:
    """The file in the cache, of the right size, or None."""
    from huggingface_hub import try_to_load_from_cache

    blob = _blob(listing, file)
    linked = try_to_load_from_cache(listing.repo, file.name, revision=listing.commit)
    for path in (blob, Path(linked) if isinstance(linked, str) else None):
        if path is not None and path.is_file() and path.stat().st_size == file.size:
            return path
    return None


def _bytes_here(listing: Listing, file: RemoteFile) -> int:
    if _cached(listing, file) is not None:
        return file.size
    part = _blob(listing, file).with_name(f"{file.digest}.flint-part")
    return min(part.stat().st_size, file.size) if part.exists() else 0


def _hasher(file: RemoteFile) -> Any:
    """A hash object that ends at `file.digest` after the file's content."""
    if len(file.digest) == 64:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)


def _digest(path: Path, file: RemoteFile, meter: _Meter | None = None) -> str:
    digest = _hasher(file)
    done = 0
    with path.open("rb") as content:
        while chunk := content.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            if meter is not None:
                meter("verify", file.name, done)
    return digest.hexdigest()


def _wrong_digest(repo: str, file: RemoteFile) -> FetchError:
    return FetchError(
        f"{repo}: {file.name} arrived with another digest than the hub announces; it was deleted",
        CHANGED_HINT,
    )


def _is_network_error(error: BaseException) -> bool:
    """The hub could not be reached at all, or must not be (HF_HUB_OFFLINE)."""
    return _status(error) is None and isinstance(error, _transport_errors())


def _is_transient(error: BaseException) -> bool:
    status = _status(error)
    return status in (408, 429) or (status or 0) >= 500 or _is_network_error(error)


def _transport_errors() -> tuple[type[BaseException], ...]:
    """Connection failures. The hub's HTTP library (httpx, later httpx2) is named by its error's base class."""
    from huggingface_hub.errors import HfHubHTTPError

    return (ConnectionError, TimeoutError, next(c for c in HfHubHTTPError.__mro__ if c.__name__ == "HTTPError"))


def _status(error: BaseException) -> int | None:
    """The HTTP status of the hub's answer, if there was an answer."""
    return getattr(getattr(error, "response", None), "status_code", None)


def _explain(error: Exception, repo: str) -> Exception:
    """One line and what to do for whatever the hub's library or the disk raised."""
    from huggingface_hub import constants
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RevisionNotFoundError

    if isinstance(error, FlintError):
        return error
    endpoint, status = constants.ENDPOINT, _status(error)
    page = f"{endpoint}/{repo}"
    token = "set HF_TOKEN to a token with read access (or run `hf auth login`)"
    if isinstance(error, GatedRepoError):
        return FetchError(f"{repo} is gated: its licence must be accepted first", f"accept it at {page}, then {token}")
    if status == 401:
        return FetchError(f"The hub refuses {repo} (401): it is private, gated or misspelt", f"check {page}; {token}")
    if status == 403:
        return FetchError(f"The hub forbids {repo} to this token (403)", f"ask for access at {page}; {token}")
    if isinstance(error, RevisionNotFoundError | EntryNotFoundError) or status == 404:
        near = catalog.near_matches(repo.rpartition("/")[2], list(catalog.CATALOG))
        hint = f"did you mean {' or '.join(near)}?" if near else "check the spelling, or HF_ENDPOINT"
        return FetchError(f"{page} does not exist (404)", hint)
    if isinstance(error, HFValidationError):
        return FetchError(f"{repo!r} is not a hub repository's name", "write it as ORGANISATION/NAME")
    if status is not None:
        return FetchError(f"The hub answered {status} for {repo}", "try again later; what was downloaded is kept")
    if constants.HF_HUB_OFFLINE:
        return FetchError(f"{repo} is not in the hub's cache, and HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES):
        return error  # the disk's failure, not the hub's: told by the caller, who knows how much is needed
    if _is_network_error(error):
        return FetchError(
            f"No connection to {endpoint}", "check the network; what was downloaded is kept, run it again"
        )
    if isinstance(error, ValueError | KeyError | TypeError | AttributeError | RecursionError):
        return _no_hub(endpoint)
    return error


def _no_hub(endpoint: str) -> FetchError:
    return FetchError(f"{endpoint} gave an answer that is not the hub's", "check HF_ENDPOINT")

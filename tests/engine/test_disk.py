"""engine/files/disk.py: room on the disk."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.errors import DiskFull, FlintError
from engine.files.disk import (
    MARGIN_BYTES,
    disk_errors,
    existing_parent,
    human_bytes,
    require_room,
    require_writable,
)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (92_871_040, "92.9 MB"),
        (6_805_672_960, "6.81 GB"),
        (10**15, "1e+03 TB"),
    ],
)
def test_human_bytes(size: int, text: str) -> None:
    assert human_bytes(size) == text


def test_needs_on_one_disk_add_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free = 10**9
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    half = (free - MARGIN_BYTES) // 2
    require_room([(tmp_path / "a" / "not" / "there", half), (tmp_path / "b", half)], "Packing x")
    with pytest.raises(DiskFull, match=r"Packing x needs 1 GB in .*, which has 1 GB free") as failure:
        require_room([(tmp_path / "a", half), (tmp_path / "b", half + 2)], "Packing x")
    assert "FLINT_CACHE_DIR" in failure.value.hint


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_one_line(code: int, tmp_path: Path) -> None:
    with (
        pytest.raises(DiskFull, match="The disk filled up while x was being packed"),
        disk_errors(tmp_path, "x was being packed"),
    ):
        raise OSError(code, os.strerror(code))


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FlintError, match=r"Cannot write .*file") as failure, disk_errors(tmp_path, "x"):
        (tmp_path / "file" / "folder").mkdir()
    assert "FLINT_CACHE_DIR" in failure.value.hint


def test_a_folder_that_cannot_be_made_is_one_line() -> None:
    folder = Path("/proc/flint/models")
    if not Path("/proc/self").exists():
        pytest.skip("no /proc here")
    with pytest.raises(FlintError, match=r"^Cannot write /proc/flint: ") as failure, disk_errors(folder, "x"):
        folder.mkdir(parents=True)
    assert "FLINT_CACHE_DIR" in failure.value.hint


def test_a_failing_disk_is_one_line(tmp_path: Path) -> None:
    with (
        pytest.raises(FlintError, match=f"Cannot write {tmp_path}: {os.strerror(errno.EIO)}"),
        disk_errors(tmp_path, "x"),
    ):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_other_failures_pass_through(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), disk_errors(tmp_path, "x"):
        raise FileNotFoundError(errno.ENOENT, "gone", str(tmp_path / "weights"))


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000])
def test_a_name_too_long_for_the_file_system_is_one_line(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    assert existing_parent(folder) == tmp_path
    with pytest.raises(FlintError, match=r"^Cannot write ") as failure, disk_errors(folder, "x"):
        folder.mkdir(parents=True)
    assert "FLINT_CACHE_DIR" in failure.value.hint


def test_a_folder_that_may_not_be_written_is_found_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_writable(tmp_path / "a" / "b")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(FlintError, match=f"Cannot write {tmp_path}") as failure:
        require_writable(tmp_path / "a" / "b")
    assert "FLINT_CACHE_DIR" in failure.value.hint

"""Whatever stands where a model's file should be: one line and what to do, at once and in little memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.checkpoint import open_checkpoint
from engine.errors import CheckpointError, FlintError
from engine.files.reading import FileMissing, read_file, read_text
from engine.packed.model import PackedModel
from engine.packing import PackOptions, pack
from engine.text.tokenizer import Tokenizer
from tests.hugging_face_folders import write_hf_folder
from tests.synthetic import write_random_packed

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")


def a_folder(path: Path) -> None:
    path.mkdir()


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_loop(path: Path) -> None:
    path.symlink_to(path.name)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_terabyte(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def deep_json(path: Path) -> None:
    path.write_text("[" * 100_000)


KINDS = (a_folder, a_pipe, a_loop, a_device, a_terabyte, deep_json)
HF_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
PACKED_FILES = ("manifest.json", "tokenizer.json", "weights.safetensors", "chat_template.jinja")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*HF_FILES, "chat_template.jinja"])
def test_a_folder_to_pack_that_holds_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: Callable[[Path], None]
) -> None:
    monkeypatch.setenv("FLINT_CACHE_DIR", str(tmp_path / "cache"))
    folder = write_hf_folder(tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    kind(folder / name)
    if name == "chat_template.jinja" and kind is deep_json:
        pytest.skip("any text may be a template")
    if kind is a_loop and name in ("generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
        pack(str(folder))  # a link to nowhere is an optional file that is not there
        return
    with pytest.raises(FlintError) as failure:
        pack(str(folder), PackOptions())
    assert failure.value.hint
    assert not list((tmp_path / "cache").rglob("manifest.json"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PACKED_FILES)
def test_a_packed_model_that_holds_something_else(tmp_path: Path, name: str, kind: Callable[[Path], None]) -> None:
    directory = write_random_packed(tmp_path / "model" / "int4")
    (directory / name).unlink(missing_ok=True)
    kind(directory / name)
    with pytest.raises(FlintError) as failure:
        PackedModel.open(directory)
    assert failure.value.hint


@pytest.mark.parametrize("kind", KINDS)
def test_a_gguf_file_that_is_something_else(tmp_path: Path, kind: Callable[[Path], None]) -> None:
    kind(tmp_path / "m.gguf")
    with pytest.raises(FlintError) as failure:
        pack(str(tmp_path / "m.gguf"))
    assert failure.value.hint
    with pytest.raises(FlintError) as failure:
        open_checkpoint(tmp_path / "m.gguf")
    assert failure.value.hint


def test_reading_is_limited_and_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"abc\xff")
    assert read_file(file, 4) == b"abc\xff"
    with pytest.raises(CheckpointError, match="x: larger than 3 bytes"):
        read_file(file, 3)
    with pytest.raises(CheckpointError, match=r"x: not UTF-8 \(at byte 3\)"):
        read_text(file, 4)
    with pytest.raises(FileMissing, match="y: no such file"):
        read_file(tmp_path / "y", 4)


def test_a_tokenizer_is_read_from_a_folder_whose_name_is_not_utf8(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system's names are UTF-8")
    assert Tokenizer.from_file(write_hf_folder(folder / "m") / "tokenizer.json").encode("a")

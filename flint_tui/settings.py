"""The user's settings: settings.json, which the app writes, and keys.toml, which it only reads.

# keys.toml
[keys]
toggle_mode = "ctrl+s"
regenerate = "f5,ctrl+r"
"""

from __future__ import annotations

import json
import os
import string
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from engine.errors import CheckpointError, FlintError
from engine.files.paths import config_dir
from engine.files.reading import FileMissing, read_text

MOST_BYTES = 64 << 10  # of either file; all actions with their keys are 2 KiB
MOST_TOLD = 5  # lines that are wrong; each is a notification


class SettingsError(FlintError):
    """A settings file is malformed, or has a key that flint does not know."""


@dataclass(frozen=True)
class Settings:
    """theme: a theme's name, "" for flint-dark. panels: show the sidebar. tint: colour accepted draft tokens."""

    theme: str = ""
    panels: bool = True
    tint: bool = False

    @classmethod
    def load(cls) -> Settings:
        """Raises SettingsError, naming the file and the key."""
        path = config_dir() / "settings.json"
        try:
            raw = json.loads(read_text(path, MOST_BYTES))
        except FileMissing:
            return cls()
        except CheckpointError as error:
            raise SettingsError(str(error), "correct or remove it") from None
        except (ValueError, RecursionError) as error:
            raise SettingsError(f"{path}: {error}", "correct or remove it") from None
        if not isinstance(raw, dict):
            raise SettingsError(f"{path}: expected an object", "correct or remove it")
        known = {field.name: type(field.default) for field in fields(cls)}
        for key, value in raw.items():
            if key not in known:
                raise SettingsError(f"{path}: unknown setting {key!r}", f"known: {', '.join(known)}")
            if type(value) is not known[key]:
                raise SettingsError(f"{path}: {key} must be a {known[key].__name__}", "correct or remove it")
        return cls(**raw)

    def save(self) -> None:
        """Atomic; a failure is not worth an interruption."""
        path = config_dir() / "settings.json"
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()


def keys_path() -> Path:
    return config_dir() / "keys.toml"


def load_keys(known: tuple[str, ...]) -> tuple[dict[str, str], list[SettingsError]]:
    """Action id -> keys, and what was wrong: a line that is not understood, an unknown action, a key that is none or
    set before. Each costs its own entry, whose default stays; where something is set twice, the first counts."""
    path = keys_path()
    try:
        text = read_text(path, MOST_BYTES).removeprefix("\ufeff")  # some editors begin with a byte order mark
    except FileMissing:
        return {}, []
    except CheckpointError as error:
        return {}, [SettingsError(str(error), "correct or remove it")]
    entries, problems = _entries(text)
    keys: dict[str, str] = {}
    taken: dict[str, str] = {}  # key -> the action that has it
    for action, value in entries:
        problem, hint = _key_problem(action, value, known)
        if not problem and action in keys:
            problem, hint = f"{action} is set twice", "the first counts"
        names = [] if problem else [name.strip() for name in str(value).split(",")]
        twice = next((name for name in names if name in taken), None)
        if twice is not None:
            problem, hint = f"{twice} is set for {taken[twice]} and for {action}", "the first counts"
        if problem:
            problems.append((problem, hint))
            continue
        keys[action] = str(value)
        taken |= dict.fromkeys(names, action)
    told = [SettingsError(f"{path}: {problem}", hint) for problem, hint in problems[:MOST_TOLD]]
    if len(problems) > MOST_TOLD:
        told.append(SettingsError(f"{path}: {len(problems) - MOST_TOLD} more like these", "correct or remove it"))
    return keys, told


def _entries(text: str) -> tuple[list[tuple[str, object]], list[tuple[str, str]]]:
    """What stands in [keys], and (problem, hint) of everything else. Where the whole is no TOML, line by line."""
    problems = []
    try:
        raw = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        pass
    else:
        keys = raw.pop("keys", {})
        problems = [(f"{name}: expected one table, [keys]", "correct or remove it") for name in raw]
        if not isinstance(keys, dict):
            return [], [*problems, ("keys: expected a table, [keys]", "correct or remove it")]
        return list(_flat(keys)), problems
    entries: list[tuple[str, object]] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            if line.split("#")[0].strip() != "[keys]":
                entries += _flat(tomllib.loads(line))
        except (tomllib.TOMLDecodeError, RecursionError):
            problem = f"line {number} is not understood: {line.strip()[:60]}"
            problems.append((problem, 'write, for example, stop = "f5"'))
    return entries, problems


def _flat(table: dict[str, object]) -> Iterator[tuple[str, object]]:
    """composer.newline without its quotes is a table in TOML; the action is meant all the same."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", deeper) for inner, deeper in value.items())
        else:
            yield name, value


def _key_problem(action: str, value: object, known: tuple[str, ...]) -> tuple[str, str]:
    """What is wrong with an entry by itself, and a hint; "" where nothing is."""
    if action not in known:
        return f"unknown action {action!r}", f"known: {', '.join(known)}"
    if not isinstance(value, str) or not value.strip():
        return f"{action} must name its keys in a string", 'for example "ctrl+s"'
    for name in value.split(","):
        if not _is_key(name.strip()):
            return f"{action}: there is no key {name.strip()!r}", 'for example "ctrl+s,f5"'
    return "", ""


def _is_key(name: str) -> bool:
    """Whether a terminal could send it: a character or a key's name after any modifiers."""
    from textual.keys import Keys, key_to_character

    *modifiers, key = name.split("+") if name != "+" else [name]
    if not set(modifiers) <= {"ctrl", "alt", "shift", "super", "hyper", "meta"}:
        return False
    named = {known.value.split("+")[-1] for known in Keys}
    character = key if len(key) == 1 else key_to_character(key)  # "question_mark"; the names of all of Unicode
    return key in named or (character is not None and (character.isalnum() or character in string.punctuation))

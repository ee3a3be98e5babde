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
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from engine.errors import FlintError
from engine.files.paths import config_dir


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
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError) as error:
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


def load_keys(known: tuple[str, ...]) -> dict[str, str]:
    """Action id -> keys. Raises SettingsError for an unknown id, a value that is no string, or a key that is none."""
    path = keys_path()
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path}: {error}", "correct or remove it") from None
    keys = raw.pop("keys", {})
    if raw or not isinstance(keys, dict):
        raise SettingsError(f"{path}: expected one table, [keys]", "correct or remove it")
    for action, key in keys.items():
        if action not in known:
            raise SettingsError(f"{path}: unknown action {action!r}", f"known: {', '.join(known)}")
        if not isinstance(key, str) or not key.strip():
            raise SettingsError(f"{path}: {action} must name its keys in a string", 'for example "ctrl+s"')
        for name in key.split(","):
            if not _is_key(name.strip()):
                raise SettingsError(f"{path}: {action}: there is no key {name.strip()!r}", 'for example "ctrl+s,f5"')
    return keys


def _is_key(name: str) -> bool:
    """Whether a terminal could send it: a character or a key's name after any modifiers."""
    from textual.keys import Keys, key_to_character

    *modifiers, key = name.split("+") if name != "+" else [name]
    if not set(modifiers) <= {"ctrl", "alt", "shift", "super", "hyper", "meta"}:
        return False
    named = {known.value.split("+")[-1] for known in Keys}
    character = key if len(key) == 1 else key_to_character(key)  # "question_mark"; the names of all of Unicode
    return key in named or (character is not None and (character.isalnum() or character in string.punctuation))

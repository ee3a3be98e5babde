"""Where flint keeps its files."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from engine.errors import FlintError


def cache_dir() -> Path:
    """Packed models, downloads and compiled kernels: FLINT_CACHE_DIR, else the platform's cache folder."""
    return _named_by("FLINT_CACHE_DIR") or Path(platformdirs.user_cache_dir("flint", appauthor=False))


def models_dir() -> Path:
    """Packed models: `<models_dir>/<name>/<variant>/`."""
    return cache_dir() / "models"


def data_dir() -> Path:
    """Conversations and results: FLINT_DATA_DIR, else the platform's data folder."""
    return _named_by("FLINT_DATA_DIR") or Path(platformdirs.user_data_dir("flint", appauthor=False))


def config_dir() -> Path:
    """The user's settings: FLINT_CONFIG_DIR, else the platform's configuration folder."""
    return _named_by("FLINT_CONFIG_DIR") or Path(platformdirs.user_config_dir("flint", appauthor=False))


def user_path(text: str) -> Path:
    """A path that somebody typed; ~ of a user who does not exist stays as it is.

    Ask os.path about it, not the Path: Path.exists and the like raise for a name too long or a folder that is closed.
    """
    return Path(os.path.expanduser(text))


def _named_by(variable: str) -> Path | None:
    text = os.environ.get(variable)
    if not text:
        return None
    folder = user_path(text)
    if str(folder).startswith("~"):  # taken literally, it would be made in whatever folder flint runs in
        raise FlintError(f"{variable} is {text}: there is no such user", "set it to a folder that you may write")
    return folder


def asset(name: str) -> Path:
    """A file that ships with flint: "prompts/heldout.jsonl"."""
    import assets

    assert assets.__file__ is not None
    return Path(assets.__file__).parent / name

"""Where flint keeps its files."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """Packed models, downloads and compiled kernels: FLINT_CACHE_DIR, else the platform's cache folder."""
    override = os.environ.get("FLINT_CACHE_DIR")
    return Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("flint", appauthor=False))


def models_dir() -> Path:
    """Packed models: `<models_dir>/<name>/<variant>/`."""
    return cache_dir() / "models"


def data_dir() -> Path:
    """Conversations and results: FLINT_DATA_DIR, else the platform's data folder."""
    override = os.environ.get("FLINT_DATA_DIR")
    return Path(override).expanduser() if override else Path(platformdirs.user_data_dir("flint", appauthor=False))


def config_dir() -> Path:
    """The user's settings: FLINT_CONFIG_DIR, else the platform's configuration folder."""
    override = os.environ.get("FLINT_CONFIG_DIR")
    return Path(override).expanduser() if override else Path(platformdirs.user_config_dir("flint", appauthor=False))


def asset(name: str) -> Path:
    """A file that ships with flint: "prompts/heldout.jsonl"."""
    import assets

    assert assets.__file__ is not None
    return Path(assets.__file__).parent / name

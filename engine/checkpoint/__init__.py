"""Readers of other people's checkpoints: GGUF files and Hugging Face folders of safetensors."""

from __future__ import annotations

from pathlib import Path

from engine.checkpoint.base import Checkpoint
from engine.errors import CheckpointError, ModelNotFound
from engine.files.reading import open_regular

__all__ = ["Checkpoint", "open_checkpoint"]


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a .gguf file or a Hugging Face folder (config.json and *.safetensors).

    Raises ModelNotFound where nothing is, CheckpointError for what is malformed, UnsupportedModel for what is not
    decoded by flint.
    """
    path = Path(path)
    if path.is_dir():
        from engine.checkpoint.hugging_face import open_folder

        return open_folder(path)
    if not path.exists():
        raise ModelNotFound(f"{path}: no such file or directory")
    if path.suffix == ".gguf" or _magic(path) == b"GGUF":
        from engine.checkpoint.gguf import GgufCheckpoint

        return GgufCheckpoint(path)
    raise CheckpointError(f"{path}: neither a GGUF file nor a folder", hint="give the folder that holds config.json")


def _magic(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read(4)

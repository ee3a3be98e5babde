"""The GGUF that llama.cpp and transformers are given: the very file that the packed model came from."""

from __future__ import annotations

import hashlib
from pathlib import Path

from engine.config import ModelConfig
from engine.packed.model import PackedModel


def find_gguf(model: PackedModel, given: Path | None) -> tuple[Path | None, str]:
    """(the file, "") or (None, why there is none). given: by the user; else where the model was packed from."""
    source = model.manifest.source
    path = given or Path(source.location)
    if given is None and (path.suffix.lower() != ".gguf" or not path.is_file()):
        return None, "needs the GGUF that the model was packed from: give it with --gguf FILE"
    if not path.is_file():
        return None, f"{path.name} is not a file"
    if source.sha256:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != source.sha256:
            return None, f"{path.name} is not the file that {model.manifest.name} was packed from (sha256 differs)"
    return path.resolve(), ""


def gguf_bytes_per_token(path: Path, config: ModelConfig, positions: float) -> float:
    """Bytes that decoding a token reads from the GGUF's tensors, and from an fp16 KV cache of so many positions."""
    from gguf import GGUFReader

    tensors = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(str(path)).tensors}
    if "output.weight" in tensors:  # not tied: of the embedding only one row is read
        del tensors["token_embd.weight"]
    return sum(tensors.values()) + 2 * 2 * config.num_layers * config.kv_size * positions

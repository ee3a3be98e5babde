"""A Hugging Face folder as a checkpoint: config.json, *.safetensors (one or sharded), plain or compressed-tensors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from engine.checkpoint.base import Checkpoint
from engine.checkpoint.compressed_tensors import SUFFIXES, PackedWeight, check_quantization
from engine.checkpoint.hf_config import config_from_hf
from engine.config import ModelConfig
from engine.errors import CheckpointError, UnsupportedModel
from engine.files.reading import read_file
from engine.files.safetensors_file import SafetensorsFile
from engine.files.strict_json import Record, parse_object
from engine.packed.matrix import Matrix, Storage, all_finite
from engine.packed.quantize import from_bf16
from engine.packed.tensors import tensor_shapes

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_JSON = 8 << 20  # the index of a 400B model is under 1 MB
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
_FLOATS = ("BF16", "F16", "F32")

_TOP = {"model.embed_tokens": "embed", "model.norm": "final_norm", "lm_head": "head"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "self_attn.o_proj": "o",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
_LAYER_NAME = re.compile(r"model\.layers\.(0|[1-9]\d{0,3})\.(.+)")
_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # a buffer that old exports carry
_FUSED = ("qkv_proj", "gate_up_proj", "W_pack", "query_key_value")


class HuggingFaceCheckpoint(Checkpoint):
    """Shards are memory-mapped; opening reads their headers only."""

    def __init__(self, folder: Path) -> None:
        config = _read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        self.directory = folder
        self.metadata = {}
        self.config: ModelConfig = config_from_hf(
            config, _read_json(generation) if generation.exists() else None, str(folder / "config.json")
        )
        packed = check_quantization(config, str(folder / "config.json"))
        self._shards = _open_shards(folder)
        self._home = _tensor_homes(self._shards)
        self._module = self._modules()
        self._check_tensors()
        self._packed_weight: tuple[str, PackedWeight] | None = None
        self._last: SafetensorsFile | None = None
        self.format = "compressed-tensors int4" if packed else f"safetensors {self._dtype('embed').lower()}"

    def storage(self, name: str) -> Storage | None:
        if len(self.shape(name)) != 2:
            return None
        if self.quantized(name):
            return self._packed(name).storage
        return Storage("bf16") if self._dtype(name) == "BF16" else None

    def exact(self, name: str) -> bool:
        return self._packed(name).exact if self.quantized(name) else True

    def quantized(self, name: str) -> bool:
        return f"{self._module[name]}.weight_packed" in self._home

    def read_matrix(self, name: str) -> Matrix | None:
        storage = self.storage(name)
        if storage is None:
            return None
        matrix = self._packed(name).matrix(name) if self.quantized(name) else self._bf16(name)
        if not matrix.is_finite():
            self._fail_finite(name)
        return matrix

    def read_float(self, name: str, rows: slice | None = None) -> np.ndarray:
        rows = rows or slice(None)
        if self.quantized(name):
            values = self._packed(name).values(rows)
        else:
            stored = self._array(f"{self._module[name]}.weight")[rows]
            values = from_bf16(stored) if stored.dtype == np.uint16 else stored.astype(np.float32)
        if not all_finite(values):
            self._fail_finite(name)
        return values

    def close(self) -> None:
        if self._last is not None:
            self._last.release()
        self._packed_weight = None

    def _dtype(self, name: str) -> str:
        tensor = f"{self._module[name]}.weight"
        return self._home[tensor].tensors[tensor].dtype

    def _array(self, tensor: str) -> np.ndarray:
        home = self._home[tensor]
        if self._last is not None:
            self._last.release()
        self._last = home
        return home.array(tensor)

    def _packed(self, name: str) -> PackedWeight:
        if self._packed_weight is None or self._packed_weight[0] != name:
            module = self._module[name]
            n, k = self.shape(name)

            def find(suffix: str) -> np.ndarray | None:
                tensor = f"{module}.{suffix}"
                return self._array(tensor) if tensor in self._home else None

            where = f"{self._home[f'{module}.weight_packed'].path}: {module}"
            self._packed_weight = (name, PackedWeight(find, n, k, where))
        return self._packed_weight[1]

    def _modules(self) -> dict[str, str]:
        """Canonical name -> Hugging Face module, for every stored tensor; refuses tensors that it does not know."""
        modules: dict[str, str] = {}
        for tensor, shard in self._home.items():
            module, _, suffix = tensor.rpartition(".")
            match = _LAYER_NAME.fullmatch(module)
            canonical = _TOP.get(module)
            if match and match[2] in _LAYER:
                canonical = f"layers.{int(match[1])}.{_LAYER[match[2]]}"
            if canonical == "head" and self.config.tie_word_embeddings:
                continue  # transformers ignores it too: the embedding is the head
            if canonical is not None and suffix in ("weight", *SUFFIXES):
                if modules.setdefault(canonical, module) != module:
                    raise CheckpointError(f"{shard.path}: {tensor}: names a tensor that {modules[canonical]} names too")
            elif not _IGNORED.fullmatch(tensor):
                raise UnsupportedModel(f"{shard.path}: {tensor}: {_what(tensor)} is not supported")
        return modules

    def _check_tensors(self) -> None:
        expected = tensor_shapes(self.config)
        for name, shape in expected.items():
            module = self._module.get(name)
            if module is None:
                raise CheckpointError(f"{self.directory}: missing tensor {_hf_name(name)} (the folder is incomplete)")
            plain, packed = f"{module}.weight" in self._home, f"{module}.weight_packed" in self._home
            if plain == packed or (packed and len(shape) != 2):
                raise CheckpointError(f"{self.directory}: {module}: expected one of weight and weight_packed")
            if plain:
                info = self._home[f"{module}.weight"].tensors[f"{module}.weight"]
                where = f"{self._home[f'{module}.weight'].path}: {module}.weight"
                if info.dtype not in _FLOATS:
                    raise UnsupportedModel(f"{where}: dtype {info.dtype} is not supported ({', '.join(_FLOATS)} are)")
                if info.shape != shape:
                    raise CheckpointError(f"{where}: shape {list(info.shape)}, the config needs {list(shape)}")
        for name, module in self._module.items():
            if name not in expected:
                raise CheckpointError(f"{self.directory}: {module}: not a tensor of this {self.config.family} model")

    def _bf16(self, name: str) -> Matrix:
        n, k = self.shape(name)
        return Matrix(name, "bf16", n, k, 0, self._array(f"{self._module[name]}.weight"), None, None)

    def _fail_finite(self, name: str) -> NoReturn:
        raise CheckpointError(f"{self.directory}: {self._module[name]}: contains a value that is not finite")


def open_folder(folder: Path) -> HuggingFaceCheckpoint:
    """Open a folder that holds config.json and model.safetensors (or its shards and their index)."""
    if not (folder / "config.json").exists():
        hint = "give the .gguf file itself" if any(folder.glob("*.gguf")) else "give the folder of a Hugging Face model"
        raise CheckpointError(f"{folder}: there is no config.json", hint=hint)
    return HuggingFaceCheckpoint(folder)


def _read_json(path: Path) -> dict[str, Any]:
    return parse_object(read_file(path, _MAX_JSON), str(path))


def _open_shards(folder: Path) -> list[SafetensorsFile]:
    if (folder / _SINGLE).exists():
        return [SafetensorsFile(folder / _SINGLE)]
    index = folder / _INDEX
    if not index.exists():
        raise CheckpointError(f"{folder}: there is neither {_SINGLE} nor {_INDEX}")
    weight_map = _read_json(index).get("weight_map")
    record = Record(weight_map, f"{index}: weight_map")
    names = {tensor: record.text(tensor) for tensor in record.remaining()}
    shards: dict[str, SafetensorsFile] = {}
    for tensor, shard in names.items():
        if shard not in shards:
            if not _SHARD_NAME.fullmatch(shard):  # a path could leave the folder
                raise CheckpointError(f"{index}: {tensor}: {shard[:100]!r} is not a file name in this folder")
            shards[shard] = SafetensorsFile(folder / shard)
        if tensor not in shards[shard]:
            raise CheckpointError(f"{folder / shard}: missing tensor {tensor}")
    for shard, file in shards.items():
        for tensor in file.tensors:
            if names.get(tensor) != shard:
                raise CheckpointError(f"{folder / shard}: {tensor}: the index does not place it in this file")
    return list(shards.values())


def _tensor_homes(shards: list[SafetensorsFile]) -> dict[str, SafetensorsFile]:
    return {tensor: shard for shard in shards for tensor in shard.tensors}


def _hf_name(name: str) -> str:
    """The tensor that canonical `name` is called in a Hugging Face checkpoint."""
    _, layer, part = name.split(".") if name.startswith("layers.") else ("", "", name)
    names = {canonical: module for module, canonical in (_LAYER if layer else _TOP).items()}
    return f"model.layers.{layer}.{names[part]}.weight" if layer else f"{names[part]}.weight"


def _what(tensor: str) -> str:
    if tensor.endswith(".bias"):
        return "a bias"
    if any(part in tensor for part in _FUSED):
        return "a fused projection"
    if ".experts." in tensor or ".router." in tensor or ".block_sparse_moe." in tensor:
        return "mixture of experts"
    return "an unknown tensor"

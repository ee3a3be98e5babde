"""Drafter files: flint's own, public EAGLE-3 checkpoints, and the state of a training run.

A flint drafter is one safetensors file. Its matrices are int8, group 32, as in the packed format (<name>.q int8 [N, K],
<name>.scale fp16 [N, K/32]); the head, which is the largest, may be int4 (<name>.q int32 [N, K/8], <name>.scale and
<name>.minimum fp16 [N, K/32]): a larger vocabulary in the same file. Its norms are float32, its vocabulary `d2t` int32
[draft_vocab] (the target id of each draft id); its header's metadata holds the EagleConfig and the fingerprint of the
target it was trained for.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch
from torch import Tensor

from engine.config import ModelConfig
from engine.drafting.eagle_head import EagleConfig, EagleHead, default_feature_layers
from engine.errors import DrafterError, UsageError
from engine.packed.matrix import Matrix
from engine.packed.model import PackedModel
from engine.packed.quantize import dequantize, quantize_int4, quantize_int8
from kernels.cuda.drafting import DraftHead
from kernels.cuda.phases import DraftDims

FORMAT = "flint-eagle-1"
GROUP = 32
HINT = "remove it, or make another one with `flint draft train`"


def target_fingerprint(model: PackedModel) -> str:
    """Identifies the model whatever its quantisation: sha256 over its norm vectors, which packing never changes."""
    digest = hashlib.sha256()
    for name in sorted(n for n in model.names() if n.endswith("norm")):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(model.vector(name), dtype=np.float32).tobytes())
    return digest.hexdigest()


def save_drafter(path: Path, head: EagleHead, fingerprint: str, head_bits: int = 8) -> None:
    """Write a trained head as a drafter file (atomically). head_bits: 8 or 4, of the matrix over the vocabulary."""
    tensors: dict[str, np.ndarray] = {}
    for name, parameter in head.named_parameters():
        values = parameter.detach().float().cpu().numpy()
        name = name.removesuffix(".weight")
        if values.ndim == 1:
            tensors[name] = values
            continue
        small = name == "head" and head_bits == 4
        matrix = quantize_int4(values, GROUP, symmetric=False) if small else quantize_int8(values, GROUP)
        assert matrix.scale is not None
        if matrix.minimum is not None:
            tensors[name + ".minimum"] = np.asarray(matrix.minimum)
        tensors[name + ".q"], tensors[name + ".scale"] = np.asarray(matrix.q), np.asarray(matrix.scale)
    tensors["d2t"] = head.d2t.cpu().numpy().astype(np.int32)
    metadata = {"format": FORMAT, "config": json.dumps(asdict(head.config)), "target": fingerprint}
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata=metadata)
    partial.replace(path)


def load_drafter(path: Path, model: PackedModel) -> EagleHead:
    """Read a drafter for `model`: flint's own file, or a directory or file of a public EAGLE-3 checkpoint.

    Raises DrafterError (one line) for a corrupt file, unknown keys, or a drafter of another model.
    """
    weights_path = path / "model.safetensors" if path.is_dir() else path
    try:
        with safe_open(weights_path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        if weights_path.exists():  # safetensors says the same of a file that may not be read
            raise DrafterError(f"{weights_path} cannot be read", "check its permissions") from None
        raise DrafterError(f"no drafter at {weights_path}", HINT) from None
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise DrafterError(f"{weights_path.name} is not a readable drafter ({error})", HINT) from None
    if metadata.get("format") == FORMAT:
        head = _own_head(weights_path.name, metadata, tensors)
        if metadata.get("target") != target_fingerprint(model):
            raise DrafterError(f"{weights_path.name} was trained for another model", HINT)
    else:
        head = _public_head(path, tensors, model.config)
    config = head.config
    if (config.hidden_size, config.target_vocab_size) != (model.config.hidden_size, model.config.vocab_size):
        raise DrafterError(
            f"{weights_path.name} fits a model of hidden size {config.hidden_size} and vocabulary "
            f"{config.target_vocab_size}, not {model.config.hidden_size} and {model.config.vocab_size}",
            HINT,
        )
    if any(not 0 <= layer <= model.config.num_layers for layer in config.feature_layers):
        raise DrafterError(f"{weights_path.name} reads layers {config.feature_layers}, which the model lacks", HINT)
    if not (int(head.d2t.min()) >= 0 and int(head.d2t.max()) < model.config.vocab_size):
        raise DrafterError(f"{weights_path.name}: d2t points outside the vocabulary", HINT)
    return head.eval().requires_grad_(False)


def stored_matrices(path: Path, head: EagleHead) -> dict[str, Matrix]:
    """The matrices of the head that was loaded from `path`, by name ("fc", "q", ...): of flint's own file as they are
    stored; of another one in int8, or in bf16 where no group of 32 fits."""
    found: dict[str, Matrix] = {}
    tensors: dict[str, np.ndarray] = {}
    if path.is_file():
        with safe_open(path, framework="np") as file:
            if (file.metadata() or {}).get("format") == FORMAT:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, parameter in head.named_parameters():
        if parameter.ndim == 2:
            name = name.removesuffix(".weight")
            if name + ".q" in tensors:
                parts = (tensors[name + ".q"], tensors[name + ".scale"], tensors.get(name + ".minimum"))
                found[name] = _matrix(name, *parts)
            elif parameter.shape[1] % GROUP == 0:
                found[name] = quantize_int8(parameter.detach().float().cpu().numpy(), GROUP)
            else:
                bits = parameter.detach().to(torch.bfloat16).cpu().view(torch.int16).numpy().view(np.uint16)
                found[name] = Matrix(name, "bf16", bits.shape[0], bits.shape[1], 0, bits, None, None)
    return found


def draft_head(path: Path, model: PackedModel) -> DraftHead:
    """The head at `path`, as the GPU's kernel takes it. Raises DrafterError."""
    head = load_drafter(path, model)
    config = head.config
    vectors = {
        name.removesuffix(".weight"): parameter.numpy()
        for name, parameter in head.named_parameters()
        if parameter.ndim == 1
    }
    dims = DraftDims(
        config.intermediate_size,
        config.draft_vocab_size,
        config.feature_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.rms_norm_eps,
    )
    frequencies = head.get_buffer("_inverse").numpy()
    return DraftHead(dims, stored_matrices(path, head), vectors, frequencies, head.d2t.numpy().astype(np.int32))


def _own_head(name: str, metadata: dict[str, str], tensors: dict[str, Tensor]) -> EagleHead:
    try:
        raw: dict[str, Any] = json.loads(metadata["config"])
        raw["feature_layers"] = tuple(int(layer) for layer in raw["feature_layers"])
        if set(raw) != {f.name for f in fields(EagleConfig)}:
            raise ValueError("unknown or missing keys")
        config = _checked(EagleConfig(**raw))
        state: dict[str, Tensor] = {"d2t": tensors.pop("d2t").long()}
        for key in list(tensors):
            if key.endswith(".q"):
                base = key.removesuffix(".q")
                q, scale = tensors.pop(key).numpy(), tensors.pop(base + ".scale").numpy()
                minimum = tensors.pop(base + ".minimum").numpy() if base + ".minimum" in tensors else None
                state[base + ".weight"] = torch.from_numpy(dequantize(_matrix(base, q, scale, minimum)))
            elif not key.endswith((".scale", ".minimum")):
                state[key + ".weight"] = tensors.pop(key).float()
    except (KeyError, TypeError, ValueError) as error:
        raise DrafterError(f"{name} is a malformed drafter ({error})", HINT) from None
    return _filled(name, config, state)


def _checked(config: EagleConfig) -> EagleConfig:
    """Raises ValueError for values that no head has."""
    sizes = [getattr(config, f.name) for f in fields(EagleConfig) if f.type == "int"]
    if any(type(size) is not int or not 0 < size <= 1 << 20 for size in sizes):
        raise ValueError("absurd sizes")
    for number in (config.rms_norm_eps, config.rope_theta):
        if type(number) not in (int, float) or not 0 < number < math.inf:
            raise ValueError("rms_norm_eps and rope_theta must be numbers above 0")
    if not config.feature_layers or config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise ValueError("no feature layers, or heads that do not divide")
    return config


def _matrix(name: str, q: np.ndarray, scale: np.ndarray, minimum: np.ndarray | None) -> Matrix:
    """Raises ValueError where the parts are not those of one matrix."""
    n, k = q.shape
    if minimum is not None:
        k *= 8  # eight nibbles a word
    shapes = {part.shape for part in (scale, minimum) if part is not None}
    types = {part.dtype for part in (scale, minimum) if part is not None}
    wanted = np.int8 if minimum is None else np.int32
    if q.dtype != wanted or types != {np.dtype(np.float16)} or shapes != {(n, k // GROUP)} or k % GROUP:
        raise ValueError(f"{name} is not int8, or int4 with minima, with a scale per {GROUP}")
    return Matrix(name, "int8" if minimum is None else "int4", n, k, GROUP, q, scale, minimum)


# Public EAGLE-3 names -> ours. Some exporters write the block as `midlayer.`, others as `layers.0.`.
_PUBLIC = {
    "fc": "fc",
    "midlayer.input_layernorm": "embed_norm",
    "midlayer.hidden_norm": "hidden_norm",
    "midlayer.post_attention_layernorm": "mlp_norm",
    "midlayer.self_attn.q_proj": "q",
    "midlayer.self_attn.k_proj": "k",
    "midlayer.self_attn.v_proj": "v",
    "midlayer.self_attn.o_proj": "o",
    "midlayer.mlp.gate_proj": "gate",
    "midlayer.mlp.up_proj": "up",
    "midlayer.mlp.down_proj": "down",
    "norm": "final_norm",
    "lm_head": "head",
}


def _public_head(path: Path, tensors: dict[str, Tensor], target: ModelConfig) -> EagleHead:
    name = path.name
    config_path = (path if path.is_dir() else path.parent) / "config.json"
    try:
        raw = json.loads(config_path.read_text("utf-8"))
    except (OSError, ValueError):
        raise DrafterError(f"{name} has no readable config.json beside it", HINT) from None
    if not isinstance(raw, dict):
        raise DrafterError(f"{name}: config.json is not an object", HINT)
    state: dict[str, Tensor] = {}
    unknown: list[str] = []
    offsets = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    tensors.pop("embed_tokens.weight", None)  # the target's own, repeated
    for key, tensor in tensors.items():
        plain = key.removeprefix("model.").removesuffix(".weight").replace("layers.0.", "midlayer.", 1)
        if plain in _PUBLIC:
            state[_PUBLIC[plain] + ".weight"] = tensor.float()
        elif plain != "embed_tokens":
            unknown.append(key)
    if unknown:
        raise DrafterError(f"{name} has tensors that an EAGLE-3 head does not: {', '.join(sorted(unknown)[:3])}", HINT)
    missing = [ours for ours in _PUBLIC.values() if ours + ".weight" not in state]
    if missing:
        raise DrafterError(f"{name} lacks {', '.join(missing[:3])}: not an EAGLE-3 head", HINT)
    draft_vocab = state["head.weight"].shape[0]
    # d2t holds offsets: target id = i + d2t[i].
    state["d2t"] = torch.arange(draft_vocab) + (offsets.long() if offsets is not None else 0)
    try:
        layers = raw.get("eagle_config", raw).get("eagle_aux_hidden_state_layer_ids")
        heads = int(raw["num_attention_heads"])
        config = EagleConfig(
            hidden_size=int(raw["hidden_size"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
            intermediate_size=int(raw["intermediate_size"]),
            draft_vocab_size=draft_vocab,
            target_vocab_size=int(raw["vocab_size"]),
            feature_layers=tuple(map(int, layers)) if layers else default_feature_layers(target.num_layers),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-5)),
            rope_theta=float(raw.get("rope_theta", 10000.0)),
        )
        _checked(config)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise DrafterError(f"{name}: config.json is not an EAGLE-3 head's ({error})", HINT) from None
    return _filled(name, config, state)


def _filled(name: str, config: EagleConfig, state: dict[str, Tensor]) -> EagleHead:
    with torch.device("meta"):
        head = EagleHead(config)
    expected = {key: value.shape for key, value in head.state_dict().items()}
    for key in expected.keys() | state.keys():
        if key not in state or key not in expected or state[key].shape != expected[key]:
            raise DrafterError(f"{name}: {key} is missing, unknown or of the wrong shape", HINT)
        if not bool(torch.isfinite(state[key]).all()):
            raise DrafterError(f"{name}: {key} is not finite", HINT)
    head = EagleHead(config)
    head.load_state_dict(state)
    return head


def save_training(
    path: Path, head: EagleHead, optimiser: torch.optim.Optimizer, step: int, options: dict[str, Any]
) -> None:
    """Parameters, AdamW moments and the step of a training run (atomically)."""
    tensors = {f"head.{key}": value.detach().clone() for key, value in head.state_dict().items()}
    for index, slot in optimiser.state_dict()["state"].items():
        for key, value in slot.items():
            tensors[f"adam.{index}.{key}"] = torch.as_tensor(value).clone()
    partial = path.with_suffix(".partial")
    save_torch(tensors, partial, metadata={"step": str(step), "options": json.dumps(options, sort_keys=True)})
    partial.replace(path)


def load_training(path: Path, head: EagleHead, optimiser: torch.optim.Optimizer, options: dict[str, Any]) -> int:
    """Restore what `save_training` wrote; returns the step. Raises UsageError when the options differ."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        tensors = load_torch(path)
        step = int(metadata["step"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise UsageError(f"{path.name} is not a training checkpoint ({error})", "remove it to start afresh") from None
    if metadata.get("options") != json.dumps(options, sort_keys=True):
        raise UsageError(f"{path.name} was made with other options", "remove it to start afresh, or repeat its options")
    head.load_state_dict({k.removeprefix("head."): v for k, v in tensors.items() if k.startswith("head.")})
    state = optimiser.state_dict()
    for key, value in tensors.items():
        if key.startswith("adam."):
            _, index, slot = key.split(".", 2)
            state["state"].setdefault(int(index), {})[slot] = value
    optimiser.load_state_dict(state)
    return step

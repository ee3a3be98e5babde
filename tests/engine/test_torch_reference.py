"""The reference against transformers: random checkpoints of every family, and the real model's stored answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.backends.torch_reference import CHUNK_SCORE_BYTES, FIRST_CAPACITY, MAX_CHUNK, TorchReference
from engine.checkpoint import open_checkpoint
from engine.config import ModelConfig
from engine.errors import BackendError, ContextOverflow, DeviceOutOfMemory
from engine.packed.model import PackedModel
from engine.packed.quantize import dequantize
from tests.synthetic import small_config, write_random_packed

TOLERANCE = 1e-4  # of the largest logit; both sides are float32, only the order of sums differs
TOKENS = 200
GOLDEN = Path(__file__).parent / "golden" / "smollm2.json"
FAMILIES = ("granite", "llama", "qwen3", "mistral")


@dataclass
class Oracle:
    """A random checkpoint, what transformers computes from it, and how to open it here."""

    directory: Path
    config: ModelConfig
    ids: list[int]
    logits: np.ndarray  # [TOKENS, vocab]
    residual: list[np.ndarray]  # entering each layer, [TOKENS, hidden]

    def open(self, dtype: torch.dtype = torch.float32) -> TorchReference:
        with open_checkpoint(self.directory) as checkpoint:
            return TorchReference(
                self.config,
                lambda name: torch.from_numpy(checkpoint.read_float(name)),
                context_size=512,
                dtype=dtype,
            )


def _transformers_config(family: str):
    import transformers

    shape: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 300,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    match family:
        case "granite":
            scalars: dict[str, Any] = {"embedding_multiplier": 12.0, "attention_multiplier": 0.05}
            scalars |= {"residual_multiplier": 0.22, "logits_scaling": 10.0}
            return transformers.GraniteConfig(**shape, **scalars, tie_word_embeddings=True)
        case "llama":  # frequencies are scaled from position 64 on; the test goes to 200
            rope: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
            rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
            return transformers.LlamaConfig(**shape, head_dim=16, tie_word_embeddings=True, rope_parameters=rope)
        case "qwen3":  # queries are twice as wide as the hidden state
            return transformers.Qwen3Config(**shape, head_dim=32, tie_word_embeddings=True)
        case _:
            return transformers.MistralConfig(**shape, head_dim=16, tie_word_embeddings=False, sliding_window=None)


@pytest.fixture(scope="module", params=FAMILIES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    import transformers

    directory = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(FAMILIES.index(request.param))
    model = transformers.AutoModelForCausalLM.from_config(
        _transformers_config(request.param), attn_implementation="eager", dtype=torch.float32
    ).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    ids = np.random.default_rng(0).integers(0, 300, TOKENS).tolist()
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=True)
    with open_checkpoint(directory) as checkpoint:
        config = checkpoint.config
    residual = [hidden[0].numpy() for hidden in out.hidden_states[:3]]
    return Oracle(directory, config, ids, out.logits[0].numpy(), residual)


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference relative to the largest value."""
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def test_the_checkpoints_differ_in_what_matters(oracle):
    config = oracle.config
    match config.family:
        case "granite":
            assert (config.embedding_multiplier, config.attention_multiplier) == (12.0, 0.05)
            assert (config.residual_multiplier, config.logits_scaling) == (0.22, 10.0)
        case "llama":
            assert config.rope_scaling is not None
            assert config.rope_scaling.original_max_position_embeddings < TOKENS
        case "qwen3":
            assert config.qk_norm
            assert config.q_size != config.hidden_size
        case "mistral":
            assert not config.tie_word_embeddings


def test_prefill(oracle):
    assert error(oracle.open().step(oracle.ids).logits, oracle.logits) < TOLERANCE


def test_token_by_token(oracle):
    model = oracle.open()
    rows = [model.step([token]).logits for token in oracle.ids]
    assert error(np.concatenate(rows), oracle.logits) < TOLERANCE
    assert model.position == TOKENS


@pytest.mark.parametrize("width", [2, 5, 8, 33])
def test_several_at_a_time_and_after_truncate(oracle, width):
    model = oracle.open()
    model.step(oracle.ids[:100])
    model.step([7] * 20)  # a draft that is rejected
    model.truncate(61)
    rows = [model.step(oracle.ids[start : start + width]).logits for start in range(61, TOKENS, width)]
    assert error(np.concatenate(rows), oracle.logits[61:]) < TOLERANCE


def test_last_row_only(oracle):
    out = oracle.open().step(oracle.ids, logits="last")
    assert error(out.logits, oracle.logits[-1:]) < TOLERANCE


def test_features_are_the_residual_stream_entering_a_layer(oracle):
    model = oracle.open()
    first = model.step(oracle.ids[:50], features=(0, 2))
    second = model.step(oracle.ids[50:], features=(0, 1, 2, 3))
    assert first.features.keys() == {0, 2}
    for layer in (0, 2):
        assert error(first.features[layer], oracle.residual[layer][:50]) < TOLERANCE
        assert error(second.features[layer], oracle.residual[layer][50:]) < TOLERANCE
    assert second.features[3].shape == (150, 64)


def test_features_past_the_last_layer_give_the_logits(oracle):
    config = oracle.config
    out = oracle.open().step(oracle.ids[:10], features=(config.num_layers,))
    x = out.features[config.num_layers]
    with open_checkpoint(oracle.directory) as checkpoint:
        norm = checkpoint.read_float("final_norm")
        head = checkpoint.read_float("embed" if config.tie_word_embeddings else "head")
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * norm
    assert error(x @ head.T / config.logits_scaling, out.logits) < TOLERANCE


def test_bfloat16_is_close(oracle):
    out = oracle.open(dtype=torch.bfloat16).step(oracle.ids[:32])
    assert out.logits.dtype == np.float32
    assert error(out.logits, oracle.logits[:32]) < 0.1  # 8 bits of mantissa through three layers


# --- packed models, the cache, errors ---------------------------------------------------------------------------------


@pytest.fixture
def packed(tmp_path: Path) -> PackedModel:
    return PackedModel.open(write_random_packed(tmp_path / "m", small_config("llama"), bits=4, group=32, embed_bits=8))


def test_a_packed_model_decodes_as_its_dequantised_tensors(packed):
    def tensor(name: str) -> Tensor:
        norm = name.endswith("norm")
        return torch.from_numpy(packed.vector(name).copy() if norm else dequantize(packed.matrix(name)))

    wanted = TorchReference(packed.config, tensor, context_size=64).step([3, 1, 4, 1, 5]).logits
    assert np.array_equal(TorchReference.from_packed(packed).step([3, 1, 4, 1, 5]).logits, wanted)


def test_the_cache_grows_and_keeps_what_it_holds(packed):
    ids = np.random.default_rng(1).integers(0, 320, FIRST_CAPACITY + 40).tolist()
    whole = TorchReference.from_packed(packed).step(ids).logits
    model = TorchReference.from_packed(packed)
    model.step(ids[: FIRST_CAPACITY - 3])
    rows = np.concatenate([model.step([token]).logits for token in ids[FIRST_CAPACITY - 3 :]])
    assert error(rows, whole[FIRST_CAPACITY - 3 :]) < TOLERANCE


def test_memory_is_sized_to_what_is_held_not_to_the_context(packed):
    model = TorchReference.from_packed(packed, context_size=500)
    model.step([1])
    assert model._open_cache().keys.shape[2] == FIRST_CAPACITY
    model.step([1] * 300)
    assert model._open_cache().keys.shape[2] == 500  # doubled, within the context


def test_the_ledger_counts_the_tensors_it_holds(packed):
    model = TorchReference.from_packed(packed)
    config = packed.config
    ledger = model.ledger(2, 10)
    matrices = 4 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128) * config.num_layers
    assert ledger.weights["head"] == 4 * 320 * 64
    assert ledger.weights["embed"] == 4 * 64 * 2
    assert ledger.weight_bytes == matrices + 4 * 320 * 64 + 4 * 64 * 2 + 4 * 64 * 5
    assert (ledger.kv_read, ledger.kv_written) == (2 * 2 * 32 * 4 * 12, 2 * 2 * 32 * 4 * 2)


def test_misuse_is_refused(packed):
    model = TorchReference.from_packed(packed, context_size=8)
    with pytest.raises(ValueError, match="at least one token"):
        model.step([])
    for token in (-1, 320):
        with pytest.raises(ValueError, match=r"0\.\.319"):
            model.step([token])
    with pytest.raises(ContextOverflow, match="9 tokens do not fit the context of 8"):
        model.step([1] * 9)
    model.step([1] * 8)
    with pytest.raises(ContextOverflow):
        model.step([1])
    for position in (-1, 9):
        with pytest.raises(ValueError, match="cannot truncate"):
            model.truncate(position)
    assert model.position == 8


def test_closed(packed):
    model = TorchReference.from_packed(packed)
    model.close()
    model.close()
    with pytest.raises(BackendError, match="closed"):
        model.step([1])
    with pytest.raises(BackendError, match="closed"):
        _ = model.position


def test_torch_s_failures_become_one_line(packed, monkeypatch):
    model = TorchReference.from_packed(packed)

    def fail(text: str):
        def forward(*arguments: object) -> None:
            raise RuntimeError(text)

        monkeypatch.setattr(model, "_forward", forward)

    fail("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.\nmore")
    with pytest.raises(DeviceOutOfMemory, match=r"holds 0\.00 GB of torch\.float32 weights"):
        model.step([1])
    fail("mat1 and mat2 shapes cannot be multiplied\nmore")
    with pytest.raises(BackendError, match=r"^torch failed: mat1 and mat2 shapes cannot be multiplied$"):
        model.step([1])
    assert model.position == 0


def test_chunks_of_the_prefill_shrink_as_the_context_fills(tmp_path):
    """One layer's scores of a chunk stay within CHUNK_SCORE_BYTES."""
    config = small_config("llama", max_position_embeddings=1 << 20)
    model = TorchReference.from_packed(PackedModel.open(write_random_packed(tmp_path / "m", config)))
    assert model.prefill_chunk() == MAX_CHUNK
    model._open_cache().position = 1 << 19
    chunk = model.prefill_chunk()
    assert 1 <= chunk < MAX_CHUNK
    assert 4 * config.num_heads * chunk * ((1 << 19) + chunk) <= CHUNK_SCORE_BYTES


# --- the real model ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(smollm2: Path) -> TorchReference:
    return TorchReference.from_packed(PackedModel.open(smollm2), context_size=512)


def golden() -> list[dict]:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.real_model
@pytest.mark.parametrize("case", golden(), ids=lambda case: case["prompt"][:20])
def test_the_real_model_gives_transformers_tokens(real, case):
    """Both read the same GGUF; golden/make_smollm2.py wrote transformers' side. The whole continuation is fed at once:
    each row must choose the token that follows."""
    assert case["smallest_gap"] > 1e-3, "too near a tie to tell right from wrong"
    assert len(case["tokens"]) == 64
    real.truncate(0)
    first = real.step(case["ids"], logits="last").logits[0]
    best = case["best"]
    assert np.argsort(-first, kind="stable")[:10].tolist() == best["ids"]
    assert np.abs(first[best["ids"]] - best["logits"]).max() < TOLERANCE * np.abs(best["logits"]).max()
    rows = real.step(case["tokens"][:-1]).logits
    assert [int(first.argmax()), *rows.argmax(-1).tolist()] == case["tokens"]


@pytest.mark.real_model
@pytest.mark.slow
def test_the_real_model_gives_transformers_tokens_one_at_a_time(real):
    for case in golden():
        real.truncate(0)
        token = int(real.step(case["ids"], logits="last").logits[0].argmax())
        tokens = [token]
        while len(tokens) < len(case["tokens"]):
            tokens.append(int(real.step([tokens[-1]]).logits[0].argmax()))
        assert tokens == case["tokens"], case["prompt"]

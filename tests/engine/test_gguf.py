"""GGUF: every value of every type, lossless repacking, un-permuted rows, and one line for what is wrong."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint import open_checkpoint
from engine.checkpoint.gguf_blocks import STORAGE, dequantize_rows, repack
from engine.checkpoint.gguf_file import BLOCKS, GgufFile
from engine.config import RopeDivisors
from engine.errors import CheckpointError, FlintError, ModelNotFound, UnsupportedModel
from engine.packed.matrix import Storage
from engine.packed.model import PackedModel
from engine.packed.quantize import dequantize
from engine.packed.tensors import tensor_shapes
from tests.gguf_files import gguf_name, random_rows, write_gguf
from tests.synthetic import small_config

LOSSLESS = ("Q4_0", "Q4_1", "Q8_0", "BF16")
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_heads": 4, "head_dim": 64}  # K-quants need rows of 256


@pytest.mark.parametrize("family", ["granite", "llama", "mistral", "qwen3"])
def test_every_tensor_of_every_family_is_read(tmp_path: Path, family: Any) -> None:
    config = small_config(family, rope_scaling=None)
    expected = write_gguf(tmp_path / "m.gguf", config, "Q4_1")
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        stored_family = "llama" if family == "mistral" else family
        assert checkpoint.config.to_json() == {**config.to_json(), "family": stored_family, "eos_token_ids": (2, 0)}
        assert checkpoint.names() == list(expected)
        assert checkpoint.format == "gguf Q4_1"
        assert checkpoint.directory is None
        for name, values in expected.items():
            assert np.array_equal(checkpoint.read_float(name), values), name
            matrix = checkpoint.read_matrix(name)
            if values.ndim == 2:
                assert matrix is not None
                assert np.array_equal(dequantize(matrix).view(np.uint32), values.view(np.uint32)), name
            else:
                assert matrix is None


@pytest.mark.parametrize("type_name", BLOCKS)
def test_every_type_equals_gguf_dequantize(tmp_path: Path, type_name: str) -> None:
    config = small_config("llama", rope_scaling=None, num_layers=1, **WIDE)
    expected = write_gguf(tmp_path / "m.gguf", config, type_name)
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        for name, values in expected.items():
            assert np.array_equal(checkpoint.read_float(name), values), name
        matrix, storage = checkpoint.read_matrix("layers.0.q"), checkpoint.storage("layers.0.q")
        assert (matrix and matrix.storage) == storage == STORAGE.get(type_name)
        assert checkpoint.quantized("layers.0.q") == (type_name not in ("F32", "F16", "BF16"))
        if type_name in LOSSLESS:
            assert matrix is not None
            assert checkpoint.exact("layers.0.q")
            assert np.array_equal(dequantize(matrix), expected["layers.0.q"])


def test_rows_can_be_read_in_parts(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "m.gguf", small_config("llama", rope_scaling=None), "Q8_0")
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        for name in ("embed", "layers.1.k", "layers.0.down"):
            assert np.array_equal(checkpoint.read_float(name, slice(3, 17)), expected[name][3:17])


def test_q4_k_keeps_its_codes_and_rounds_its_scales_to_fp16(tmp_path: Path) -> None:
    config = small_config("llama", rope_scaling=None, num_layers=1, **WIDE)
    expected = write_gguf(tmp_path / "m.gguf", config, "Q4_K")
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        assert not checkpoint.exact("layers.0.up")
        matrix = checkpoint.read_matrix("layers.0.up")
        assert matrix is not None
        assert matrix.storage == Storage("int4", 32, symmetric=False)
        w = expected["layers.0.up"]
        scale, minimum = (np.repeat(np.abs(np.asarray(half, np.float32)), 32, axis=1) for half in matrix.arrays()[1:])
        # Half a unit in the last place of fp16 (2^-11 relative, 2^-25 for subnormals) for each of the two numbers.
        assert np.all(np.abs(dequantize(matrix) - w) <= (15 * scale + minimum) * 2**-11 + 16 * 2**-25)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.sampled_from(["Q4_0", "Q4_1", "Q8_0"]), st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_repacking_is_lossless_for_any_codes(type_name: str, n: int, blocks: int, seed: int) -> None:
    import gguf

    rows = random_rows(type_name, n, 32 * blocks, np.random.default_rng(seed))
    matrix = repack("m", type_name, rows)
    values = gguf.dequantize(rows, gguf.GGMLQuantizationType[type_name])
    assert np.array_equal(dequantize(matrix).view(np.uint32), values.view(np.uint32))


def test_k_quants_equal_the_specification() -> None:
    """gguf.dequantize, which the reader uses, against the formulas written out one weight at a time."""
    for type_name, reference in (("Q4_K", q4_k), ("Q5_K", q5_k), ("Q6_K", q6_k)):
        rows = random_rows(type_name, 3, 512, np.random.default_rng(7))
        size = BLOCKS[type_name][1]
        expected = [[w for at in (0, size) for w in reference(bytes(row[at : at + size]))] for row in rows]
        np.testing.assert_allclose(dequantize_rows(type_name, rows), np.array(expected), rtol=1e-6, atol=1e-9)


def _half(data: bytes) -> float:
    return struct.unpack("<e", data)[0]


def _k_scales(s: bytes) -> list[tuple[int, int]]:
    """The eight (scale, minimum) pairs of 6 bits each in 12 bytes."""
    pairs = [(s[j] & 63, s[j + 4] & 63) for j in range(4)]
    for j in range(4, 8):
        pairs.append(((s[j + 4] & 15) | (s[j - 4] >> 6 << 4), (s[j + 4] >> 4) | (s[j] >> 6 << 4)))
    return pairs


def q4_k(block: bytes) -> list[float]:
    d, dmin, scales, q = _half(block[:2]), _half(block[2:4]), _k_scales(block[4:16]), block[16:]
    out = []
    for group, (sc, m) in enumerate(scales):
        for i in range(32):
            byte = q[group // 2 * 32 + i]
            out.append(d * sc * (byte >> 4 if group % 2 else byte & 15) - dmin * m)
    return out


def q5_k(block: bytes) -> list[float]:
    d, dmin, scales, high, q = _half(block[:2]), _half(block[2:4]), _k_scales(block[4:16]), block[16:48], block[48:]
    out = []
    for group, (sc, m) in enumerate(scales):
        for i in range(32):
            byte = q[group // 2 * 32 + i]
            code = (byte >> 4 if group % 2 else byte & 15) + 16 * (high[i] >> group & 1)
            out.append(d * sc * code - dmin * m)
    return out


def q6_k(block: bytes) -> list[float]:
    low, high, scales, d = block[:128], block[128:192], struct.unpack("16b", block[192:208]), _half(block[208:])
    out = []
    for i in range(256):
        half, quarter, j = i // 128, i % 128 // 32, i % 32
        byte = low[half * 64 + (quarter % 2) * 32 + j]
        code = (byte >> 4 if quarter >= 2 else byte & 15) | (high[half * 32 + j] >> 2 * quarter & 3) << 4
        out.append(d * scales[i // 16] * (code - 32))
    return out


def test_rope_divisors_reach_the_config(tmp_path: Path) -> None:
    divisors = RopeDivisors((1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0))
    write_gguf(tmp_path / "m.gguf", small_config("llama", rope_scaling=divisors))
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        assert checkpoint.config.rope_scaling == divisors
        plain = small_config("llama", rope_scaling=None).rope_inverse_frequencies()
        expected = (plain / np.array(divisors.divisors)).astype(np.float32)
        np.testing.assert_allclose(checkpoint.config.rope_inverse_frequencies(), expected, rtol=2e-7)


def test_metadata_keeps_its_types(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", small_config("llama", rope_scaling=None), metadata={"general.quantized": True})
    metadata = GgufFile(tmp_path / "m.gguf").metadata
    assert metadata["general.quantized"] is True
    assert metadata["llama.block_count"] == 2
    assert metadata["tokenizer.ggml.tokens"][:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert metadata["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("blk.0.attn_q.bias", "a bias"),
        ("blk.0.ffn_gate_exps.weight", "mixture of experts"),
        ("blk.0.ssm_in.weight", "an unknown tensor"),
    ],
)
def test_tensors_that_flint_does_not_decode_are_named(tmp_path: Path, name: str, words: str) -> None:
    write_gguf(tmp_path / "m.gguf", small_config("llama", rope_scaling=None), extra={name: np.ones(32)})
    with pytest.raises(UnsupportedModel, match=words) as error:
        open_checkpoint(tmp_path / "m.gguf")
    assert name in str(error.value)


def test_a_part_of_a_split_file_says_how_to_join_it(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", small_config("llama", rope_scaling=None), metadata={"split.count": 3})
    with pytest.raises(UnsupportedModel, match="split GGUF") as error:
        open_checkpoint(tmp_path / "m.gguf")
    assert "--merge" in error.value.hint


def test_two_spellings_of_one_layer_are_refused(tmp_path: Path) -> None:
    config = small_config("llama", rope_scaling=None)
    write_gguf(tmp_path / "m.gguf", config, extra={"blk.00.attn_norm.weight": np.ones(64)})
    with pytest.raises(UnsupportedModel, match=r"blk\.00\.attn_norm"):
        open_checkpoint(tmp_path / "m.gguf")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", small_config("llama", rope_scaling=None), leave_out=("layers.1.up",))
    with pytest.raises(CheckpointError, match=r"missing tensor layers\.1\.up"):
        open_checkpoint(tmp_path / "m.gguf")


def test_a_tensor_beyond_the_last_layer_is_named(tmp_path: Path) -> None:
    config = small_config("llama", rope_scaling=None)
    write_gguf(tmp_path / "m.gguf", config, metadata={"llama.block_count": 1})
    with pytest.raises(CheckpointError, match=r"blk\.1\."):
        open_checkpoint(tmp_path / "m.gguf")


def test_a_shape_that_the_metadata_contradicts_is_named(tmp_path: Path) -> None:
    config = small_config("llama", rope_scaling=None)
    write_gguf(tmp_path / "m.gguf", config, metadata={"llama.feed_forward_length": 160})
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_gate\.weight: shape \[128, 64\], the metadata needs"):
        open_checkpoint(tmp_path / "m.gguf")


def test_scales_and_values_must_be_finite(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, small_config("llama", rope_scaling=None), "Q4_0")
    start = GgufFile(path).tensors[gguf_name("layers.0.gate")].start
    data = bytearray(path.read_bytes())
    data[start : start + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(data)
    with open_checkpoint(path) as checkpoint:
        for read in (checkpoint.read_matrix, checkpoint.read_float):
            with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_gate\.weight"):
                read("layers.0.gate")
        checkpoint.read_matrix("layers.0.up")


def test_a_truncated_file_is_refused_at_every_length(tmp_path: Path) -> None:
    path, cut = tmp_path / "m.gguf", tmp_path / "cut.gguf"
    write_gguf(path, small_config("llama", rope_scaling=None, num_layers=1))
    data = path.read_bytes()
    last = max(tensor.start + tensor.nbytes for tensor in GgufFile(path).tensors.values())
    for length in [*range(0, 200, 7), *range(200, last, 1999), last - 1]:
        cut.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            open_checkpoint(cut)


def _pair(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def _file(pairs: list[bytes], tensors: list[bytes], data: bytes = b"", claimed: tuple[int, int] | None = None) -> bytes:
    counts = claimed or (len(tensors), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join(pairs) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


def _tensor(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    packed = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return struct.pack("<Q", len(name)) + name.encode() + packed + struct.pack("<IQ", kind, offset)


U32_ONE = _pair("a", 4, struct.pack("<I", 1))
MALFORMED = {
    "empty": b"",
    "magic": b"GGML" + bytes(40),
    "version": b"GGUF" + struct.pack("<IQQ", 9, 0, 0),
    "big endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "tensor count": _file([], [], claimed=(1 << 60, 0)),
    "pair count": _file([], [], claimed=(0, 1 << 60)),
    "claimed tensors": _file([], [], claimed=(5, 0)),
    "key length": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 63) + bytes(64),
    "text length": _file([_pair("a", 8, struct.pack("<Q", 1 << 62))], []),
    "text not utf-8": _file([_pair("a", 8, struct.pack("<Q", 2) + b"\xff\xfe")], []),
    "value type": _file([_pair("a", 99, bytes(8))], []),
    "boolean": _file([_pair("a", 7, b"\2")], []),
    "list length": _file([_pair("a", 9, struct.pack("<IQ", 4, 1 << 61))], []),
    "text list": _file([_pair("a", 9, struct.pack("<IQQ", 8, 1 << 20, 4))], [], bytes(64)),
    "nested list": _file([_pair("a", 9, struct.pack("<IQIQ", 9, 1, 9, 1))], []),
    "duplicate key": _file([U32_ONE, U32_ONE], []),
    "alignment": _file([_pair("general.alignment", 4, struct.pack("<I", 48))], []),
    "alignment type": _file([_pair("general.alignment", 8, struct.pack("<Q", 2) + b"32")], []),
    "dims": _file([], [_tensor("t", [1] * 5, 0, 0)], bytes(64)),
    "no dims": _file([], [_tensor("t", [], 0, 0)], bytes(64)),
    "zero dim": _file([], [_tensor("t", [0], 0, 0)], bytes(64)),
    "huge dim": _file([], [_tensor("t", [1 << 63, 1 << 63], 0, 0)], bytes(64)),
    "partial block": _file([], [_tensor("t", [33], 2, 0)], bytes(64)),
    "outside": _file([], [_tensor("t", [16], 0, 32)], bytes(64)),
    "offset": _file([], [_tensor("t", [4], 0, 1 << 63)], bytes(64)),
    "unaligned": _file([], [_tensor("t", [4], 0, 4)], bytes(64)),
    "overlap": _file([], [_tensor("t", [16], 0, 0), _tensor("u", [8], 0, 32)], bytes(96)),
    "duplicate tensor": _file([], [_tensor("t", [4], 0, 0), _tensor("t", [4], 0, 32)], bytes(96)),
    "type": _file([], [_tensor("t", [256], 19, 0)], bytes(512)),  # IQ1_S
    "unknown type": _file([], [_tensor("t", [4], 777, 0)], bytes(64)),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_give_one_line_naming_the_file(tmp_path: Path, case: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(MALFORMED[case])
    with pytest.raises(FlintError) as error:
        GgufFile(path)
    assert isinstance(error.value, CheckpointError | UnsupportedModel)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_minimal_file_is_well_formed(tmp_path: Path) -> None:
    """The same building blocks as above, so that those are refused for the reason they name."""
    path = tmp_path / "good.gguf"
    path.write_bytes(_file([U32_ONE], [_tensor("t", [16], 0, 0), _tensor("u", [8], 0, 64)], bytes(96)))
    file = GgufFile(path)
    assert file.metadata == {"a": 1}
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == {"t": (16,), "u": (8,)}


def test_an_unsupported_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(MALFORMED["type"])
    with pytest.raises(UnsupportedModel, match="IQ1_S"):
        GgufFile(path)


def test_nothing_there_and_something_else_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        open_checkpoint(tmp_path / "absent.gguf")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        open_checkpoint(tmp_path / "notes.txt")


def real_values(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Canonical name and values of every tensor of smollm2, by gguf.dequantize; Q and K un-permuted."""
    import gguf

    file = GgufFile(path)
    for name in tensor_shapes(open_checkpoint(path).config):
        tensor = file.tensors[gguf_name(name)]
        values = gguf.dequantize(file.rows(gguf_name(name)), gguf.GGMLQuantizationType[tensor.type])
        heads = {"q": 9, "k": 3}.get(name.rpartition(".")[2])
        if heads:  # component i of a head lies at row 2i, component i + 32 at row 2i + 1
            values = values.reshape(heads, 32, 2, -1).swapaxes(1, 2).reshape(values.shape)
        yield name, values.reshape(tensor.shape)


@pytest.mark.real_model
def test_the_real_models_config(smollm2_gguf: Path) -> None:
    with open_checkpoint(smollm2_gguf) as checkpoint:
        config = checkpoint.config
        assert checkpoint.format == "gguf Q4_1"
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (576, 30, 9, 3)
    assert (config.head_dim, config.intermediate_size, config.vocab_size) == (64, 1536, 49152)
    assert (config.rms_norm_eps, config.rope_theta, config.tie_word_embeddings) == (1e-5, 1e5, True)
    assert config.eos_token_ids[0] == 2


@pytest.mark.real_model
def test_the_real_model_is_packed_bit_for_bit(smollm2: Path, smollm2_gguf: Path) -> None:
    model = PackedModel.open(smollm2, verify=True)
    assert model.manifest.quantization.lossless
    seen = []
    for name, values in real_values(smollm2_gguf):
        packed = dequantize(model.matrix(name)) if values.ndim == 2 else model.vector(name)
        assert np.array_equal(packed.view(np.uint32), values.view(np.uint32)), name
        seen.append(name)
    assert seen == model.names()
    assert len(seen) == 272

"""The safetensors container: headers that lie are refused before anything is read or allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import CheckpointError
from engine.files.safetensors_file import SafetensorsFile, header
from tests.hugging_face_folders import safetensors_bytes


def file_of(entries: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


MALFORMED = {
    "empty": b"",
    "short": b"\1\2\3",
    "length": file_of({}, length=1 << 40),
    "length beyond the file": file_of({}, length=3),
    "not json": file_of(b"{nope"),
    "not an object": file_of([1, 2]),
    "not utf-8": file_of(b'{"\xff": 1}'),
    "nested": file_of(b'{"a":' * 50_000),
    "duplicate": file_of(b'{"t":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"t":1}'),
    "metadata": file_of({"__metadata__": {"a": 1}}),
    "entry": file_of({"t": 7}),
    "missing key": file_of({"t": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "unknown key": file_of({"t": {**entry(), "x": 1}}, bytes(8)),
    "dtype": file_of({"t": entry(dtype=4)}, bytes(8)),
    "shape": file_of({"t": entry(shape="2")}, bytes(8)),
    "negative extent": file_of({"t": entry(shape=[-2])}, bytes(8)),
    "huge extent": file_of({"t": entry(shape=[1 << 62])}, bytes(8)),
    "many dims": file_of({"t": entry(shape=[1] * 50)}, bytes(8)),
    "float extent": file_of({"t": entry(shape=[2.0])}, bytes(8)),
    "offsets": file_of({"t": entry(offsets=[0])}, bytes(8)),
    "offsets reversed": file_of({"t": entry(offsets=[8, 0])}, bytes(8)),
    "offsets outside": file_of({"t": entry(offsets=[8, 16])}, bytes(8)),
    "negative offset": file_of({"t": entry(offsets=[-8, 0])}, bytes(8)),
    "size": file_of({"t": entry(shape=[3])}, bytes(8)),
    "overlap": file_of({"t": entry(), "u": entry(offsets=[4, 12])}, bytes(12)),
    "gap": file_of({"t": entry(), "u": entry(offsets=[12, 20])}, bytes(20)),
    "rest": file_of({"t": entry()}, bytes(9)),
}


def test_a_name_of_megabytes_does_not_fill_the_screen(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(file_of({"t" * 3_000_000: 7}))
    with pytest.raises(CheckpointError, match=r"m\.safetensors") as error:
        SafetensorsFile(path)
    assert len(str(error.value)) < 1100


def test_many_repeated_keys_are_found_at_once(tmp_path: Path) -> None:
    """A search that looked at every pair of keys would take minutes."""
    path = tmp_path / "m.safetensors"
    keys = ",".join(f'"{i}":0' for i in range(300_000))
    path.write_bytes(file_of(f'{{{keys},"299999":1}}'.encode()))
    with pytest.raises(CheckpointError, match="duplicate key '299999'"):
        SafetensorsFile(path)


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_give_one_line_naming_the_file(tmp_path: Path, case: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(MALFORMED[case])
    with pytest.raises(CheckpointError, match=r"bad\.safetensors") as error:
        SafetensorsFile(path)
    assert "\n" not in str(error.value)


def test_the_same_building_blocks_make_a_good_file(tmp_path: Path) -> None:
    path = tmp_path / "good.safetensors"
    path.write_bytes(file_of({"t": entry(), "u": entry(offsets=[8, 16])}, np.arange(4, dtype=np.float32).tobytes()))
    file = SafetensorsFile(path)
    assert file.array("u").tolist() == [2.0, 3.0]  # misaligned by this header, so copied
    assert file.array("u").flags.aligned


def test_a_dtype_that_nobody_reads_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(file_of({"t": entry(dtype="F8_E4M3", shape=[8])}, bytes(8)))
    with pytest.raises(CheckpointError, match="t: dtype F8_E4M3 is not supported"):
        SafetensorsFile(path).array("t")


def test_missing_files_and_tensors_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        SafetensorsFile(tmp_path / "absent.safetensors")
    (tmp_path / "m.safetensors").write_bytes(file_of({"t": entry()}, bytes(8)))
    with pytest.raises(CheckpointError, match="missing tensor u"):
        SafetensorsFile(tmp_path / "m.safetensors").array("u")


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
dtypes = st.sampled_from(["float32", "float16", "uint16", "int32", "int64", "uint8"])
tensor_maps = st.dictionaries(st.text(min_size=1, max_size=12), st.tuples(dtypes, shapes), max_size=6)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(tensor_maps)
def test_round_trip_and_agreement_with_the_library(
    tmp_path_factory: pytest.TempPathFactory, layout: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    from safetensors import safe_open

    layout.pop("__metadata__", None)
    rng = np.random.default_rng(0)
    tensors = {name: (rng.integers(0, 99, shape)).astype(dtype) for name, (dtype, shape) in layout.items()}
    path = tmp_path_factory.mktemp("round") / "m.safetensors"
    path.write_bytes(safetensors_bytes(tensors))
    file = SafetensorsFile(path)
    assert list(file.tensors) == list(tensors)
    for name, array in tensors.items():
        assert np.array_equal(file.array(name), array)
    with safe_open(path, framework="numpy") as theirs:
        assert set(theirs.keys()) == set(tensors)


def test_the_data_starts_on_a_cache_line() -> None:
    for count in range(20):
        layout = {f"t{i}": ("F32", (i,)) for i in range(count)}
        assert len(header(layout, {})) % 64 == 0

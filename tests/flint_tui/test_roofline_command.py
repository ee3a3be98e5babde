"""`flint roofline`: the table, the plot, JSON, pictures, and what it is asked about."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.errors import CheckpointError, ModelNotFound, UsageError
from engine.files.paths import models_dir
from engine.machine import hardware
from engine.machine.hardware import Bandwidth
from engine.sources.catalog import CATALOG, EMBEDDED_DEFAULT
from flint_tui.cli import app
from tests.synthetic import small_config, write_random_packed

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def _this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured: 20 GB/s, and no GPU."""
    from engine.backends import cuda
    from engine.errors import BackendError

    def no_gpu() -> None:
        raise BackendError("none")

    monkeypatch.setattr(hardware, "streaming_bandwidth", lambda: Bandwidth(20.0, "measured streaming read, 2 threads"))
    monkeypatch.setattr(hardware, "processor", lambda: "Some CPU")
    monkeypatch.setattr(cuda, "find_gpu", no_gpu)
    monkeypatch.setenv("COLUMNS", "120")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["roofline", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def run_json(*arguments: str) -> dict:
    return json.loads(run(*arguments, "--json"))


def test_a_catalogue_model_on_a_datasheet() -> None:
    text = run("granite-4.1-3b", "--gpu", "h200")
    assert "granite-4.1-3b on H200 SXM" in text
    assert "4,800 GB/s (datasheet) · 989 TFLOP/s (bf16, datasheet) · ridge 206 FLOP per byte" in text
    row = next(line for line in text.splitlines() if line.split()[:1] == ["int4"])
    assert row.split()[:7] == ["int4", "0.5", "1.701", "4", "2,821", "2,357", "20,768"]
    assert "never (cap 20.3)" in row
    assert "FLOP per byte" in text.splitlines()[-1]  # the plot's axis
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [60, 80])
def test_no_figure_is_cut_off(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    words = run("granite-4.1-3b", "--gpu", "H200").split("┌")[0].split()
    assert {"6.805", "705", "672", "83,072"} < set(words)
    assert {"3.403", "1,411", "1,284", "41,536"} < set(words)
    assert {"1.701", "2,821", "2,357", "20,768"} < set(words)


def test_this_machine_by_default() -> None:
    text = run()
    assert f"{EMBEDDED_DEFAULT} on Some CPU" in text
    assert "20 GB/s (measured streaming read, 2 threads) · arithmetic not known (--flops)" in text
    found = run_json()
    assert found["ridge_flop_per_byte"] is None
    assert found["ceilings"][0]["batch_at_ridge"] is None
    assert found["peak_source"] == "measured streaming read, 2 threads"
    assert run_json("--flops", "0.5")["ridge_flop_per_byte"] == 25


def test_a_given_machine() -> None:
    found = run_json("llama-3.2-1b-instruct", "--bandwidth", "1935", "--flops", "312", "--ctx", "0")
    assert found["ridge_flop_per_byte"] == pytest.approx(161.24, abs=0.01)
    assert found["ceilings"][0]["tok_s"] == found["ceilings"][0]["tok_s_context"]
    assert found["ceilings"][0]["batch_at_ridge"] == pytest.approx(161.24, abs=0.01)


def test_a_packed_model_has_its_own_row() -> None:
    write_random_packed(models_dir() / "mine" / "int4-g32", small_config("llama"), name="mine")
    for arguments in (["mine"], [], [str(models_dir() / "mine" / "int4-g32")]):
        found = run_json(*arguments, "--bandwidth", "100")
        assert found["model"] == "mine"
        assert [ceiling["precision"] for ceiling in found["ceilings"]][:3] == ["bf16", "int8", "int4"]
        packed = found["ceilings"][3]
        assert packed["tok_s"] == pytest.approx(100e9 / packed["weight_bytes"])


def test_a_config_or_a_gguf_on_disk(tmp_path: Path, smollm2_gguf: Path) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
    }
    config |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072}
    config |= {"vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
    config |= {"tie_word_embeddings": True, "eos_token_id": 151645, "hidden_act": "silu"}
    folder = tmp_path / "Qwen3-0.6B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    known = run_json("qwen3-0.6b")
    for path in (folder, folder / "config.json"):
        found = run_json(str(path))
        assert found["model"] == "Qwen3-0.6B"
        assert found["weights_per_token"] == known["weights_per_token"]
    assert run_json(str(smollm2_gguf))["weights_per_token"] == run_json(EMBEDDED_DEFAULT)["weights_per_token"]


@pytest.mark.parametrize("name", CATALOG)
def test_every_catalogue_entry(name: str) -> None:
    found = run_json(name, "--gpu", "rtx-4090", "--ctx", "1000000000")
    assert found["context"] == CATALOG[name].context
    assert found["ceilings"][0]["tok_s"] > found["ceilings"][0]["tok_s_context"]


@pytest.mark.parametrize("model", [[], ["granite-4.1-8b", "--gpu", "b200"], ["qwen3-0.6b", "--flops", "1"]])
def test_the_svg_is_well_formed_and_inside_its_frame(model: list[str], tmp_path: Path) -> None:
    path = tmp_path / "roofline.svg"
    run(*model, "--svg", str(path))
    picture = ElementTree.parse(path).getroot()
    width, height = float(picture.attrib["width"]), float(picture.attrib["height"])
    circles = picture.findall(f"{SVG}circle")
    assert len(circles) == 3
    for circle in circles:
        assert 0 < float(circle.attrib["cx"]) < width
        assert 0 < float(circle.attrib["cy"]) < height
    texts = ["".join(text.itertext()) for text in picture.iter(f"{SVG}text")]
    assert any(text.startswith("int4 ") and text.endswith(" tok/s") for text in texts)
    assert any(text.startswith("ridge ") for text in texts) == bool(model)


def test_the_png_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py", reason="resvg-py is optional")
    path = tmp_path / "roofline.png"
    run("--png", str(path))
    assert path.read_bytes().startswith(b"\x89PNG\r\n")


def test_without_resvg_png_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "resvg_py", None)
    with pytest.raises(UsageError, match="--png needs resvg-py"):
        run("--png", str(tmp_path / "x.png"))


@pytest.mark.parametrize(
    ("arguments", "error", "line"),
    [
        (["no-such-model"], ModelNotFound, "No packed model named 'no-such-model'"),
        (["--gpu", "gtx-9"], UsageError, "No datasheet for a GPU named 'gtx-9'"),
        (["--gpu", "h200", "--bandwidth", "5"], UsageError, "--gpu and --bandwidth or --flops contradict each other"),
        (["--bandwidth", "0"], UsageError, "--bandwidth 0 is not a positive number"),
        (["--bandwidth", "nan"], UsageError, "--bandwidth nan is not a positive number"),
        (["--flops", "-1"], UsageError, "--flops -1 is not a positive number"),
        (["--ctx", "-1"], UsageError, "--ctx -1 is negative"),
        (["--svg", "/no/such/folder/x.svg"], UsageError, "/no/such/folder/x.svg cannot be written: No such file"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], error: type[Exception], line: str) -> None:
    with pytest.raises(error) as caught:
        run(*arguments)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_broken_config_is_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(Exception, match=r"config|model") as caught:
        run(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert content == "{}" or isinstance(caught.value, CheckpointError)

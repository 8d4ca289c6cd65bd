"""`exl3-dflash inspect`: drafters of every kind, EXL3 models of others, and what is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exl3_dflash.cli.app import main
from quantize.linear import QuantSettings, quantize_linear
from tests.family_models import FAMILY, make_family_drafter
from tests.tiny_models import make_tiny_drafter


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def inspect(capsys: pytest.CaptureFixture[str], path: object) -> dict[str, Any]:
    code, stdout, stderr = run(capsys, "inspect", path, "--json")
    assert code == 0, stderr
    return json.loads(stdout)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small drafter at 3 bits, its own head at 5."""
    folder = tmp_path_factory.mktemp("inspect")
    source = make_tiny_drafter(folder / "drafter", num_hidden_layers=1, optional=["lm_head.weight"])
    with pytest.raises(SystemExit) as stop:
        main(["quantize", str(source), "--out", str(folder / "out"), "--calibration", "none", "--bits", "3",
              "--head-bits", "5", "--threads", "1", "-q"])  # fmt: skip
    assert not stop.value.code
    return folder / "out"


def test_our_own_drafter(capsys, quantized: Path) -> None:
    found = inspect(capsys, quantized)
    report = json.loads((quantized / "quantize_report.json").read_text())
    assert found["kind"] == "DFlash drafter, EXL3"
    assert found["bpw"] == report["bpw"]
    assert found["size_bytes"] == report["size_bytes"] == found["quantized_bytes"] + found["copied_bytes"]
    assert found["head"] == "its own, 5 bits"
    assert found["calibration"]["run"]["mode"] == "none"
    assert found["provenance"]["source_sha256"] == report["source_sha256"]
    bits = {tensor["name"]: tensor["bits"] for tensor in found["tensors"] if tensor["quantized"]}
    assert bits == {tensor["name"]: tensor["bits"] for tensor in report["tensors"]}
    shapes = {tensor["name"]: tensor["shape"] for tensor in found["tensors"] if tensor["quantized"]}
    assert shapes == {tensor["name"]: tensor["shape"] for tensor in report["tensors"]}
    assert found["drafter"]["target_layer_ids"] == [0, 2, 3]
    assert found["problems"] == []
    code, table, _ = run(capsys, "inspect", quantized)
    assert code == 0
    for text in ("none was run", "layers.0.mlp.up_proj", "3 bits mul1", "fc.weight", "its own, 5 bits"):
        assert text in table


def test_an_unquantized_drafter(capsys, tmp_path: Path) -> None:
    found = inspect(capsys, make_tiny_drafter(tmp_path / "plain"))
    assert found["kind"] == "DFlash drafter, not quantized"
    assert found["bpw"] is None
    assert found["head"].startswith("none of its own")
    assert found["quantized_bytes"] == 0
    assert found["drafter"]["member"] == "DFlash"
    assert found["drafter"]["config_keys"] == "dflash_config object"
    assert len(found["sha256"]) == 64
    assert run(capsys, "inspect", tmp_path / "plain", "--no-tensors")[0] == 0


def test_the_embedded_drafter(capsys) -> None:
    assert inspect(capsys, "demo")["kind"] == "DFlash drafter, not quantized"


def test_a_calibration_that_others_state_is_not_believed(capsys, quantized: Path, tmp_path: Path) -> None:
    """FIELD_REPORTS 19: ExLlamaV3's converter writes 250 x 2048 for drafters it calibrated with nothing."""
    copy = tmp_path / "theirs"
    copy.mkdir()
    config = json.loads((quantized / "config.json").read_text())
    del config["exl3_dflash"]
    config["quantization_config"]["calibration"] = {"rows": 250, "cols": 2048}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "model.safetensors").write_bytes((quantized / "model.safetensors").read_bytes())
    found = inspect(capsys, copy)
    assert found["calibration"] == {"stated": {"rows": 250, "cols": 2048}, "run": None}
    assert "no report proves it" in found["notes"][0]


def test_an_exl3_model_of_another_architecture(capsys, tmp_path: Path) -> None:
    linear = quantize_linear(torch.randn(128, 256), None, QuantSettings(bits=4, codebook="mcg", threads=1))
    tensors = linear.tensors("model.layers.0.self_attn.q_proj") | {"model.embed_tokens.weight": torch.ones(8, 128)}
    save_file(tensors, tmp_path / "model.safetensors")
    quantization = {"quant_method": "exl3", "version": "0.0.4", "bits": 4.0, "head_bits": 6}
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = inspect(capsys, tmp_path)
    assert (found["kind"], found["drafter"], found["problems"]) == ("EXL3 model", None, [])
    assert [t["shape"] for t in found["tensors"] if t["quantized"]] == [[128, 256]]
    assert found["tensors"][0]["type"] == "mcg"
    assert 4 < found["bpw"] < 4.3
    assert run(capsys, "inspect", tmp_path)[0] == 0


def test_a_drafter_that_lacks_a_tensor_is_shown_with_its_problem(capsys, tmp_path: Path) -> None:
    directory = make_tiny_drafter(tmp_path / "drafter")
    tensors = load_file(directory / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, directory / "model.safetensors")
    found = inspect(capsys, directory)
    assert "missing fc.weight" in found["problems"][0]
    assert "problem" in run(capsys, "inspect", directory)[1]


def test_what_this_version_cannot_run_can_be_looked_at(capsys, tmp_path: Path) -> None:
    found = inspect(capsys, make_tiny_drafter(tmp_path / "drafter", architectures=["DSparkDraftModel"]))
    assert "DSpark" in found["problems"][0]
    assert found["drafter"] is None
    assert len(found["tensors"]) > 10


@pytest.mark.parametrize("name", FAMILY)
def test_every_member_of_the_family(capsys, tmp_path: Path, name: str) -> None:
    found = inspect(capsys, make_family_drafter(tmp_path / "drafter", name))
    assert found["problems"] == []
    assert found["kind"] == "DFlash drafter, not quantized"
    assert run(capsys, "inspect", tmp_path / "drafter")[0] == 0


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_selector_codebooks_are_found_under_both_names(capsys, tmp_path: Path, suffix: str) -> None:
    """FIELD_REPORTS 17."""
    weights = make_family_drafter(tmp_path / "drafter", "dflash2") / "model.safetensors"
    tensors = load_file(weights)
    for name in [name for name in tensors if "_codebook" in name]:
        tensors[name.removesuffix(".weight") + suffix] = tensors.pop(name)
    save_file(tensors, weights)
    found = inspect(capsys, tmp_path / "drafter")
    assert found["problems"] == []
    assert sum("_codebook" in tensor["name"] for tensor in found["tensors"]) == 2


@pytest.mark.parametrize("damage", ["truncated", "gap", "empty", "index", "config"])
def test_damaged_files_are_one_line(capsys, tmp_path: Path, damage: str) -> None:
    """FIELD_REPORTS 16 and 17."""
    directory = make_tiny_drafter(tmp_path / "drafter")
    weights = directory / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif damage == "gap":
        weights.write_bytes(weights.read_bytes() + bytes(10))
    elif damage == "empty":
        weights.unlink()
    elif damage == "index":
        index = {"weight_map": {"fc.weight": "model-00001-of-00009.safetensors"}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        (directory / "config.json").write_text("[1]")
    code, stdout, stderr = run(capsys, "inspect", directory)
    assert (code, stdout) == (1, "")
    assert len(stderr.strip().splitlines()) == 1
    assert "drafter" in stderr

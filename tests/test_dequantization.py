"""`exl3-dflash dequantize`: the same drafter in plain weights, complete, with its origin, or nothing at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from exl3_dflash.cli.app import main
from exl3_dflash.conversion.job import quantize_drafter
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.dequantization import dequantize_drafter
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.hub.resolve import resolve
from exl3_dflash.target.load import load_target
from tests.tiny_models import make_tiny_drafter

ROUNDING = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@pytest.fixture(scope="module")
def demo_6bpw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "demo-6.00bpw"
    quantize_drafter(JobSettings("demo", None, out, bits=6, calibration="none", threads=1))
    return out


@pytest.fixture(scope="module")
def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, object]:
    """Real taps, block embeddings and anchors of the embedded target, and the target."""
    target = load_target(resolve("demo", "target").path, device="cpu", dtype=torch.float32)
    ids = torch.arange(97, 97 + 48)
    taps = target.tap_rows(ids, (0, 1, 2)).taps
    block = torch.tensor([100] + [261] * 7)
    return taps, target.embed(block)[None].repeat(4, 1, 1), torch.tensor([8, 16, 24, 32]), target


def drafter_logits(path: Path, inputs) -> torch.Tensor:
    taps, embeddings, anchors, target = inputs
    model = DrafterModel.from_checkpoint(DrafterCheckpoint.open(path), dtype=torch.float32)
    with torch.inference_mode():
        return model.logits(target, model.forward_anchors(taps, embeddings, anchors))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_logits_are_those_of_the_quantized_drafter(demo_6bpw: Path, inputs, tmp_path: Path, dtype: str) -> None:
    dequantize_drafter(str(demo_6bpw), tmp_path / "plain", dtype=dtype)
    exact, plain = drafter_logits(demo_6bpw, inputs), drafter_logits(tmp_path / "plain", inputs)
    error = float((plain - exact).norm() / exact.norm())
    assert error <= 4 * ROUNDING[dtype] + 1e-6, error


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_tensor_is_there_in_the_asked_type(demo_6bpw: Path, tmp_path: Path, dtype: str) -> None:
    report = dequantize_drafter(str(demo_6bpw), tmp_path / "plain", dtype=dtype)
    before, after = DrafterCheckpoint.open(demo_6bpw), DrafterCheckpoint.open(tmp_path / "plain")
    assert not after.is_exl3
    assert after.tensor_names() == before.tensor_names()
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    assert set(tensors) == set(before.tensor_names())
    assert {str(tensor.dtype) for tensor in tensors.values()} == {f"torch.{dtype}"}
    for name in before.tensor_names():
        assert torch.equal(tensors[name], before.load(name).to(getattr(torch, dtype)))
    assert report.tensors == len(tensors)
    assert report.size_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_the_config_says_where_it_comes_from(demo_6bpw: Path, tmp_path: Path) -> None:
    dequantize_drafter(str(demo_6bpw), tmp_path / "plain")
    source, config = (json.loads((path / "config.json").read_text()) for path in (demo_6bpw, tmp_path / "plain"))
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    provenance = config["exl3_dflash"]
    assert provenance["dequantized_from_sha256"] == DrafterCheckpoint.open(demo_6bpw).sha256
    assert provenance["dequantized_from_bits"] == 6.0
    assert provenance["source_sha256"] == source["exl3_dflash"]["source_sha256"]
    for key in ("dflash_config", "block_size", "tap_shift", "rope_theta", "hidden_size"):
        assert config[key] == source[key]


def test_biases_padding_and_licenses_go_along(tmp_path: Path) -> None:
    source = make_tiny_drafter(tmp_path / "source", num_hidden_layers=1, attention_bias=True)
    (source / "LICENSE").write_text("MIT")
    (source / "README.md").write_text("---\nlicense: mit\n---\n")
    quantize_drafter(JobSettings(str(source), None, tmp_path / "exl3", bits=8, calibration="none", threads=1))
    dequantize_drafter(str(tmp_path / "exl3"), tmp_path / "plain", dtype="float32")
    assert {path.name for path in (tmp_path / "plain").iterdir()} == {"config.json", "model.safetensors", "LICENSE"}
    original, plain = DrafterCheckpoint.open(source), DrafterCheckpoint.open(tmp_path / "plain")
    for name in original.tensor_names():
        before, after = original.load(name).float(), plain.load(name).float()
        assert before.shape == after.shape
        assert float((before - after).norm() / before.norm()) < 0.02


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def test_the_command_and_what_it_refuses(capsys, demo_6bpw: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, stdout, stderr = run(capsys, "dequantize", demo_6bpw, "--out", out, "--json", "-q")
    assert code == 0, stderr
    assert json.loads(stdout)["dtype"] == "bfloat16"
    for arguments, said in (
        ((demo_6bpw, "--out", out), "exists and is not empty"),
        (("demo", "--out", tmp_path / "new"), "has no quantized tensor"),
        ((demo_6bpw, "--out", tmp_path / "new", "--dtype", "int8"), "one of bfloat16, float16, float32"),
    ):
        code, stdout, stderr = run(capsys, "dequantize", *arguments)
        assert (code, stdout) == (1, "")
        assert said in stderr
    assert not (tmp_path / "new").exists()
    assert run(capsys, "dequantize", demo_6bpw, "--out", out, "--force", "-q")[0] == 0


def test_a_value_that_the_type_cannot_hold(demo_6bpw: Path, tmp_path: Path) -> None:
    copy = tmp_path / "large"
    copy.mkdir()
    (copy / "config.json").write_bytes((demo_6bpw / "config.json").read_bytes())
    tensors = load_file(demo_6bpw / "model.safetensors")
    tensors["norm.weight"] = torch.full_like(tensors["norm.weight"], 1e6)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(Exl3DflashError, match=r"norm\.weight does not fit into torch\.float16"):
        dequantize_drafter(str(copy), tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()
    assert dequantize_drafter(str(copy), tmp_path / "out").dtype == "bfloat16"

"""The audit accounts for every tensor of a checkpoint, and names what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quantize.audit import AuditReport, audit_directory
from quantize.checkpoint import CheckpointWriter, QuantizationConfig
from quantize.errors import Exl3DflashError
from quantize.linear import QuantizedLinear, QuantSettings, quantize_linear

EXPECTED = ("fc.weight", "fc.bias", "up.weight", "norm.weight")
SHAPES = {"fc": (100, 128), "up": (128, 130)}


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=random) * 0.05 for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def quantized(weights: dict[str, torch.Tensor]) -> dict[str, QuantizedLinear]:
    settings = QuantSettings(bits=4, threads=1)
    bias = torch.randn(128)
    return {
        name: quantize_linear(weight, None, settings, bias=bias if name == "fc" else None)
        for name, weight in weights.items()
    }


def write(out: Path, layers: dict[str, QuantizedLinear], changes: dict[str, torch.Tensor | None] | None = None) -> Path:
    tensors = {"norm.weight": torch.ones(128)}
    for name, layer in layers.items():
        tensors.update(layer.tensors(name))
    for name, tensor in (changes or {}).items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    with CheckpointWriter(out) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.set_config({}, QuantizationConfig(4, 8, "mul1", "auto", 0, 0).to_dict())
        return writer.finish()


def audit(out: Path, weights: dict[str, torch.Tensor], layers: dict[str, QuantizedLinear]) -> AuditReport:
    errors = {name: layer.weight_error for name, layer in layers.items()}
    return audit_directory(out, EXPECTED, weights.__getitem__, errors)


def test_a_good_checkpoint(
    tmp_path: Path, weights: dict[str, torch.Tensor], quantized: dict[str, QuantizedLinear]
) -> None:
    report = audit(write(tmp_path / "out", quantized), weights, quantized)
    assert [linear.name for linear in report.linears] == ["fc", "up"]
    assert report.linears[0].stored == (4, "mul1", 128, 128)
    assert report.copied == ("norm.weight",)
    for linear in report.linears:
        assert linear.weight_error == pytest.approx(quantized[linear.name].weight_error, rel=1e-4)
        assert linear.weight_error is not None
        assert 0.001 < linear.weight_error < 0.02
    loose = audit_directory(tmp_path / "out")
    assert [linear.weight_error for linear in loose.linears] == [None, None]
    assert loose.sha256 == report.sha256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm.weight": None}, "norm.weight is missing"),
        ({"extra": torch.ones(2)}, "extra belongs to nothing"),
        ({"fc.bias": None}, "fc.bias is missing"),
        ({"up.bias": torch.zeros(256).half()}, "up.bias belongs to nothing"),
        ({"norm.weight": torch.full((128,), float("nan"))}, "norm.weight is not finite"),
        ({"up.svh": torch.full((256,), float("inf")).half()}, "up decodes to values that are not finite"),
        ({"up.mul1": None}, "up has the error"),
        ({"up.svh": torch.ones(256).half()}, "up has the error"),
        ({"up.svh": torch.ones(128).half()}, "up.svh is torch.float16 [128]"),
        ({"up.trellis": None}, "no trellis"),
    ],
)
def test_each_fault_is_named(
    tmp_path: Path,
    weights: dict[str, torch.Tensor],
    quantized: dict[str, QuantizedLinear],
    changes: dict[str, torch.Tensor | None],
    message: str,
) -> None:
    out = write(tmp_path / "out", quantized, changes)
    with pytest.raises(Exl3DflashError) as caught:
        audit(out, weights, quantized)
    assert message in str(caught.value)


def test_layers_of_another_size(
    tmp_path: Path, weights: dict[str, torch.Tensor], quantized: dict[str, QuantizedLinear]
) -> None:
    out = write(tmp_path / "out", quantized)
    other = {**weights, "up": torch.ones(128, 100)}
    with pytest.raises(Exl3DflashError, match="up is stored as 128 x 256, the original is 128 x 100"):
        audit_directory(out, EXPECTED, other.__getitem__)


def test_all_problems_in_one_error(tmp_path: Path, quantized: dict[str, QuantizedLinear]) -> None:
    out = write(tmp_path / "out", quantized)
    with pytest.raises(Exl3DflashError) as caught:
        audit_directory(out, [*(f"layers.{i}.x" for i in range(20)), "fc.weight"])
    assert "layers.0.x is missing; layers.1.x is missing" in str(caught.value)
    assert "and 15 more" in str(caught.value)


def test_recorded_layers_must_be_there(
    tmp_path: Path, weights: dict[str, torch.Tensor], quantized: dict[str, QuantizedLinear]
) -> None:
    out = write(tmp_path / "out", quantized)
    with pytest.raises(Exl3DflashError, match="up has no recorded error; down is missing"):
        audit_directory(out, None, weights.__getitem__, {"fc": quantized["fc"].weight_error, "down": 0.1})


@pytest.mark.parametrize("where", ["storage", "config"])
def test_configuration_that_says_something_else(
    tmp_path: Path, quantized: dict[str, QuantizedLinear], where: str
) -> None:
    out = write(tmp_path / "out", quantized)
    file = out / ("quantization_config.json" if where == "storage" else "config.json")
    content = json.loads(file.read_text())
    if where == "storage":
        content["tensor_storage"]["up"]["bits_per_weight"] = 5
    else:
        content["quantization_config"]["bits"] = 3
    file.write_text(json.dumps(content))
    message = "does not describe up" if where == "storage" else "disagree"
    with pytest.raises(Exl3DflashError, match=message):
        audit_directory(out)
    file.write_text("{")
    with pytest.raises(Exl3DflashError, match="cannot be read"):
        audit_directory(out)

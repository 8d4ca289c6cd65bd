"""Directories: ExLlamaV3's Config, Model and collection load ours whole, and we read those that its converter makes."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from exl3_dflash.dequantization import dequantize_drafter
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.hub.resolve import resolve
from exl3_dflash.inspection import inspect_model
from quantize.audit import audit_directory
from quantize.checkpoint import TensorDirectory, linear_names, read_linear
from quantize.hadamard import padded_features
from quantize.linear import decode_linear

from .tiny_drafter import Sizes, random_layers, save_source, write_quantized

pytestmark = pytest.mark.conformance
CPU = torch.device("cpu")

DRAFTERS = {
    "128": Sizes(),
    "biases, odd heads and MLP": Sizes(heads=3, kv_heads=1, intermediate=200, bias=True),
    "192": Sizes(hidden=192, heads=3, kv_heads=1, intermediate=256, layers=2),
    "576": Sizes(hidden=576, heads=9, kv_heads=3, intermediate=640, taps=3),
}

CONVERTED = DRAFTERS["biases, odd heads and MLP"]


def quantized_names(sizes: Sizes) -> list[str]:
    """fc is never padded by ExLlamaV3, so it is quantized only where it needs no padding."""
    return [name for name in sizes.linears() if name != "fc" or sizes.hidden % 128 == 0]


@pytest.fixture(params=list(DRAFTERS))
def drafter(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Sizes, Path]:
    """Sizes, and the directory that our writer made of a random drafter of that size; several shards."""
    sizes = DRAFTERS[request.param]
    tensors = sizes.tensors()
    layers = random_layers(tensors, {name: sizes.linears()[name] for name in quantized_names(sizes)})
    return sizes, write_quantized(tmp_path / "out", sizes, tensors, layers, shard_bytes=100_000)


def leaves(model: Any) -> Iterator[Any]:
    return (module for module in model if not module.modules)


def test_exllama_loads_every_tensor_of_ours(
    exllama: types.ModuleType, drafter: tuple[Sizes, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, out = drafter
    assert len(list(out.glob("*.safetensors"))) > 1
    config = exllama.Config.from_directory(str(out))
    model = exllama.Model.from_config(config)
    asked = record_reads(config.stc, monkeypatch)
    for module in model.modules:
        module.load(CPU)
    assert asked == set(TensorDirectory.open(out).names())
    kinds = {module.key: module.quant_type for module in leaves(model) if hasattr(module, "quant_type")}
    wanted = quantized_names(sizes)
    assert kinds == {name: "exl3" if name in wanted else "fp16" for name in sizes.linears()}
    layout = model.get_layout_tree(4)
    assert "DFlashInputLayer" in layout
    for module in leaves(model):
        if module.key in wanted:
            shape = sizes.linears()[module.key]
            assert (module.inner.in_features, module.inner.out_features) == tuple(map(padded_features, shape))
            assert (module.inner.K, module.inner.mul1) == (8, True)


def record_reads(collection: Any, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the tensors of the files that the collection is asked for from now on."""
    asked: set[str] = set()
    for method in ("get_tensor", "get_codebook_marker"):
        real = getattr(collection, method)

        def recorded(key: str, *args: Any, _real: Any = real, **options: Any) -> Any:
            if collection.has_tensor(key):
                asked.add(key)
            return _real(key, *args, **options)

        monkeypatch.setattr(collection, method, recorded)
    return asked


def test_storage_is_described_as_exllama_describes_it(exllama: types.ModuleType, drafter: tuple[Sizes, Path]) -> None:
    from exllamav3.conversion.quant_config import create_quantization_config_json

    _, out = drafter
    ours = json.loads((out / "quantization_config.json").read_text())
    create_quantization_config_json(str(out))
    assert json.loads((out / "quantization_config.json").read_text()) == ours


def convert(exllama: types.ModuleType, source: Path, work: Path, out: Path, quant_args: dict[str, Any]) -> None:
    """What ExLlamaV3's converter does with a model that it quantizes uncalibrated: each module, then compilation."""
    from exllamav3.conversion.compile import compile_model

    config = exllama.Config.from_directory(str(source))
    model = exllama.Model.from_config(config)
    (work / "qtensors").mkdir(parents=True)
    for seed, module in enumerate(model.modules):
        module.load(CPU)
        tensors: dict[str, torch.Tensor] = {}
        for part in module:
            if isinstance(part, exllama.modules.Linear) and part.qmap:
                part.convert_exl3(part.init_H_data(False), {**quant_args, "seed": seed})
            tensors |= part.get_tensors()
        save_file(tensors, work / "qtensors" / f"{module.key}.safetensors")
        module.unload()
    args = {"in_dir": str(source), "out_dir": str(out), "work_dir": str(work), "shard_size": 8192, "final_bits": 6.0}
    args |= {"head_bits": 8, "cal_rows": 250, "cal_cols": 2048, "apply_out_scales": None, "codebook": "mul1"}
    compile_model(args, model, config, None)


@pytest.fixture(scope="module")
def converted(exllama: types.ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ExLlamaV3's converter makes of a random drafter with biases and widths that need padding."""
    folder = tmp_path_factory.mktemp("converted")
    source = save_source(folder / "source", CONVERTED, CONVERTED.tensors())
    quant_args = {"K": 6, "devices": [CPU], "apply_out_scales": None, "mul1": True}
    convert(exllama, source, folder / "work", folder / "out", quant_args)
    return folder / "out"


def test_its_converted_directory_is_read_and_audited(converted: Path) -> None:
    tensors, shapes = CONVERTED.tensors(), CONVERTED.linears()
    with TensorDirectory.open(converted) as directory:
        found = linear_names(directory)
        assert found.keys() == shapes.keys()
        for name, shape in shapes.items():
            assert found[name] == (6, "mul1", *map(padded_features, shape))
            read = read_linear(directory, name, *shape)
            weight = tensors[f"{name}.weight"].float().T
            assert (decode_linear(read) - weight).square().sum() < 1e-3 * weight.square().sum()
            if f"{name}.bias" in tensors:
                assert read.bias is not None
                assert torch.equal(read.bias, tensors[f"{name}.bias"].half())
    report = audit_directory(converted, tensors, lambda name: tensors[f"{name}.weight"].T)
    assert {linear.name for linear in report.linears} == shapes.keys()


def test_its_converted_directory_is_inspected_and_dequantized(converted: Path, tmp_path: Path) -> None:
    found = inspect_model(resolve(str(converted), "drafter"))
    assert (found.kind, found.problems) == ("DFlash drafter, EXL3", [])
    shapes = {tensor.name: tuple(tensor.shape) for tensor in found.tensors if tensor.quantized}
    assert shapes == CONVERTED.linears()
    assert found.bpw is not None
    assert found.bpw > 6
    assert found.calibration["stated"] == {"rows": 250, "cols": 2048}
    assert any("no report proves it" in note for note in found.notes)  # it ran none: see `convert`

    dequantize_drafter(str(converted), tmp_path / "plain", dtype="float32")
    before, after = DrafterCheckpoint.open(converted), DrafterCheckpoint.open(tmp_path / "plain")
    assert not after.is_exl3
    assert all(torch.equal(before.load(name).float(), after.load(name)) for name in before.tensor_names())


def test_ours_has_the_form_of_its_converted_directory(converted: Path, tmp_path: Path) -> None:
    tensors = CONVERTED.tensors()
    ours = write_quantized(tmp_path / "ours", CONVERTED, tensors, random_layers(tensors, CONVERTED.linears()))
    configs = [json.loads((path / "config.json").read_text()) for path in (ours, converted)]
    assert configs[0]["quantization_config"].keys() == configs[1]["quantization_config"].keys()
    mine, theirs = TensorDirectory.open(ours), TensorDirectory.open(converted)
    assert mine.names() == theirs.names()
    for name in theirs:
        axes = 2 if name.endswith(".trellis") else None  # the third axis is the bits
        assert (mine.shape(name)[:axes], mine.dtype(name)) == (theirs.shape(name)[:axes], theirs.dtype(name)), name

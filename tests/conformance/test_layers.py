"""Layers: every rate and codebook decodes alike here, in ExLlamaV3, and from the format's description alone."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quantize.checkpoint import CheckpointWriter, TensorDirectory, read_linear
from quantize.codebook import CODEBOOKS, codebook_values
from quantize.hadamard import padded_features
from quantize.linear import QuantizedLinear, decode_linear
from quantize.trellis import SUPPORTED_BITS, pack_states, unpack_states

from . import format_decode
from .exllama_cpu import exllama_on_cpu, why_not
from .tiny_drafter import Sizes, random_layers, write_quantized

pytestmark = pytest.mark.conformance
CPU = torch.device("cpu")
RATES = [
    (bits, codebook) for bits in SUPPORTED_BITS for codebook in CODEBOOKS if bits == int(bits) or codebook == "mul1"
]


def random_layer(bits: float, codebook: str, rows: int = 256, columns: int = 128) -> QuantizedLinear:
    random = torch.Generator().manual_seed(int(10 * bits))
    size = padded_features(rows) // 16, padded_features(columns) // 16, int(16 * bits)
    trellis = torch.randint(-(2**15), 2**15, size, generator=random).to(torch.int16)
    suh, svh = (torch.randn(side * 16, generator=random).half() for side in size[:2])
    return QuantizedLinear(trellis, suh, svh, None, codebook, bits, rows, columns, 0.0, 0.0, None, 0.0)


def relative_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def exllama_linear(layer: QuantizedLinear) -> Any:
    """ExLlamaV3's LinearEXL3 around a layer's stored tensors."""
    from exllamav3.modules.quant import LinearEXL3

    stored = {name.removeprefix("x."): tensor for name, tensor in layer.tensors("x").items()}
    return LinearEXL3(None, layer.suh.numel(), layer.svh.numel(), **stored)


@pytest.mark.parametrize(("bits", "codebook"), RATES)
def test_decoding_agrees_with_exllama_and_with_the_format(
    exllama: types.ModuleType, bits: float, codebook: str
) -> None:
    layer = random_layer(bits, codebook)
    ours = decode_linear(layer)
    theirs = exllama_linear(layer).get_weight_tensor()  # fp16 arithmetic
    assert relative_difference(ours, theirs) < 1e-3
    stored = (layer.trellis.numpy(), layer.suh.numpy(), layer.svh.numpy())
    from_description = torch.from_numpy(format_decode.decode(*stored, bits, codebook))
    assert relative_difference(ours, from_description) < 1e-6


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_every_value_of_the_codebooks_agrees(codebook: str) -> None:
    from_description = format_decode.codebook_value(np.arange(2**16), codebook)
    assert torch.equal(codebook_values(codebook), torch.from_numpy(from_description))


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_bit_streams_agree(bits: float) -> None:
    packed = np.random.default_rng(int(2 * bits)).integers(-(2**15), 2**15, (5, int(16 * bits))).astype(np.int16)
    states = np.stack([format_decode.ring_states(tile, bits) for tile in packed])
    assert np.array_equal(unpack_states(torch.from_numpy(packed), bits).numpy(), states)
    assert np.array_equal(format_decode.pack_states(states, bits), packed)
    assert np.array_equal(pack_states(torch.from_numpy(states), bits).numpy(), packed)


def test_forward_of_padded_layers(exllama: types.ModuleType, tmp_path: Path) -> None:
    """A drafter whose heads and MLP need padding, with biases: every layer's output is x W + b, unpadded."""
    sizes = Sizes(heads=3, kv_heads=1, intermediate=200, bias=True)
    tensors = sizes.tensors()
    layers = random_layers(tensors, sizes.linears())
    out = write_quantized(tmp_path / "out", sizes, tensors, layers)
    model = exllama.Model.from_config(exllama.Config.from_directory(str(out)))
    for module in model.modules:
        module.load(CPU)
    for linear in (module for module in model if module.key in layers and not module.modules):
        layer = layers[linear.key]
        x = torch.randn(1, 5, layer.in_features).half()
        wanted = x.double() @ decode_linear(layer).double() + (0.0 if layer.bias is None else layer.bias.double())
        given = linear.forward(x, {}, out_dtype=torch.float)[..., : layer.out_features]
        assert relative_difference(given, wanted) < 3e-3, linear.key


def test_packed_signs(exllama: types.ModuleType, tmp_path: Path) -> None:
    """The form of early files: signs without scales, one bit each."""
    from exllamav3.modules.quant import LinearEXL3

    layer = random_layer(3, "mul1")
    signs = [torch.randint(-(2**15), 2**15, (side // 16,)).to(torch.int16) for side in (256, 128)]
    with CheckpointWriter(tmp_path / "out") as writer:
        for name, tensor in {"trellis": layer.trellis, "su": signs[0], "sv": signs[1]}.items():
            writer.add(f"x.{name}", tensor)
        out = writer.finish()
    ours = decode_linear(read_linear(TensorDirectory.open(out), "x", 256, 128))
    theirs = LinearEXL3(None, 256, 128, su=signs[0], sv=signs[1], trellis=layer.trellis)
    assert relative_difference(ours, theirs.get_weight_tensor()) < 1e-3


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_other_tests_see_the_installed_packages() -> None:
    """Outside its block the stand-in leaves no module behind and `torch.cuda` as it was."""
    real = torch.cuda.synchronize
    before = {name for name in sys.modules if name.startswith("exllamav3")}
    with exllama_on_cpu() as package:
        assert package is sys.modules["exllamav3"]
        assert torch.cuda.synchronize is not real
    assert {name for name in sys.modules if name.startswith("exllamav3")} == before
    assert torch.cuda.synchronize is real

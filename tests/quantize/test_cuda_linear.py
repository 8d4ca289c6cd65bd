"""Whole layers on a GPU: every tensor stays there, and with an exact encoder the stored bytes are those of the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from quantize.hessian import Hessian
from quantize.linear import QuantizedLinear, QuantSettings, quantize_linear

from .gpu_stand_in import GPU, EncoderStub, GpuTensor, fake_gpu, run_on_fake_gpu, to_gpu
from .layer_samples import correlated_rows, hessian_of, uneven_weight

Work = Callable[[], QuantizedLinear]
FACTS = ("bits", "codebook", "proxy_error", "weight_error", "fallback", "damping", "output_damping", "method")


def layer(
    rows: int, columns: int, bits: float, sides: str = "both", codebook: str = "mul1", encoder: str = "exact"
) -> tuple[Work, Work]:
    """Quantizing one layer with the Hessians of `sides` (both, inputs, outputs or none): on the CPU, on a GPU."""
    weight, bias = uneven_weight(rows, columns, columns), torch.linspace(-1, 1, columns)
    inputs = hessian_of(correlated_rows(512, rows)) if sides in ("both", "inputs") else None
    outputs = hessian_of(correlated_rows(512, columns)) if sides in ("both", "outputs") else None
    settings = QuantSettings(bits=bits, codebook=codebook, seed=rows, encoder=encoder, threads=1)

    def quantize(weight: torch.Tensor) -> QuantizedLinear:
        return quantize_linear(weight, inputs, settings, output_hessian=outputs, bias=bias)

    return lambda: quantize(weight), lambda: quantize(to_gpu(weight))


def assert_same(found: QuantizedLinear, wanted: QuantizedLinear) -> None:
    """Equal to the last bit, and found on the GPU."""
    ours, theirs = found.tensors("x"), wanted.tensors("x")
    assert ours.keys() == theirs.keys()
    for name in ("x.trellis", "x.suh", "x.svh"):
        assert isinstance(ours[name], GpuTensor), f"{name} was made on the CPU"
    for name, tensor in ours.items():
        assert torch.equal(tensor.cpu(), theirs[name]), name
    assert [getattr(found, fact) for fact in FACTS] == [getattr(wanted, fact) for fact in FACTS]


@pytest.mark.parametrize(
    ("rows", "columns", "bits", "sides", "codebook"),
    [
        (128, 128, 2, "both", "mul1"),
        (128, 128, 3.5, "both", "mul1"),
        (200, 72, 4, "both", "mul1"),
        (256, 128, 6, "inputs", "mul1"),
        (128, 128, 4, "outputs", "3inst"),
        (128, 128, 8, "none", "mcg"),
    ],
)
def test_a_layer_is_the_same_on_the_gpu(rows: int, columns: int, bits: float, sides: str, codebook: str) -> None:
    on_cpu, on_gpu = layer(rows, columns, bits, sides, codebook)
    wanted = on_cpu()
    with fake_gpu(EncoderStub()) as kernels:
        assert_same(on_gpu(), wanted)
    assert sum(count for count, *_ in kernels.calls) >= rows // 16 * (columns // 16)


def test_a_hessian_may_be_on_the_gpu_already() -> None:
    weight, inputs = uneven_weight(128, 128), hessian_of(correlated_rows(512, 128))
    settings = QuantSettings(bits=8, encoder="exact", threads=1)
    wanted = quantize_linear(weight, inputs, settings)
    with fake_gpu(EncoderStub()):
        there: Hessian = dataclasses.replace(inputs, matrix=to_gpu(inputs.matrix))
        assert_same(quantize_linear(to_gpu(weight), there, settings), wanted)


def test_layers_side_by_side_are_the_same_and_share_calls() -> None:
    sizes = ((128, 128, "both"), (128, 256, "both"), (256, 128, "inputs"))
    layers = [layer(rows, columns, 6, sides, encoder="fast") for rows, columns, sides in sizes]
    wanted = [on_cpu() for on_cpu, _ in layers]
    with fake_gpu(EncoderStub(encoder="fast")) as kernels:
        found = run_on_fake_gpu([on_gpu for _, on_gpu in layers])
    for result, expected in zip(found, wanted, strict=True):
        assert_same(result, expected)
    steps = [8 + 8 - 1, 8 + 16 - 1, 16]  # of each layer's error feedback
    searches = 15  # calls that a scale search makes, about
    assert max(steps) < len(kernels.calls) < max(steps) + searches < sum(steps)


def test_the_stand_in_notices_a_tensor_left_on_the_cpu() -> None:
    with fake_gpu(EncoderStub()):
        there, here = to_gpu(torch.ones(4)), torch.ones(4)
        for mixed in (lambda: there + here, lambda: torch.cat([there, here]), lambda: there.addcmul_(here, here)):
            with pytest.raises(RuntimeError, match="same device"):
                mixed()
        assert (there + torch.tensor(1.0)).device == GPU
        assert (there + here.to(GPU)).cpu().tolist() == [2.0] * 4
        with pytest.raises(Exception, match="numpy"):
            there.numpy()

"""Two-sided quantization: no worse than ExLlamaV3's own in the two-sided error, and read there like any other layer."""

from __future__ import annotations

import types

import pytest
import torch

from quantize.hessian import Hessian, HessianAccumulator
from quantize.linear import QuantSettings, decode_linear, quantize_linear

from .test_layers import exllama_linear, relative_difference
from .test_quantizer import ALLOWANCE, SEED, decoded, layer_and_inputs, their_tensors

pytestmark = pytest.mark.conformance


def hessian_of(rows: torch.Tensor) -> Hessian:
    accumulator = HessianAccumulator(rows.shape[1])
    accumulator.add(rows)
    return accumulator.finish()


def two_sided_error(weight: torch.Tensor, stored: torch.Tensor, inputs: torch.Tensor, outputs: torch.Tensor) -> float:
    """|X (W - Wq) G^T|^2 / |X W G^T|^2, X the inputs and G the gradients, row by row; Wq padded, float64."""
    exact = weight.double()
    error = exact - stored[: weight.shape[0], : weight.shape[1]]
    parts = [inputs.double() @ matrix @ outputs.double().T for matrix in (error, exact)]
    return float(parts[0].square().sum() / parts[1].square().sum())


@pytest.mark.parametrize(
    ("rows", "columns", "bits", "damping"),
    [(256, 128, 2, 0.2), (256, 128, 4, 0.2), (128, 256, 3, 0.025), (192, 200, 3, 0.2)],
)
def test_our_error_is_no_larger(
    exllama: types.ModuleType, rows: int, columns: int, bits: float, damping: float
) -> None:
    weight, inputs = layer_and_inputs(rows, columns)
    outputs = layer_and_inputs(columns, 128)[1]  # gradients (1024, columns)
    settings = QuantSettings(bits=bits, seed=SEED, output_reg=damping, encoder="exact")
    output_hessian = hessian_of(outputs)
    ours = quantize_linear(weight, hessian_of(inputs), settings, output_hessian=output_hessian)
    padding = ours.svh.numel() - columns
    given = {
        "H_out": torch.nn.functional.pad(output_hessian.matrix, (0, padding, 0, padding)),
        "sigma_reg_out": damping,
    }
    theirs = decoded(their_tensors(weight, inputs, bits, "mul1", True, given), bits, "mul1")
    errors = [two_sided_error(weight, made, inputs, outputs) for made in (decode_linear(ours).double(), theirs)]
    print(f"{rows}x{columns} K={bits}: {errors[0]:.3e}, ExLlamaV3 {errors[1]:.3e}", end=" ")
    assert errors[0] <= ALLOWANCE * errors[1]
    assert errors[0] == pytest.approx(ours.proxy_error, rel=1e-3)


def test_it_is_an_ordinary_layer_there(exllama: types.ModuleType) -> None:
    weight, inputs = layer_and_inputs(256, 128)
    settings = QuantSettings(bits=2.5, seed=SEED)
    layer = quantize_linear(weight, hessian_of(inputs), settings, output_hessian=hessian_of(inputs[:, :128]))
    assert layer.method == "two-sided"
    assert relative_difference(decode_linear(layer), exllama_linear(layer).get_weight_tensor()) < 1e-3

"""Quantizers: on the same weight, Hessian and seed, our stored tensors are as good as those of ExLlamaV3's quantizer.

Both use the exact tile search, so what is compared is everything around it: regularization, the scale search, the
factorization and the feedback, the refit, and rounding to what is stored. (With the fast search tiles differ, and by
feedback all that follow: a layer of this size is a percent better or worse by chance, see `test_encoder_fast`.) Errors
are those of the stored tensors, decoded from the format's description.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from quantize.hadamard import padded_features
from quantize.hessian import HessianAccumulator
from quantize.linear import QuantSettings, decode_tensors, quantize_linear

from . import format_decode

pytestmark = pytest.mark.conformance
CPU = torch.device("cpu")
SEED = 7
ALLOWANCE = 1.005


def layer_and_inputs(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight (rows, columns) with uneven channels, and correlated inputs (1024, rows) with a few large features."""
    random = torch.Generator().manual_seed(rows + columns)
    weight = torch.randn(rows, columns, generator=random) * torch.rand(columns, generator=random).add(0.2)
    weight *= 0.02 * torch.rand(rows, 1, generator=random).add(0.2)
    mixing = torch.eye(rows) + 0.5 * torch.randn(rows, rows, generator=random) / rows**0.5
    inputs = torch.randn(1024, rows, generator=random) @ mixing
    inputs[:, :: rows // 6] *= 5.0
    return weight, inputs


def their_tensors(
    weight: torch.Tensor,
    inputs: torch.Tensor | None,
    bits: float,
    codebook: str,
    scaled: bool,
    more: Mapping[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """What `Linear.convert_exl3` stores: the layer padded as ExLlamaV3 pads it, the Hessian captured as it captures."""
    from exllamav3.modules import Linear
    from exllamav3.modules.quant import LinearFP16

    linear = Linear(None, "x", *weight.shape, qmap="x", trim_padded_out=True)
    linear.device = CPU
    size = linear.in_features, linear.out_features
    linear.inner = LinearFP16(*size, linear.pad_out(weight.clone()), None, *size, 0, 0)
    hessian = linear.init_H_data(inputs is not None)
    if inputs is not None:
        params = {"capture": {"x": hessian}}
        linear.capture_H(torch.nn.functional.pad(inputs, (0, size[0] - inputs.shape[1])), params)
    codebooks = {} if codebook == "3inst" else {codebook: True}
    settings = {"K": bits, "seed": SEED, "devices": [CPU], "apply_out_scales": None, "scaled_hessian": scaled}
    linear.convert_exl3(hessian, {**settings, **codebooks, **(more or {})})
    return {name.removeprefix("x."): tensor for name, tensor in linear.get_tensors().items()}


def our_tensors(
    weight: torch.Tensor, inputs: torch.Tensor | None, bits: float, codebook: str, scaled: bool
) -> dict[str, torch.Tensor]:
    hessian = None
    if inputs is not None:
        accumulator = HessianAccumulator(weight.shape[0])
        accumulator.add(inputs)
        hessian = accumulator.finish()
    settings = QuantSettings(bits=bits, codebook=codebook, scaled_hessian=scaled, seed=SEED, encoder="exact")
    layer = quantize_linear(weight, hessian, settings)
    return {name.removeprefix("x."): tensor for name, tensor in layer.tensors("x").items()}


def decoded(tensors: Mapping[str, torch.Tensor], bits: float, codebook: str) -> torch.Tensor:
    trellis, suh, svh = (tensors[name].numpy() for name in ("trellis", "suh", "svh"))
    return torch.from_numpy(format_decode.decode(trellis, suh, svh, bits, codebook))


def output_error(weight: torch.Tensor, stored: torch.Tensor, inputs: torch.Tensor | None) -> float:
    """|X (W - Wq)|^2 / |X W|^2, or the weights' own error without inputs; Wq padded, float64."""
    exact = weight.double()
    difference = exact - stored[: weight.shape[0], : weight.shape[1]]
    if inputs is not None:
        exact, difference = inputs.double() @ exact, inputs.double() @ difference
    return float(difference.square().sum() / exact.square().sum())


@pytest.mark.parametrize(
    ("rows", "columns", "bits", "codebook", "scaled", "calibrated"),
    [
        (256, 128, 2, "mul1", True, True),
        (256, 128, 3, "mul1", True, True),
        (256, 128, 4, "mul1", True, True),
        (256, 128, 6, "mul1", True, True),
        (256, 128, 8, "mul1", True, True),
        (192, 200, 4, "mul1", True, True),
        (256, 128, 4, "mul1", False, True),
        (256, 128, 4, "mcg", True, True),
        (256, 128, 3.5, "mul1", True, True),
        (256, 128, 6, "mul1", True, False),
    ],
)
def test_our_error_is_no_larger(
    exllama: types.ModuleType, rows: int, columns: int, bits: float, codebook: str, scaled: bool, calibrated: bool
) -> None:
    weight, inputs = layer_and_inputs(rows, columns)
    given = inputs if calibrated else None
    ours, theirs = (make(weight, given, bits, codebook, scaled) for make in (our_tensors, their_tensors))
    forms = [{name: (tensor.shape, tensor.dtype) for name, tensor in stored.items()} for stored in (ours, theirs)]
    assert forms[0] == forms[1]
    assert ours["suh"].shape == (padded_features(rows),)
    errors = [output_error(weight, decoded(stored, bits, codebook), given) for stored in (ours, theirs)]
    print(f"{rows}x{columns} K={bits} {codebook}: {errors[0]:.3e}, ExLlamaV3 {errors[1]:.3e}", end=" ")
    assert errors[0] <= ALLOWANCE * errors[1]
    assert errors[0] < 2 * 4.0**-bits
    read = decode_tensors(theirs, rows, columns).double()
    assert (read - decoded(theirs, bits, codebook)[:rows, :columns]).norm() < 1e-6 * read.norm()

"""`quantize_linear` with an output-side Hessian: the error it lowers, padding, purity, and unusable sides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantize.errors import Exl3DflashError
from quantize.hessian import Hessian
from quantize.linear import QuantizedLinear, QuantSettings, decode_linear, quantize_linear
from tests.quantize.layer_samples import correlated_rows, hessian_of, uneven_weight

SETTINGS = QuantSettings(bits=3)


def layer(rows: int, columns: int) -> tuple[Tensor, Hessian, Hessian]:
    """A weight and the Hessians of its inputs and of gradients at its outputs."""
    return (
        uneven_weight(rows, columns),
        hessian_of(correlated_rows(4 * rows, rows)),
        hessian_of(correlated_rows(4 * columns, columns, seed=1, layer=1)),
    )


def two_sided_error(weight: Tensor, decoded: Tensor, inputs: Hessian, outputs: Hessian) -> float:
    exact, error = weight.double(), weight.double() - decoded.double()
    parts = [
        ((inputs.matrix.double() @ matrix) * (matrix @ outputs.matrix.double())).sum() for matrix in (error, exact)
    ]
    return float(parts[0] / parts[1])


@pytest.mark.parametrize(("rows", "columns"), [(128, 256), (160, 200), (90, 30)])
def test_it_lowers_the_two_sided_error_and_reports_it(rows: int, columns: int) -> None:
    weight, inputs, outputs = layer(rows, columns)
    one = quantize_linear(weight, inputs, SETTINGS)
    two = quantize_linear(weight, inputs, SETTINGS, output_hessian=outputs)
    errors = [two_sided_error(weight, decode_linear(made), inputs, outputs) for made in (one, two)]
    assert errors[1] < 0.8 * errors[0]
    assert two.proxy_error == pytest.approx(errors[1], rel=1e-2)
    assert (one.output_damping, two.output_damping) == (None, SETTINGS.output_reg)
    assert (two.fallback, two.output_fallback) == (None, None)
    assert not two.suh[rows:].any()
    assert not two.svh[columns:].any()


def stored(made: QuantizedLinear) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in (made.trellis, made.suh, made.svh)]


def test_same_bytes_on_any_number_of_threads() -> None:
    weight, inputs, outputs = layer(140, 600)
    made = [
        quantize_linear(weight, inputs, QuantSettings(bits=6, threads=threads), output_hessian=outputs)
        for threads in (1, 2)
    ]
    assert stored(made[0]) == stored(made[1])


def test_an_unusable_output_side_gives_the_one_sided_layer_and_the_reason() -> None:
    weight, inputs, outputs = layer(128, 128)
    empty = Hessian(torch.zeros(128, 128), count=0, rows=0, dropped_rows=0)
    poisoned = Hessian(outputs.matrix.clone().fill_diagonal_(torch.nan), count=1, rows=1, dropped_rows=0)
    one = quantize_linear(weight, inputs, SETTINGS)
    assert one.output_fallback is None
    for unusable, reason in ((empty, "no rows"), (poisoned, "non-finite")):
        made = quantize_linear(weight, inputs, SETTINGS, output_hessian=unusable)
        assert stored(made) == stored(one)
        assert (made.output_damping, made.output_fallback) == (None, reason)


def test_an_unusable_input_side_leaves_the_outputs() -> None:
    """A layer whose inputs were all zero: feedback along the outputs, still better than none."""
    weight, _, outputs = layer(128, 128)
    zero = Hessian(torch.zeros(128, 128), count=1, rows=1, dropped_rows=0)
    identity = Hessian(torch.eye(128), count=1, rows=1, dropped_rows=0)
    made = quantize_linear(weight, zero, SETTINGS, output_hessian=outputs)
    plain = quantize_linear(weight, None, SETTINGS)
    errors = [two_sided_error(weight, decode_linear(layer), identity, outputs) for layer in (made, plain)]
    assert errors[0] < 0.8 * errors[1]
    assert made.fallback == "mean diagonal < 1e-20"
    assert (made.damping, made.output_damping) == (None, SETTINGS.output_reg)


def test_zero_columns_stay_zero() -> None:
    weight, inputs, outputs = layer(128, 128)
    weight[:, [0, 77]] = 0.0
    decoded = decode_linear(quantize_linear(weight, inputs, SETTINGS, output_hessian=outputs))
    assert not decoded[:, [0, 77]].any()


def test_an_output_side_of_another_width_is_refused() -> None:
    weight, inputs, _ = layer(128, 256)
    with pytest.raises(Exl3DflashError, match="output-side Hessian of fc has 128 features"):
        quantize_linear(weight, inputs, SETTINGS, output_hessian=inputs, name="fc")
    with pytest.raises(Exl3DflashError, match="output_reg"):
        QuantSettings(output_reg=0.0)

"""`quantize_linear` as a whole: shapes, purity, degenerate inputs, honest errors, and whether calibration pays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantize.errors import Exl3DflashError
from quantize.hessian import Hessian, HessianAccumulator
from quantize.linear import QuantizedLinear, QuantSettings, decode_linear, decode_tensors, quantize_linear
from quantize.trellis import decode_trellis
from tests.quantize.layer_samples import block_rotation, correlated_rows, hessian_of, output_error, uneven_weight


def padded_decode(quantized: QuantizedLinear) -> Tensor:
    """The whole stored matrix, padding included, in float64: suh * (H trellis H) * svh."""
    coded = decode_trellis(quantized.trellis, quantized.bits, quantized.codebook).double()
    rotated = block_rotation(len(coded)) @ coded @ block_rotation(coded.shape[1])
    return quantized.suh.double()[:, None] * rotated * quantized.svh.double()


def relative_error(weight: Tensor, decoded: Tensor) -> float:
    return float((weight.double() - decoded.double()).square().sum() / weight.double().square().sum())


def same_bytes(first: QuantizedLinear, second: QuantizedLinear) -> bool:
    return all(torch.equal(getattr(first, key), getattr(second, key)) for key in ("trellis", "suh", "svh"))


@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 200),
    columns=st.integers(1, 200),
    bits=st.sampled_from((4, 5, 6, 2.5)),
    calibrated=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape(rows: int, columns: int, bits: float, calibrated: bool, seed: int) -> None:
    weight, inputs = uneven_weight(rows, columns, seed), correlated_rows(2 * rows + 50, rows, seed)
    quantized = quantize_linear(weight, hessian_of(inputs) if calibrated else None, QuantSettings(bits=bits))
    padded = (-(-rows // 128) * 128, -(-columns // 128) * 128)
    assert quantized.trellis.shape == (padded[0] // 16, padded[1] // 16, round(16 * bits))
    assert (quantized.suh.shape, quantized.svh.shape) == (padded[:1], padded[1:])
    stored = padded_decode(quantized)
    assert not stored[rows:].any()
    assert not stored[:, columns:].any()
    decoded = decode_linear(quantized)
    assert decoded.shape == (rows, columns)
    assert torch.allclose(decoded.double(), stored[:rows, :columns], rtol=1e-4, atol=1e-7)
    assert quantized.weight_error == pytest.approx(relative_error(weight, decoded), rel=1e-3)
    wanted = output_error(weight, decoded, inputs) if calibrated else quantized.weight_error
    assert quantized.proxy_error == pytest.approx(wanted, rel=2e-2)
    assert quantized.proxy_error < 4.0 ** -(bits - 1)
    assert quantized.fallback == (None if calibrated else "none")


@pytest.mark.parametrize("calibrated", [True, False])
def test_same_bytes_on_any_number_of_threads(calibrated: bool) -> None:
    """Encoder threads and torch threads; wide enough for several column blocks, padded on both sides."""
    weight = uneven_weight(140 if calibrated else 100, 600)
    hessian = hessian_of(correlated_rows(500, 140)) if calibrated else None
    outside = torch.get_num_threads()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    results = []
    try:
        for torch_threads, threads in ((1, 1), (2, 1), (1, 2), (2, 3)):
            torch.set_num_threads(torch_threads)
            results.append(quantize_linear(weight, hessian, QuantSettings(bits=6, threads=threads)))
            assert torch.get_num_threads() == torch_threads
    finally:
        torch.set_num_threads(outside)
    assert torch.equal(torch.get_rng_state(), state)
    for other in results[1:]:
        assert same_bytes(results[0], other)
        assert (other.proxy_error, other.weight_error) == (results[0].proxy_error, results[0].weight_error)


def test_inputs_are_left_alone_and_strides_do_not_matter() -> None:
    stored = uneven_weight(96, 130).T.to(torch.bfloat16)  # (130, 96), transposed as nn.Linear keeps it
    hessian = hessian_of(correlated_rows(300, 130))
    weight_before, matrix_before = stored.clone(), hessian.matrix.clone()
    transposed = quantize_linear(stored, hessian, QuantSettings(bits=5))
    assert torch.equal(stored, weight_before)
    assert torch.equal(hessian.matrix, matrix_before)
    parameter = torch.nn.Parameter(stored.float().contiguous())
    assert same_bytes(transposed, quantize_linear(parameter, hessian, QuantSettings(bits=5)))
    assert not same_bytes(transposed, quantize_linear(stored, hessian, QuantSettings(bits=5, seed=1)))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_calibration_pays_on_held_out_rows(bits: int) -> None:
    weight, held_out = uneven_weight(128, 128), correlated_rows(1000, 128, seed=100)
    hessian = hessian_of(correlated_rows(2000, 128, seed=0))
    errors = {}
    for name, given_hessian, scaled in (("none", None, True), ("plain", hessian, False), ("scaled", hessian, True)):
        quantized = quantize_linear(weight, given_hessian, QuantSettings(bits=bits, scaled_hessian=scaled))
        errors[name] = output_error(weight, decode_linear(quantized), held_out)
    assert errors["plain"] < 0.75 * errors["none"]
    assert errors["scaled"] < 0.95 * errors["plain"]


def test_refit_lowers_the_reported_error() -> None:
    weight, inputs = uneven_weight(128, 128), correlated_rows(500, 128)
    for hessian in (hessian_of(inputs), None):
        without, refitted = (quantize_linear(weight, hessian, QuantSettings(4, refit=refit)) for refit in (False, True))
        assert torch.equal(without.trellis, refitted.trellis)
        assert refitted.proxy_error < without.proxy_error


def test_output_scales() -> None:
    weight = uneven_weight(128, 128)
    always, auto, never = (
        quantize_linear(weight, None, QuantSettings(5, out_scales=mode, refit=False))
        for mode in ("always", "auto", "never")
    )
    assert same_bytes(always, auto)
    assert never.svh.abs().eq(1).all()
    errors = [(weight - decode_linear(quantized)).norm(dim=0) / weight.norm(dim=0) for quantized in (always, never)]
    assert errors[0].max() / errors[0].min() < 2 < errors[1].max() / errors[1].min()


@pytest.mark.parametrize("codebook", ["mul1", "mcg", "3inst"])
def test_stored_tensors(codebook: str) -> None:
    bias = torch.randn(100, generator=torch.Generator().manual_seed(0))
    quantized = quantize_linear(uneven_weight(130, 100), None, QuantSettings(6, codebook=codebook), bias=bias)
    tensors = quantized.tensors("layers.0.o_proj")
    suffixes = {name.removeprefix("layers.0.o_proj."): tensor for name, tensor in tensors.items()}
    markers = set() if codebook == "3inst" else {codebook}
    assert set(suffixes) == {"trellis", "suh", "svh", "bias"} | markers
    assert suffixes["bias"].dtype == torch.float16
    assert torch.equal(suffixes["bias"], torch.nn.functional.pad(bias.half(), (0, 28)))
    assert torch.equal(decode_tensors(suffixes, 130, 100), decode_linear(quantized))


def test_all_zero_columns_and_rows_decode_to_zero() -> None:
    weight = uneven_weight(150, 140)
    weight[:, [0, 77, 139]] = 0.0
    weight[[5, 149]] = 0.0
    quantized = quantize_linear(weight, hessian_of(correlated_rows(400, 150)), QuantSettings(bits=4))
    decoded = decode_linear(quantized)
    assert not quantized.svh[[0, 77, 139]].any()
    assert not decoded[:, [0, 77, 139]].any()
    assert not decoded[[5, 149]].any()
    assert quantized.proxy_error < 0.01


def test_all_zero_weight() -> None:
    for hessian in (hessian_of(correlated_rows(400, 128)), None):
        quantized = quantize_linear(torch.zeros(128, 100), hessian, QuantSettings(bits=4))
        assert not decode_linear(quantized).any()
        assert (quantized.proxy_error, quantized.weight_error) == (0.0, 0.0)


def test_rows_with_nan_do_not_change_the_result() -> None:
    weight, inputs = uneven_weight(128, 128), correlated_rows(300, 128)
    accumulator = HessianAccumulator(128)
    accumulator.add(torch.cat([inputs[:1] * torch.nan, inputs]))
    hessian = accumulator.finish()
    assert hessian.dropped_rows == 1
    clean = quantize_linear(weight, hessian_of(inputs), QuantSettings(bits=5))
    assert same_bytes(clean, quantize_linear(weight, hessian, QuantSettings(bits=5)))


def test_rank_one_activations() -> None:
    row = torch.randn(1, 150, generator=torch.Generator().manual_seed(0))
    inputs = torch.randn(200, 1, generator=torch.Generator().manual_seed(1)) * row
    quantized = quantize_linear(uneven_weight(150, 128), hessian_of(inputs), QuantSettings(bits=4))
    assert quantized.fallback is None
    assert output_error(uneven_weight(150, 128), decode_linear(quantized), inputs) < 1e-3
    assert quantized.weight_error < 0.05


def test_outliers_in_activations_and_weight() -> None:
    """A first-token outlier of 2e4 in one feature, features of 1e5, one huge weight."""
    weight, inputs = uneven_weight(192, 128), correlated_rows(500, 192)
    inputs[0, 7] = 2e4
    inputs[:, 100] *= 1e5
    weight[3, 4] = 2.0
    quantized = quantize_linear(weight, hessian_of(inputs), QuantSettings(bits=4))
    assert quantized.fallback is None
    assert quantized.proxy_error < 0.01
    assert torch.isfinite(decode_linear(quantized)).all()


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (torch.zeros(50, 128), "mean diagonal"),
        (torch.zeros(0, 128), "no rows"),
        (torch.full((3, 128), torch.nan), "non-finite rows dropped"),
    ],
)
def test_unusable_hessians_are_reported(inputs: Tensor, reason: str) -> None:
    weight = uneven_weight(128, 128)
    quantized = quantize_linear(weight, hessian_of(inputs), QuantSettings(bits=5))
    assert reason in str(quantized.fallback)
    assert quantized.damping is None
    assert quantized.proxy_error == quantized.weight_error
    assert same_bytes(quantized, quantize_linear(weight, None, QuantSettings(bits=5)))


def test_indefinite_hessians_are_damped_more_or_reported() -> None:
    weight, matrix = uneven_weight(128, 128), torch.eye(128)
    matrix[0, 0] = -0.5
    slightly = quantize_linear(weight, Hessian(matrix, 10.0, 10, 0), QuantSettings(bits=5, scaled_hessian=False))
    assert slightly.fallback is None
    assert slightly.damping is not None
    assert slightly.damping > 0.1
    hopeless = quantize_linear(weight, Hessian(matrix * 30 - 29 * torch.eye(128), 1.0, 10, 0), QuantSettings(bits=5))
    assert hopeless.fallback is not None


@pytest.mark.parametrize("size", [1e-8, 1e-4, 1e3])
def test_weights_of_unusual_size(size: float) -> None:
    weight, hessian = uneven_weight(128, 128), hessian_of(correlated_rows(300, 128))
    usual, unusual = (quantize_linear(w, hessian, QuantSettings(bits=6)) for w in (weight, weight * size))
    assert unusual.proxy_error < 1.1 * usual.proxy_error


def test_broken_weights_are_refused() -> None:
    weight = uneven_weight(128, 128)
    for value in (torch.nan, torch.inf):
        broken = weight.clone()
        broken[3, 5] = value
        with pytest.raises(Exl3DflashError, match=r"fc\.weight holds 1 values that are NaN or infinite"):
            quantize_linear(broken, None, QuantSettings(), name="fc.weight")
    with pytest.raises(Exl3DflashError, match="too large"):
        quantize_linear(weight * 1e15, None, QuantSettings())


def test_arguments_that_do_not_fit_are_refused() -> None:
    weight, plain = uneven_weight(128, 64), QuantSettings()
    with pytest.raises(Exl3DflashError, match="130 features; expected 128"):
        quantize_linear(weight, hessian_of(torch.ones(3, 130)), plain)
    with pytest.raises(Exl3DflashError, match=r"shape \(128,\)"):
        quantize_linear(weight[:, 0], None, plain)
    with pytest.raises(Exl3DflashError, match=r"shape \(0, 64\)"):
        quantize_linear(weight[:0], None, plain)
    with pytest.raises(Exl3DflashError, match="bias"):
        quantize_linear(weight, None, plain, bias=torch.zeros(65))
    with pytest.raises(Exl3DflashError, match="bias"):
        quantize_linear(weight, None, plain, bias=torch.full((64,), 1e6))


@pytest.mark.parametrize(
    "wrong",
    [
        {"bits": 9},
        {"bits": 2.5, "codebook": "mcg"},
        {"codebook": "mul2"},
        {"out_scales": "sometimes"},
        {"sigma_reg": 0.0},
        {"sigma_reg": float("nan")},
        {"threads": -1},
        {"seed": -1},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(Exl3DflashError):
        QuantSettings(**wrong)


def test_decoding_refuses_what_does_not_belong_together() -> None:
    quantized = quantize_linear(uneven_weight(128, 100), None, QuantSettings(bits=5))
    tensors = {name.removeprefix("x."): tensor for name, tensor in quantized.tensors("x").items()}
    with pytest.raises(Exl3DflashError, match="without svh"):
        decode_tensors({key: tensor for key, tensor in tensors.items() if key != "svh"}, 128, 100)
    with pytest.raises(Exl3DflashError, match="two codebooks"):
        decode_tensors(tensors | {"mcg": tensors["mul1"]}, 128, 100)
    with pytest.raises(Exl3DflashError, match="129 x 100"):
        decode_tensors(tensors, 129, 100)
    with pytest.raises(Exl3DflashError, match="suh"):
        decode_tensors(tensors | {"suh": tensors["suh"][:-1]}, 128, 100)

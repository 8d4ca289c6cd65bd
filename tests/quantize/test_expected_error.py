"""The error that is expected before coding, against the error that coding leaves."""

from __future__ import annotations

import pytest
import torch

from quantize.coder import TileCoder
from quantize.expected_error import TILE_ERRORS, expect_error
from quantize.hessian import Hessian
from quantize.linear import QuantSettings, decode_linear, quantize_linear
from quantize.scale_search import search_scale
from quantize.trellis import SUPPORTED_BITS
from tests.quantize.layer_samples import correlated_rows, hessian_of, uneven_weight

ROWS, COLUMNS = 256, 128


def energy(error: torch.Tensor, inputs: Hessian | None, outputs: Hessian | None) -> float:
    """tr(E^T H E G), the identity where a side is not known."""
    weighed = error if inputs is None else inputs.matrix @ error
    weighed = weighed if outputs is None else weighed @ outputs.matrix
    return float((error * weighed).sum())


@pytest.mark.parametrize("bits", [2, 3, 5])
@pytest.mark.parametrize("sides", [(False, False), (True, False), (True, True)], ids=["plain", "one", "two"])
def test_size_and_shape_are_those_of_coding(bits: float, sides: tuple[bool, bool]) -> None:
    weight = uneven_weight(ROWS, COLUMNS, seed=1)
    inputs = hessian_of(correlated_rows(2000, ROWS, 2)) if sides[0] else None
    outputs = hessian_of(correlated_rows(2000, COLUMNS, 3)) if sides[1] else None
    settings = QuantSettings(bits=bits, encoder="fast")
    coded = weight - decode_linear(quantize_linear(weight, inputs, settings, output_hessian=outputs))
    drawn = expect_error(weight, inputs, outputs, settings).draw(bits)
    assert drawn.shape == weight.shape
    assert energy(drawn, inputs, outputs) == pytest.approx(energy(coded, inputs, outputs), rel=0.2)
    assert energy(drawn, None, None) == pytest.approx(energy(coded, None, None), rel=0.25)


def test_without_the_shape_it_would_be_wrong() -> None:
    """Calibrated coding moves its errors to where they cost little; plain noise of the same size costs far more."""
    weight, inputs = uneven_weight(ROWS, COLUMNS, seed=1), hessian_of(correlated_rows(2000, ROWS, 2))
    drawn = expect_error(weight, inputs, None, QuantSettings()).draw(3)
    shuffled = drawn.flatten()[torch.randperm(drawn.numel(), generator=torch.Generator().manual_seed(0))]
    assert energy(drawn, inputs, None) < 0.5 * energy(shuffled.view_as(drawn), inputs, None)


@pytest.mark.parametrize(("codebook", "bits"), [("mul1", 2), ("mul1", 3.5), ("mul1", 6), ("mcg", 3), ("3inst", 8)])
def test_tile_errors_are_what_the_encoder_leaves(codebook: str, bits: float) -> None:
    weight = torch.randn(128, 64, generator=torch.Generator().manual_seed(4))
    coder = TileCoder(bits, codebook, 1, "fast")
    scale = search_scale(weight, coder)
    coded, _ = coder.rows(weight * scale)
    error = float((coded / scale - weight).square().mean() / weight.square().mean())
    assert TILE_ERRORS[codebook][bits] == pytest.approx(error, rel=0.08)


def test_every_rate_has_its_tile_error_and_more_bits_leave_less() -> None:
    for codebook, errors in TILE_ERRORS.items():
        assert set(errors) == {bits for bits in SUPPORTED_BITS if codebook == "mul1" or bits == int(bits)}
        assert list(errors) == sorted(errors)
        assert list(errors.values()) == sorted(errors.values(), reverse=True)


def test_residuals_fall_with_bits_however_strong_the_feedback() -> None:
    expected = expect_error(uneven_weight(128, 128, seed=0), None, None, QuantSettings())
    assert expected.amplification == pytest.approx(1.0)
    for amplification in (1.0, 3.0, 20.0):
        object.__setattr__(expected, "amplification", amplification)
        residuals = [expected.residual(bits) for bits in SUPPORTED_BITS]
        assert residuals == sorted(residuals, reverse=True)


def test_padding_and_dead_rows_have_no_error_and_seeds_repeat() -> None:
    weight = uneven_weight(100, 72, seed=5)
    weight[3], weight[:, 7] = 0.0, 0.0
    first, again = (expect_error(weight, None, None, QuantSettings(seed=9)).draw(2) for _ in range(2))
    assert first.shape == (100, 72)
    assert not first[3].any()
    assert not first[:, 7].any()
    assert torch.equal(first, again)

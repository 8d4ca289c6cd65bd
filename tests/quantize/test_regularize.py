"""Regularization against its definition in float64, and the signs' independence of torch's global generator."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantize.regularize import CODEBOOK_SCALE, Regularized, random_signs, regularize
from tests.quantize.layer_samples import block_rotation, uneven_weight


def rebuilt(regular: Regularized) -> Tensor:
    """diag(su) H R H diag(sv) in float64."""
    rotated = block_rotation(len(regular.weight)) @ regular.weight.double() @ block_rotation(regular.weight.shape[1])
    return regular.input_scales.double()[:, None] * rotated * regular.output_scales.double()


@settings(max_examples=12, deadline=None)
@given(row_blocks=st.integers(1, 2), column_blocks=st.integers(1, 2), scaling=st.booleans(), seed=st.integers(0, 1000))
def test_the_weight_is_scales_times_rotation(row_blocks: int, column_blocks: int, scaling: bool, seed: int) -> None:
    weight = uneven_weight(128 * row_blocks, 128 * column_blocks, seed)
    untouched = weight.clone()
    regular = regularize(weight, scaling, seed)
    assert torch.equal(weight, untouched)
    assert (rebuilt(regular) - weight.double()).norm() <= 1e-6 * weight.norm()
    row_rms = (block_rotation(len(weight)) @ regular.weight.double()).square().mean(1).sqrt()
    assert (row_rms - CODEBOOK_SCALE).abs().max() < 1e-4


def test_scales_follow_the_definition() -> None:
    weight = uneven_weight(128, 256)
    regular = regularize(weight, True, 5)
    input_signs, output_signs = random_signs(128, 256, 5, weight.device)
    exact = weight.double()
    column_rms = exact.square().mean(0).sqrt()
    output_scales = output_signs * column_rms / column_rms.mean()
    row_rms = ((exact / output_scales) @ block_rotation(256)).square().mean(1).sqrt()
    assert torch.allclose(regular.output_scales.double(), output_scales, rtol=1e-5)
    assert torch.allclose(regular.input_scales.double(), -input_signs * row_rms / CODEBOOK_SCALE, rtol=1e-5)


def test_without_output_scales_only_signs_remain() -> None:
    regular = regularize(uneven_weight(128, 128), False, 0)
    assert torch.equal(regular.output_scales.abs(), torch.ones(128))


@pytest.mark.parametrize("scaling", [True, False])
def test_zero_rows_and_columns_get_scale_zero(scaling: bool) -> None:
    weight = uneven_weight(256, 256)
    weight[[0, 7, 200]] = 0.0
    weight[:, [1, 130, 255]] = 0.0
    regular = regularize(weight, scaling, 0)
    assert torch.isfinite(regular.weight).all()
    assert (regular.input_scales == 0).nonzero().flatten().tolist() == [0, 7, 200]
    assert (regular.output_scales == 0).nonzero().flatten().tolist() == [1, 130, 255]
    assert (rebuilt(regular) - weight.double()).norm() <= 1e-6 * weight.norm()


def test_all_zero_weight() -> None:
    regular = regularize(torch.zeros(128, 128), True, 0)
    assert not regular.weight.any()
    assert not regular.input_scales.any()
    assert not regular.output_scales.any()


def test_rescaling_keeps_the_weight() -> None:
    weight = uneven_weight(128, 128)
    regular = regularize(weight, True, 0).rescaled(0.75)
    assert (rebuilt(regular) - weight.double()).norm() <= 1e-6 * weight.norm()


def test_signs_come_from_their_own_generator() -> None:
    torch.manual_seed(11)
    state = torch.get_rng_state()
    first = random_signs(256, 128, 3, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(12)
    second = random_signs(256, 128, 3, torch.device("cpu"))
    other = random_signs(256, 128, 4, torch.device("cpu"))
    for signs, again, different in zip(first, second, other, strict=True):
        assert torch.equal(signs, again)
        assert not torch.equal(signs, different)
        assert signs.abs().eq(1).all()
        assert abs(float(signs.mean())) < 0.3

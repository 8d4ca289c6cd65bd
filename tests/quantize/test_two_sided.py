"""Two-sided LDLQ against a dense float64 version written from its definition, tile after tile.

As for the one-sided form, a smooth function stands in for the tile coder, so that no last bit can flip a rounding.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantize import two_sided
from quantize.coder import TileCoder
from quantize.ldlq import Factor, factor_metric, ldlq, rotated_metric
from quantize.trellis import decode_trellis
from quantize.two_sided import two_sided_ldlq
from quantize.workers import Workers
from tests.quantize.layer_samples import block_ldl, correlated_rows, hessian_of
from tests.quantize.test_ldlq import SmoothCoder, smooth, some_metric


def factor_of(metric: Tensor) -> Factor:
    factor = factor_metric(metric.clone(), 0.025)
    assert factor is not None
    return factor


def dense_two_sided(weight: Tensor, metric_in: Tensor, metric_out: Tensor) -> Tensor:
    """Tiles from the far corner, row after row: Q_ac = f((W + L^T E K)_ac), E zero where nothing is coded; float64."""
    lower_in, lower_out = block_ldl(metric_in)[0], block_ldl(metric_out)[0]
    exact, quantized, error = weight.double(), torch.zeros(weight.shape).double(), torch.zeros(weight.shape).double()
    for row in range(weight.shape[0] - 16, -1, -16):
        for column in range(weight.shape[1] - 16, -1, -16):
            tile = (slice(row, row + 16), slice(column, column + 16))
            fed_back = lower_in[:, tile[0]].T @ error @ lower_out[:, tile[1]]
            quantized[tile] = smooth(exact[tile] + fed_back)
            error[tile] = exact[tile] - quantized[tile]
    return quantized


@settings(max_examples=4, deadline=None)
@given(row_blocks=st.integers(1, 3), column_blocks=st.integers(1, 3), seed=st.integers(0, 1000))
@example(row_blocks=4, column_blocks=3, seed=1)
@example(row_blocks=1, column_blocks=1, seed=2)
def test_against_the_definition(row_blocks: int, column_blocks: int, seed: int) -> None:
    rows, columns = 128 * row_blocks, 128 * column_blocks
    metric_in, metric_out = some_metric(rows, seed), some_metric(columns, seed + 1)
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    wanted = dense_two_sided(weight, metric_in, metric_out)
    error, factors = weight.clone(), [factor_of(metric).lower for metric in (metric_in, metric_out)]
    with Workers(2) as workers:
        quantized, trellis = two_sided_ldlq(error, *factors, SmoothCoder(4, "mul1"), workers)
    assert (quantized - wanted).abs().max() < 2e-3
    assert torch.allclose(error, weight - quantized, rtol=0, atol=1e-5)
    assert trellis.shape == (rows // 16, columns // 16, 64)


def test_it_is_one_sided_where_the_other_metric_is_the_identity() -> None:
    metric = some_metric(256)
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(5))
    lower, coder = factor_of(metric).lower, SmoothCoder(4, "mul1")
    with Workers(1) as workers:
        wanted, trellis = ldlq(weight.clone(), lower, coder, workers)
        quantized, same_trellis = two_sided_ldlq(weight.clone(), lower, torch.zeros(128, 128), coder, workers)
    assert torch.allclose(quantized, wanted, rtol=0, atol=1e-4)
    assert trellis.shape == same_trellis.shape


def test_the_second_direction_lowers_the_two_sided_error() -> None:
    """With the real coder: tr(E^T M E N) falls again below what feedback along the inputs reaches."""
    metric_in, metric_out = some_metric(256), some_metric(128, 3)
    weight = 0.75 * torch.randn(256, 128, generator=torch.Generator().manual_seed(5))
    lower_in, lower_out = (factor_of(metric).lower for metric in (metric_in, metric_out))
    coder = TileCoder(3, "mul1")
    with Workers(2) as workers:
        one_sided, _ = ldlq(weight.clone(), lower_in, coder, workers)
        both_sided, trellis = two_sided_ldlq(weight.clone(), lower_in, lower_out, coder, workers)
    errors = [(weight - values).double() for values in (one_sided, both_sided)]
    one, two = (float(((metric_in.double() @ e) * (e @ metric_out.double())).sum()) for e in errors)
    assert two < 0.6 * one
    assert torch.equal(decode_trellis(trellis, 3, "mul1"), both_sided)


def test_the_number_of_threads_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_sided, "TILES_AT_ONCE", 5)
    weight = 0.75 * torch.randn(256, 384, generator=torch.Generator().manual_seed(5))
    lower_in, lower_out = factor_of(some_metric(256)).lower, factor_of(some_metric(384, 3)).lower
    results = []
    for threads in (1, 3):
        with Workers(threads) as workers:
            coder = TileCoder(4, "mul1", threads)
            results.append(two_sided_ldlq(weight.clone(), lower_in, lower_out, coder, workers))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_columns_that_cost_nothing_take_the_errors_of_the_others() -> None:
    """Padded columns (scale 0): the error of the real ones falls below what a full cost of the padding gives."""
    hessian = hessian_of(correlated_rows(500, 96)).matrix
    scales = torch.ones(128)
    scales[96:] = 0.0
    padded = rotated_metric(hessian, scales, 0.025)
    full = padded + 0.99 * float(padded.diagonal().mean()) * torch.eye(128)
    weight = 0.75 * torch.randn(128, 128, generator=torch.Generator().manual_seed(5))
    errors = []
    for metric in (padded, full):
        error = weight.clone()
        with Workers(1) as workers:
            two_sided_ldlq(error, torch.zeros(128, 128), factor_of(metric).lower, TileCoder(3, "mul1"), workers)
        errors.append(float((error @ padded * error).sum()))
    assert errors[0] < 0.9 * errors[1]

"""LDLQ against a dense float64 version written from its definition, and the factorization's behaviour at its limits.

The tile coder is replaced by a smooth function, so that a last bit cannot flip a rounding: what is compared is the
order of the blocks and the feedback.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantize.coder import TileCoder
from quantize.ldlq import FREE_ROW_COST, factor_metric, ldlq, quantize_plain, rotated_metric
from quantize.trellis import decode_trellis
from quantize.workers import Workers
from tests.quantize.layer_samples import block_ldl, block_rotation, correlated_rows, hessian_of


def smooth(values: Tensor) -> Tensor:
    return 0.8 * values + 0.2 * torch.sin(4.0 * values)


@dataclass(frozen=True)
class SmoothCoder(TileCoder):
    """Stands in for the tile coder: `smooth` for the values, the row's sum in place of the trellis."""

    def rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        blocks = rows.view(-1, 16, rows.shape[1] // 16, 16).sum((1, 3)).round().to(torch.int16)
        return smooth(rows), blocks[..., None].expand(-1, -1, round(16 * self.bits))


def dense_ldlq(weight: Tensor, metric: Tensor) -> Tensor:
    """From the last block of 16 rows up: Q_k = f(W_k + sum_{l>k} L_lk^T (W_l - Q_l)); float64."""
    lower, _ = block_ldl(metric)
    exact, quantized = weight.double(), torch.zeros(weight.shape, dtype=torch.float64)
    for start in range(len(weight) - 16, -1, -16):
        block, later = slice(start, start + 16), slice(start + 16, None)
        quantized[block] = smooth(exact[block] + lower[later, block].T @ (exact[later] - quantized[later]))
    return quantized


def some_metric(rows: int, seed: int = 0) -> Tensor:
    scales = torch.randn(rows, generator=torch.Generator().manual_seed(seed)).sign()
    return rotated_metric(hessian_of(correlated_rows(4 * rows, rows, seed)).matrix, scales, 0.025)


@settings(max_examples=6, deadline=None)
@given(row_blocks=st.integers(1, 3), column_blocks=st.integers(1, 5), seed=st.integers(0, 1000))
def test_against_the_definition(row_blocks: int, column_blocks: int, seed: int) -> None:
    rows, columns = 128 * row_blocks, 128 * column_blocks
    metric = some_metric(rows, seed)
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    wanted = dense_ldlq(weight, metric)
    error, factor = weight.clone(), factor_metric(metric.clone(), 0.025)
    assert factor is not None
    assert factor.damping == 0.025
    with Workers(2) as workers:
        quantized, trellis = ldlq(error, factor.lower, SmoothCoder(4, "mul1"), workers)
    assert (quantized - wanted).abs().max() < 1e-3
    assert torch.allclose(error, weight - quantized, rtol=0, atol=1e-5)
    assert trellis.shape == (rows // 16, columns // 16, 64)


def test_feedback_lowers_the_error_it_is_meant_to_lower() -> None:
    """With the real coder: tr(E^T M E), equal to its LDL form, is far below that of plain rounding."""
    metric = some_metric(256)
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(5))
    factor, coder = factor_metric(metric.clone(), 0.025), TileCoder(4, "mul1")
    assert factor is not None
    error = 0.75 * weight
    with Workers(1) as workers:
        quantized, trellis = ldlq(error, factor.lower, coder, workers)
    plain, plain_trellis = quantize_plain(0.75 * weight, coder)
    errors = [(0.75 * weight - values).double() for values in (quantized, plain)]
    fed_back, rounded = (float((e * (metric.double() @ e)).sum()) for e in errors)
    assert fed_back < 0.4 * rounded
    lower, diagonal = block_ldl(metric)
    parts = (lower.T @ errors[0]).view(-1, 16, 128)
    assert float((parts * (diagonal @ parts)).sum()) == pytest.approx(fed_back, rel=1e-6)
    assert torch.equal(decode_trellis(trellis, 4, "mul1"), quantized)
    assert torch.equal(decode_trellis(plain_trellis, 4, "mul1"), plain)


def test_factor_is_the_block_ldl_factor() -> None:
    metric = some_metric(256)
    factor = factor_metric(metric.clone(), 0.025)
    assert factor is not None
    wanted, _ = block_ldl(metric)
    below = torch.block_diag(*[torch.ones(16, 16)] * 16) == 0
    assert torch.allclose(factor.lower.double().tril()[below], wanted[below], rtol=0, atol=1e-3)


def test_metric_is_the_damped_rotated_hessian() -> None:
    hessian = hessian_of(correlated_rows(500, 256)).matrix
    scales = torch.rand(256, generator=torch.Generator().manual_seed(1)) - 0.3
    rotation, exact = block_rotation(256), hessian.double()
    damped = exact + 0.1 * exact.diagonal().mean() * torch.eye(256)
    wanted = rotation @ (damped * scales.double()[:, None] * scales.double()) @ rotation
    assert (rotated_metric(hessian, scales, 0.1) - wanted).norm() < 1e-5 * wanted.norm()


def test_padded_and_dead_rows_cost_little_and_stay_well_conditioned() -> None:
    hessian = hessian_of(correlated_rows(500, 160)).matrix
    scales = torch.rand(256, generator=torch.Generator().manual_seed(1)) + 0.5
    scales[160:] = 0.0
    scales[[3, 50]] = 0.0
    metric = rotated_metric(hessian, scales, 0.025)
    unrotated = block_rotation(256) @ metric.double() @ block_rotation(256)
    free = scales == 0
    live_mean = unrotated.diagonal()[~free].mean()
    assert torch.allclose(unrotated[free][:, free], FREE_ROW_COST * live_mean * torch.eye(98).double(), atol=1e-5)
    assert unrotated[free][:, ~free].abs().max() < 1e-5 * live_mean
    assert torch.linalg.cond(metric.double()) < 1e4
    assert factor_metric(metric, 0.025) is not None


def test_nearly_singular_hessian_is_factored() -> None:
    row = torch.randn(1, 256, generator=torch.Generator().manual_seed(0))
    metric = rotated_metric(row.T @ row, torch.ones(256), 0.025)
    factor = factor_metric(metric, 0.025)
    assert factor is not None
    assert torch.isfinite(factor.lower).all()


def test_damping_is_escalated_until_the_factorization_succeeds() -> None:
    matrix = torch.eye(128)
    matrix[0, 0] = -0.1
    factor = factor_metric(matrix, 0.025)
    assert factor is not None
    assert factor.damping == pytest.approx(9 * 0.025)


@pytest.mark.parametrize("hopeless", [-5.0, torch.nan])
def test_hopeless_metrics_give_none(hopeless: float) -> None:
    matrix = torch.eye(128)
    matrix[0, 0] = hopeless
    assert factor_metric(matrix, 0.025) is None

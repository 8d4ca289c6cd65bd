"""Hessian accumulation against X^T X in float64; what is dropped, merged, refused, and how much memory it takes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantize.errors import Exl3DflashError
from quantize.hessian import STRIP_ROWS, Hessian, HessianAccumulator


def accumulate(rows: Tensor, pieces: int = 1) -> Hessian:
    accumulator = HessianAccumulator(rows.shape[-1])
    for piece in rows.chunk(pieces):
        accumulator.add(piece)
    return accumulator.finish()


def close(matrix: Tensor, wanted: Tensor) -> bool:
    return bool((matrix.double() - wanted).norm() <= 1e-5 * wanted.norm())


@settings(max_examples=25, deadline=None)
@given(features=st.integers(1, 300), rows=st.integers(1, 400), pieces=st.integers(1, 5), seed=st.integers(0, 1000))
def test_mean_of_outer_products(features: int, rows: int, pieces: int, seed: int) -> None:
    x = torch.randn(rows, features, generator=torch.Generator().manual_seed(seed))
    hessian = accumulate(x, pieces)
    assert close(hessian.matrix, x.double().T @ x.double() / rows)
    assert torch.equal(hessian.matrix, hessian.matrix.T)
    assert (hessian.count, hessian.rows, hessian.dropped_rows) == (rows, rows, 0)
    assert hessian.features == features


def test_several_strips_and_any_leading_dimensions() -> None:
    features = 2 * STRIP_ROWS + 70
    x = torch.randn(2, 30, features, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    flat = x.reshape(60, features).double()
    hessian = accumulate(x)
    assert close(hessian.matrix, flat.T @ flat / 60)
    assert torch.equal(hessian.matrix, hessian.matrix.T)


def test_only_the_upper_triangle_is_kept() -> None:
    features = 8 * STRIP_ROWS
    accumulator = HessianAccumulator(features)
    stored = sum(strip.numel() for strip in accumulator._strips)
    assert stored <= 0.57 * features**2


def test_weights_and_merging() -> None:
    random = torch.Generator().manual_seed(1)
    first, second = torch.randn(50, 40, generator=random), torch.randn(20, 40, generator=random)
    one, two = HessianAccumulator(40), HessianAccumulator(40)
    one.add(first, weight=0.5)
    two.add(second, weight=3.0)
    two.add(torch.full((1, 40), torch.nan))
    one.merge(two)
    hessian = one.finish()
    weighted = 0.5 * first.double().T @ first.double() + 3.0 * second.double().T @ second.double()
    assert close(hessian.matrix, weighted / 85.0)
    assert (hessian.count, hessian.rows, hessian.dropped_rows) == (85.0, 70, 1)


def test_non_finite_rows_are_dropped_and_counted() -> None:
    x = torch.randn(100, 30, generator=torch.Generator().manual_seed(2))
    spoiled = x.clone()
    spoiled[3, 4], spoiled[50, 0], spoiled[99, 29] = torch.nan, torch.inf, -torch.inf
    spoiled[7, 1] = 1e25  # finite, but its square is not
    kept = torch.ones(100, dtype=torch.bool)
    kept[[3, 50, 99, 7]] = False
    hessian = accumulate(spoiled)
    assert close(hessian.matrix, x[kept].double().T @ x[kept].double() / 96)
    assert (hessian.rows, hessian.dropped_rows) == (96, 4)
    assert hessian.usable() is None


def test_features_beyond_fp16_range() -> None:
    x = torch.randn(200, 16, generator=torch.Generator().manual_seed(3))
    x[:, 5] *= 1e5
    hessian = accumulate(x)
    assert hessian.usable() is None
    assert close(hessian.matrix, x.double().T @ x.double() / 200)


def test_finishing_twice_and_adding_between() -> None:
    x = torch.randn(60, 20, generator=torch.Generator().manual_seed(4))
    accumulator = HessianAccumulator(20)
    accumulator.add(x[:30])
    before = accumulator.finish().matrix.clone()
    accumulator.add(x[30:])
    assert close(before, x[:30].double().T @ x[:30].double() / 30)
    assert close(accumulator.finish().matrix, x.double().T @ x.double() / 60)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (torch.zeros(0, 8), "no rows"),
        (torch.full((2, 8), torch.nan), "2 non-finite rows dropped"),
        (torch.zeros(5, 8), "mean diagonal"),
        (torch.full((5, 8), 1e-12), "mean diagonal"),
        (torch.full((5000, 8), 5e18), "non-finite"),  # every row is fine, their sum overflows
    ],
)
def test_why_a_hessian_is_unusable(rows: Tensor, reason: str) -> None:
    assert reason in str(accumulate(rows).usable())


def test_wrong_use_is_refused() -> None:
    accumulator = HessianAccumulator(8)
    with pytest.raises(Exl3DflashError, match="7 features; expected 8"):
        accumulator.add(torch.zeros(3, 7))
    with pytest.raises(Exl3DflashError, match="weight -1"):
        accumulator.add(torch.zeros(3, 8), weight=-1.0)
    with pytest.raises(Exl3DflashError, match="9 features; expected 8"):
        accumulator.merge(HessianAccumulator(9))

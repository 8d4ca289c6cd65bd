"""The scale refit against dense float64 least squares, and the reported errors against their definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantize.refit import Metric, ScaleFit
from quantize.workers import Workers
from tests.quantize.layer_samples import correlated_rows, hessian_of, uneven_weight

ROWS, COLUMNS = 96, 640


def layer(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A weight, a noisy normalized version of it, and the scales between them, slightly off."""
    random = torch.Generator().manual_seed(seed)
    weight = uneven_weight(ROWS, COLUMNS, seed)
    input_scales = weight.square().mean(1).sqrt() * torch.where(torch.rand(ROWS, generator=random) < 0.5, -1.0, 1.0)
    output_scales = torch.exp(0.2 * torch.randn(COLUMNS, generator=random))
    coded = weight / input_scales[:, None] / output_scales
    coded += 0.1 * torch.randn(ROWS, COLUMNS, generator=random)
    off_rows, off_columns = (torch.exp(0.05 * torch.randn(size, generator=random)) for size in (ROWS, COLUMNS))
    return weight, coded, input_scales * off_rows, output_scales * off_columns


def damped(matrix: Tensor, damping: float) -> Tensor:
    return matrix.double() + damping * torch.eye(len(matrix), dtype=torch.float64)


@pytest.mark.parametrize("calibrated", [True, False])
def test_each_step_is_the_least_squares_solution(calibrated: bool) -> None:
    weight, coded, input_scales, output_scales = layer()
    matrix = hessian_of(correlated_rows(400, ROWS)).matrix if calibrated else None
    damping = 0.025 * float(matrix.diagonal().mean()) if matrix is not None else 0.0
    root = torch.linalg.cholesky(
        damped(matrix if matrix is not None else torch.eye(ROWS), damping)
    ).T  # H = root^T root
    with Workers(1) as workers:
        fit = ScaleFit(weight, coded, Metric(matrix, damping), workers)
        outputs, inputs = fit.fit_output(input_scales, output_scales), fit.fit_input(input_scales, output_scales)
    target = root @ weight.double()
    scaled = root @ (input_scales[:, None] * coded).double()
    assert torch.allclose(outputs.double(), (scaled * target).sum(0) / scaled.square().sum(0), rtol=1e-3)
    products = torch.einsum("ki,in->kni", root, (coded * output_scales).double()).reshape(-1, ROWS)
    solution = torch.linalg.lstsq(products, target.reshape(-1, 1)).solution[:, 0]
    assert torch.allclose(inputs.double(), solution, rtol=1e-2)


def test_refit_lowers_the_error_and_gives_storable_scales() -> None:
    weight, coded, input_scales, output_scales = layer()
    matrix = hessian_of(correlated_rows(400, ROWS)).matrix
    with Workers(2) as workers:
        fit = ScaleFit(weight, coded, Metric(matrix, 1e-3), workers)
        before = fit.error(input_scales, output_scales)
        inputs, outputs = fit.refit(input_scales, output_scales)
        after = fit.error(inputs, outputs)
    assert after.output < 0.9 * before.output
    assert torch.equal(inputs, inputs.half().float())
    assert torch.equal(outputs, outputs.half().float())


@pytest.mark.parametrize("calibrated", [True, False])
def test_errors_follow_their_definition(calibrated: bool) -> None:
    weight, coded, input_scales, output_scales = layer(3)
    matrix = hessian_of(correlated_rows(400, ROWS)).matrix if calibrated else None
    with Workers(1) as workers:
        error = ScaleFit(weight, coded, Metric(matrix, 0.5), workers).error(input_scales, output_scales)
    exact = weight.double()
    difference = exact - input_scales.double()[:, None] * coded.double() * output_scales.double()
    metric = torch.eye(ROWS).double() if matrix is None else matrix.double()
    assert error.weight == pytest.approx(float(difference.square().sum() / exact.square().sum()), rel=1e-4)
    wanted = (difference * (metric @ difference)).sum() / (exact * (metric @ exact)).sum()
    assert error.output == pytest.approx(float(wanted), rel=1e-4)


def test_zero_scales_stay_zero() -> None:
    weight, coded, input_scales, output_scales = layer()
    weight[[0, 5]], weight[:, 9] = 0.0, 0.0
    input_scales[[0, 5]], output_scales[9] = 0.0, 0.0
    for matrix in (None, hessian_of(correlated_rows(400, ROWS)).matrix):
        with Workers(1) as workers:
            fit = ScaleFit(weight, coded, Metric(matrix, 1e-3), workers)
            before = fit.error(input_scales, output_scales)
            inputs, outputs = fit.refit(input_scales, output_scales)
            assert fit.error(inputs, outputs).output < before.output
        assert (inputs == 0).nonzero().flatten().tolist() == [0, 5]
        assert (outputs == 0).nonzero().flatten().tolist() == [9]


def test_zero_weight_has_no_error() -> None:
    zero = torch.zeros(16, 16)
    with Workers(1) as workers:
        error = ScaleFit(zero, torch.ones(16, 16), Metric(None), workers).error(torch.zeros(16), torch.zeros(16))
    assert (error.output, error.weight) == (0.0, 0.0)


def test_both_steps_in_the_two_sided_metric() -> None:
    """Against float64 least squares over all entries of `A (W - Q) B`, A^T A = H and B B^T = G (both damped)."""
    weight, coded, input_scales, output_scales = (part[..., :80] for part in layer())
    weight, coded, output_scales = weight[:40], coded[:40], output_scales[:80]
    input_scales = layer()[2][:40]
    matrices = [hessian_of(correlated_rows(300, size)).matrix for size in (40, 80)]
    metrics = [Metric(matrix, 0.1 * float(matrix.diagonal().mean())) for matrix in matrices]
    left, right = (torch.linalg.cholesky(damped(m.matrix, m.damping)).T for m in metrics)  # type: ignore[arg-type]
    with Workers(1) as workers:
        fit = ScaleFit(weight, coded, metrics[0], workers, metrics[1])
        outputs, inputs = fit.fit_output(input_scales, output_scales), fit.fit_input(input_scales, output_scales)
        first, second = fit.error(input_scales, output_scales), fit.error(*fit.refit(input_scales, output_scales))
    target = (left @ weight.double() @ right.T).reshape(-1, 1)
    for fitted, scaled, axes in (
        (outputs, input_scales[:, None] * coded, "ki,in,mn->nkm"),
        (inputs, coded * output_scales, "ki,in,mn->ikm"),
    ):
        terms = torch.einsum(axes, left, scaled.double(), right).flatten(1)
        assert torch.allclose(fitted.double(), torch.linalg.lstsq(terms.T, target).solution[:, 0], rtol=1e-2)
    assert second.output < 0.9 * first.output

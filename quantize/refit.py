"""Fit the stored scales to the quantized weight, trellis fixed: free accuracy after coding.

What it computes. With C the coded weight rotated back, `Q = diag(su) C diag(sv)`, H the metric of the inputs and G that
of the outputs, the error `tr((W-Q)^T H (W-Q) G)` is quadratic in sv for fixed su and the other way round:

- all output scales: `((Y^T H Y) o G) sv = colsum(Y o HWG)` with `Y = diag(su) C`; o is the elementwise product;
- all input scales: `((Z G Z^T) o H) su = rowsum(Z o HWG)` with `Z = C diag(sv)`.

A metric that is not known is the identity; then the other side's system is diagonal, and with neither both steps are
plain least squares. Two rounds of both, in the damped metrics. Then the input scales are rounded to fp16, as they are
stored, and the output scales are fitted once more to the rounded ones. Scales that are 0 (all-zero rows and columns)
stay 0.

Layout: both steps are one function of vectors along the fitted side. Products run in blocks of columns
(`quantize.workers`); systems are solved by conjugate gradients from the scales before the fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantize.workers import Workers

ROUNDS = 2
RIDGE = 1e-6
TOLERANCE = 1e-5  # of the residual, relative
MAX_ITERATIONS = 200


@dataclass(frozen=True, eq=False)
class Metric:
    """The error measure over the features of one side: second moments, and the damping added to them for fits.

    Attributes:
        matrix: float32 (features, features), or None for the identity.
        damping: absolute, added to the diagonal when fitting and not when reporting.
    """

    matrix: Tensor | None
    damping: float = 0.0

    def apply(self, columns: Tensor, workers: Workers, damped: bool = False) -> Tensor:
        """H @ columns: (features, n) -> (features, n); `columns` itself for the identity."""
        if self.matrix is None:
            return columns
        product = workers.matmul(self.matrix, columns)
        return product.add_(columns, alpha=self.damping) if damped else product


@dataclass(frozen=True)
class OutputError:
    """Relative errors of a quantized weight: of the output (in the metrics), and of the weight itself; both squared."""

    output: float
    weight: float


class ScaleFit:
    """Weight, coded weight and metrics of one layer, for fitting scales and measuring errors.

    Args:
        weight: W, float32 (in, out).
        coded: C, float32 (in, out), the decoded trellis rotated back, without scales.
        metric: the error measure over inputs.
        workers: run the products.
        output_metric: the error measure over outputs.
    """

    def __init__(
        self, weight: Tensor, coded: Tensor, metric: Metric, workers: Workers, output_metric: Metric | None = None
    ) -> None:
        self.weight = weight
        self.coded = coded
        self.metric = metric
        self.output_metric = output_metric or Metric(None)
        self.workers = workers

    def refit(self, input_scales: Tensor, output_scales: Tensor) -> tuple[Tensor, Tensor]:
        """Fit both scale vectors (in,), (out,); returns them as they are to be stored, rounded to fp16, in float32."""
        target = self._weigh(self.weight)  # (in, out)
        for _ in range(ROUNDS):
            output_scales = self.fit_output(input_scales, output_scales, target)
            input_scales = self.fit_input(input_scales, output_scales, target)
        input_scales = input_scales.half().float()
        return input_scales, self.fit_output(input_scales, output_scales, target).half().float()

    def fit_output(self, input_scales: Tensor, output_scales: Tensor, target: Tensor | None = None) -> Tensor:
        """The best output scales (out,) for these input scales; a column without any signal keeps its scale."""
        target = self._weigh(self.weight) if target is None else target
        scaled = input_scales[:, None] * self.coded  # Y
        weighed = self.metric.apply(scaled, self.workers, damped=True)
        return self._fit(self.output_metric, scaled.T, weighed.T, target.T, output_scales)

    def fit_input(self, input_scales: Tensor, output_scales: Tensor, target: Tensor | None = None) -> Tensor:
        """The best input scales (in,) for these output scales, or the given ones where a fit makes no sense."""
        target = self._weigh(self.weight) if target is None else target
        scaled = self.coded * output_scales  # Z
        weighed = self.output_metric.apply(scaled.T, self.workers, damped=True).T
        return self._fit(self.metric, scaled, weighed, target, input_scales)

    def _fit(self, metric: Metric, vectors: Tensor, weighed: Tensor, target: Tensor, old: Tensor) -> Tensor:
        """The best scales of vectors (own, other), `weighed` in the other side's metric; `metric` is their own side's.

        Signs stay: a scale that would have to change its sign fits nothing.
        """
        right = (vectors * target).sum(1)  # (own,)
        if metric.matrix is None:
            fitted = right / (vectors * weighed).sum(1)
        else:
            fitted = self._solve(metric, self.workers.symmetric_matmul(vectors, weighed.T), right, old)
        return torch.where(torch.isfinite(fitted) & (fitted * old > 0), fitted, old)

    def _solve(self, metric: Metric, products: Tensor, right: Tensor, old: Tensor) -> Tensor:
        """Solve `(products o metric) scales = right`, scales that are 0 left out; `products` is overwritten."""
        assert metric.matrix is not None
        system, diagonal = products, products.diagonal() * metric.damping
        system.mul_(metric.matrix).diagonal().add_(diagonal)
        live = (old != 0).to(system.dtype)
        # Rows differ widely in size: with a unit diagonal the system is well conditioned.
        unit = live / system.diagonal().clamp_min(torch.finfo(system.dtype).tiny).sqrt()
        system.mul_(unit[:, None]).mul_(unit).diagonal().add_(RIDGE + (1.0 - live))
        start = torch.where(unit > 0, old / unit, 0.0)
        return conjugate_gradients(system, right * unit, start) * unit

    def _weigh(self, matrix: Tensor) -> Tensor:
        """H @ matrix @ G, damped: (in, out) -> (in, out)."""
        left = self.metric.apply(matrix, self.workers, damped=True)
        return self.output_metric.apply(left.T, self.workers, damped=True).T

    def error(self, input_scales: Tensor, output_scales: Tensor) -> OutputError:
        """The errors with these scales: tr(E^T H E G) / tr(W^T H W G) and |E|^2 / |W|^2; 0 for an all-zero weight."""
        error = self.weight - input_scales[:, None] * self.coded * output_scales
        return OutputError(
            _ratio(self._energy(error), self._energy(self.weight)),
            _ratio(*(float(matrix.square().sum(dtype=torch.float64)) for matrix in (error, self.weight))),
        )

    def _energy(self, matrix: Tensor) -> float:
        """tr(matrix^T H matrix G), undamped, for matrix (in, out)."""
        own, other = self.metric, self.output_metric
        if own.matrix is None or (other.matrix is not None and matrix.shape[0] > matrix.shape[1]):
            own, other, matrix = other, own, matrix.T  # then the symmetric product is the large one
        weighed = own.apply(matrix, self.workers)
        if other.matrix is None:
            return float((matrix * weighed).sum(dtype=torch.float64))
        return float(self.workers.symmetric_matmul(matrix.T, weighed).mul_(other.matrix).sum(dtype=torch.float64))


def conjugate_gradients(system: Tensor, right: Tensor, start: Tensor) -> Tensor:
    """Solve `system (n, n) @ x = right (n,)` from `start`, for a positive definite system with a unit diagonal.

    The start is close (scales before the fit), so tens of products with the system replace a factorization that costs
    as much as n / 6 of them. Ends early where float32 has no more to give, or where the system turns out not to be
    positive definite.
    """
    solution = start.clone()
    residual = right - system @ solution
    direction, size = residual.clone(), residual.dot(residual)
    enough = TOLERANCE**2 * right.dot(right)
    for _ in range(MAX_ITERATIONS):
        if not bool(size > enough):  # also for NaN
            break
        image = system @ direction
        curvature = direction.dot(image)
        if not bool(curvature > 0.0):
            break
        step = size / curvature
        solution += step * direction
        residual -= step * image
        previous, size = size, residual.dot(residual)
        direction = residual + (size / previous) * direction
    return solution


def _ratio(error: float, norm: float) -> float:
    return max(error, 0.0) / norm if norm > 0.0 else 0.0

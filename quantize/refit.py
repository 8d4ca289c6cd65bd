"""Fit the stored scales to the quantized weight, trellis fixed: free accuracy after coding.

What it computes. With C the coded weight rotated back, `Q = diag(su) C diag(sv)`, and the error
`tr((W-Q)^T H (W-Q))` is quadratic in sv for fixed su and the other way round:

- each output scale on its own: `sv_n = (y_n^T H w_n) / (y_n^T H y_n)` with y_n column n of `diag(su) C`;
- all input scales together: `((Z Z^T) o H) su = rowsum(Z o H W)` with `Z = C diag(sv)`; o is the elementwise product.

Two rounds of both, in the damped Hessian. Then the input scales are rounded to fp16, as they are stored, and the output
scales are fitted once more to the rounded ones. Without a Hessian, H is the identity and both steps are plain least
squares. Scales that are 0 (all-zero rows and columns) stay 0.

Layout: products run in blocks of columns (`quantize.workers`), so that only W, C and H W exist in full.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantize.workers import Workers

ROUNDS = 2
RIDGE = 1e-6


@dataclass(frozen=True, eq=False)
class Metric:
    """The error measure over input features: the measured Hessian, and the damping added to its diagonal for fits.

    Attributes:
        matrix: float32 (in, in), or None for the identity.
        damping: absolute, added to the diagonal when fitting and not when reporting.
    """

    matrix: Tensor | None
    damping: float = 0.0

    def apply(self, columns: Tensor) -> Tensor:
        """H @ columns, undamped: (in, n) -> (in, n)."""
        return columns if self.matrix is None else self.matrix @ columns


@dataclass(frozen=True)
class OutputError:
    """Relative errors of a quantized weight: of the output (in the metric), and of the weight itself; both squared."""

    output: float
    weight: float


class ScaleFit:
    """Weight, coded weight and metric of one layer, for fitting scales and measuring errors.

    Args:
        weight: W, float32 (in, out).
        coded: C, float32 (in, out), the decoded trellis rotated back, without scales.
        metric: the error measure.
        workers: run the products.
    """

    def __init__(self, weight: Tensor, coded: Tensor, metric: Metric, workers: Workers) -> None:
        self.weight = weight
        self.coded = coded
        self.metric = metric
        self.workers = workers
        self.target = weight if metric.matrix is None else workers.matmul(metric.matrix, weight)  # H W, undamped

    def refit(self, input_scales: Tensor, output_scales: Tensor) -> tuple[Tensor, Tensor]:
        """Fit both scale vectors (in,), (out,); returns them as they are to be stored, rounded to fp16, in float32."""
        for _ in range(ROUNDS):
            output_scales = self.fit_output(input_scales, output_scales)
            input_scales = self.fit_input(input_scales, output_scales)
        input_scales = input_scales.half().float()
        return input_scales, self.fit_output(input_scales, output_scales).half().float()

    def fit_output(self, input_scales: Tensor, output_scales: Tensor) -> Tensor:
        """The best output scales (out,) for these input scales; a column without any signal keeps its scale."""
        numerator, denominator = torch.zeros_like(output_scales), torch.zeros_like(output_scales)

        def project(block: slice) -> None:
            scaled = input_scales[:, None] * self.coded[:, block]
            damped = self.metric.apply(scaled) + self.metric.damping * scaled
            target = self.target[:, block] + self.metric.damping * self.weight[:, block]
            numerator[block] = (scaled * target).sum(0)
            denominator[block] = (scaled * damped).sum(0)

        self.workers.each_block(self.coded.shape[1], project)
        fitted = numerator / denominator
        return torch.where(torch.isfinite(fitted) & (output_scales != 0), fitted, output_scales)

    def fit_input(self, input_scales: Tensor, output_scales: Tensor) -> Tensor:
        """The best input scales (in,) for these output scales, or the given ones where a fit makes no sense."""
        scaled = self.coded * output_scales
        right = (scaled * self.target).sum(1) + self.metric.damping * (scaled * self.weight).sum(1)  # (in,)
        if self.metric.matrix is None:
            fitted = right / scaled.square().sum(1)
        else:
            fitted = self._solve_input(scaled, right, input_scales)
        sensible = torch.isfinite(fitted) & (fitted * input_scales > 0)
        return torch.where(sensible, fitted, input_scales)

    def _solve_input(self, scaled: Tensor, right: Tensor, input_scales: Tensor) -> Tensor:
        """Solve ((Z Z^T) o H) su = right, Z = `scaled`, rows with scale 0 left out; the old scales if that fails."""
        assert self.metric.matrix is not None
        system = self.workers.matmul(scaled, scaled.T)  # (in, in)
        diagonal = system.diagonal() * self.metric.damping
        system.mul_(self.metric.matrix).diagonal().add_(diagonal)
        live = (input_scales != 0).to(system.dtype)
        # Rows differ widely in size; with a unit diagonal float32 is enough for the factorization.
        unit = live / system.diagonal().clamp_min(torch.finfo(system.dtype).tiny).sqrt()
        system.mul_(unit[:, None]).mul_(unit).diagonal().add_(RIDGE + (1.0 - live))
        lower, failed = torch.linalg.cholesky_ex(system)
        if int(failed) != 0:
            return input_scales
        return torch.cholesky_solve((right * unit)[:, None], lower)[:, 0] * unit

    def error(self, input_scales: Tensor, output_scales: Tensor) -> OutputError:
        """The errors with these scales: tr(E^T H E) / tr(W^T H W) and |E|^2 / |W|^2; 0 for an all-zero weight."""
        sums = torch.zeros(4, self.coded.shape[1], dtype=torch.float64)

        def measure(block: slice) -> None:
            weight = self.weight[:, block]
            error = weight - input_scales[:, None] * self.coded[:, block] * output_scales[block]
            parts = (error * self.metric.apply(error), weight * self.target[:, block], error.square(), weight.square())
            sums[:, block] = torch.stack([part.sum(0, dtype=torch.float64) for part in parts]).cpu()

        self.workers.each_block(self.coded.shape[1], measure)
        output, output_norm, own, own_norm = sums.sum(1).tolist()
        return OutputError(_ratio(output, output_norm), _ratio(own, own_norm))


def _ratio(error: float, norm: float) -> float:
    return max(error, 0.0) / norm if norm > 0.0 else 0.0

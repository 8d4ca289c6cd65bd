"""LDLQ: quantize a weight row block by row block, letting the rows still to come absorb the error already made.

What it computes. With E = W - Q the output error is `tr(E^T M E)`, M the Hessian in the rotated basis. From the block
factorization `M = L D L^T` (L unit lower triangular in blocks of 16, D block diagonal) the error is
`sum_k tr(F_k^T D_k F_k)` with `F_k = E_k + sum_{l>k} L_lk^T E_l`. So block k is best coded as
`Q_k = round(W_k + sum_{l>k} L_lk^T E_l)`, from the last rows up: every error is fed back into the blocks above it.

The metric: `M = H D (H_x + damping) D H` with H_x the measured Hessian, H the Hadamard rotation, and D the sign flips;
in the scaled form D is the full input scales, because a row coded in units of its scale costs that scale squared.
Damping is a share of the mean diagonal of H_x. Rows with scale 0 (padding, all-zero rows) decode to 0 whatever is coded
there, so an error in them is free; the rotation lets real rows unload their errors onto them. They get a small cost,
so that M stays well conditioned (0.01 of a real row: 9 to 15 % less output error than 1 at 160 or 192 of 256 rows).
If the Cholesky factorization still fails, damping is escalated in the rotated basis.

Layout: the factor is a dense (in, in) float32 matrix of which only the part below the diagonal blocks is used. Feedback
from rows below a span of 128 comes in one product per span, the rest block by block. The weight is overwritten by E.

Left out: feedback along the outputs (`quantize.two_sided`). Its metric is built and factored here too: it is the same
with output scales for input scales and the gradients' second moments for the inputs'.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantize.coder import TileCoder, empty_trellis
from quantize.hadamard import rotate_both_sides_
from quantize.workers import Workers

BLOCK = 16
SPAN = 128
FREE_ROW_COST = 0.01
ESCALATION = (0.0, 2.0, 8.0, 32.0)


@dataclass(frozen=True, eq=False)
class Factor:
    """The block-16 unit lower factor of a metric.

    Attributes:
        lower: float32 (in, in) without its unit diagonal: zero on and above the diagonal blocks.
        damping: the share of the mean diagonal that was added before the factorization succeeded.
    """

    lower: Tensor
    damping: float


def rotated_metric(hessian: Tensor, input_scales: Tensor, damping: float) -> Tensor:
    """The metric of the rotated weight's rows, or of its columns (then read "columns" for "rows").

    Args:
        hessian: float32 (features, features), unpadded.
        input_scales: float32 (in,), in >= features; 0 marks rows that cost nothing.
        damping: added to the diagonal, as a share of its mean.

    Returns:
        float32 (in, in), positive definite up to rounding.
    """
    features, rows = hessian.shape[0], input_scales.shape[0]
    scales = input_scales[:features]
    metric = torch.zeros(rows, rows, dtype=torch.float32, device=hessian.device)
    real = metric[:features, :features]
    real.copy_(hessian)
    real.diagonal().add_(damping * hessian.diagonal().mean())
    real.mul_(scales[:, None]).mul_(scales)
    free = input_scales == 0
    if bool(free.any()):
        metric.diagonal().add_(free * (FREE_ROW_COST * metric.diagonal()[~free].mean()))
    return rotate_both_sides_(metric)


def factor_metric(metric: Tensor, damping: float) -> Factor | None:
    """Factor a metric (in, in), which is overwritten; None when escalating damping did not help.

    Args:
        metric: from `rotated_metric`.
        damping: what `rotated_metric` added; a failed attempt adds multiples of it.
    """
    mean = metric.diagonal().mean()
    added = 0.0
    for multiple in ESCALATION:
        metric.diagonal().add_((multiple - added) * damping * mean)
        added = multiple
        lower, failed = torch.linalg.cholesky_ex(metric)
        if int(failed) == 0 and bool(torch.isfinite(lower.diagonal()).all()):
            return Factor(_unit_blocks_(lower), (1.0 + multiple) * damping)
    return None


def _unit_blocks_(cholesky: Tensor) -> Tensor:
    """Make a Cholesky factor the block unit factor, in place: block columns times their diagonal block's inverse."""
    for start in range(0, cholesky.shape[0], BLOCK):
        stop = start + BLOCK
        below = cholesky[stop:, start:stop]
        diagonal_block = cholesky[start:stop, start:stop]
        below.copy_(torch.linalg.solve_triangular(diagonal_block, below, upper=False, left=False))
        diagonal_block.zero_()
    return cholesky


def ldlq(weight: Tensor, lower: Tensor, coder: TileCoder, workers: Workers) -> tuple[Tensor, Tensor]:
    """Quantize with error feedback.

    Args:
        weight: float32 (in, out), both multiples of 128; overwritten by the error W - Q.
        lower: the factor of `factor_metric`, (in, in).
        coder: how tiles are coded.
        workers: run the products.

    Returns:
        The quantized weight (in, out) and the packed trellis, int16 (in/16, out/16, 16 * bits).
    """
    rows, columns = weight.shape
    quantized = torch.empty_like(weight)
    trellis = empty_trellis(rows, columns, coder.bits, weight.device)
    for start in range(rows - SPAN, -1, -SPAN):
        stop = start + SPAN
        feedback = workers.matmul(lower[stop:, start:stop].T, weight[stop:])  # (128, out); below `stop` it is the error
        for first in range(stop - BLOCK, start - 1, -BLOCK):
            last = first + BLOCK
            target = feedback[first - start : last - start]  # (16, out)
            target.addmm_(lower[last:stop, first:last].T, weight[last:stop]).add_(weight[first:last])
            quantized[first:last], trellis[first // BLOCK : last // BLOCK] = coder.rows(target)
            weight[first:last].sub_(quantized[first:last])
    return quantized, trellis


def quantize_plain(weight: Tensor, coder: TileCoder) -> tuple[Tensor, Tensor]:
    """Quantize without feedback, for a layer without a usable Hessian; arguments and result as for `ldlq`."""
    rows, columns = weight.shape
    quantized = torch.empty_like(weight)
    trellis = empty_trellis(rows, columns, coder.bits, weight.device)
    for first in range(0, rows, SPAN):
        last = first + SPAN
        quantized[first:last], trellis[first // BLOCK : last // BLOCK] = coder.rows(weight[first:last])
    return quantized, trellis

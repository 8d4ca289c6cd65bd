"""From a regularized weight to its trellis, with as much error feedback as the known second moments allow.

Both sides' Hessians usable: two-sided LDLQ. One of them: feedback along that side alone. None: plain rounding. A
Hessian that is there and cannot be used is never passed over in silence: `Side.unusable` says why.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantize.coder import TileCoder
from quantize.hadamard import rotate_both_sides_
from quantize.hessian import Hessian
from quantize.ldlq import Factor, factor_metric, ldlq, quantize_plain, rotated_metric
from quantize.refit import Metric
from quantize.regularize import Regularized
from quantize.two_sided import two_sided_ldlq
from quantize.workers import Workers


@dataclass(frozen=True, eq=False)
class Side:
    """What is known of one side (inputs or outputs) of a layer.

    Attributes:
        metric: the undamped second moments and their damping; the identity if there are none.
        factor: of the rotated metric; None without feedback along this side, or after the feedback.
        unusable: why there is no feedback, None where there is.
        damping: the share of the mean diagonal that was added, None without feedback.
    """

    metric: Metric
    factor: Factor | None
    unusable: str | None
    damping: float | None = None

    def without_factor(self) -> Side:
        """What the fit of the scales needs: the factor is as large as the metric, and done with."""
        return replace(self, factor=None)


def make_side(hessian: Hessian | None, scales: Tensor, damping: float) -> Side:
    """Build and factor the metric of one side.

    Args:
        hessian: second moments of the side's (unpadded) features, or None.
        scales: float32 (padded features,), folded into the metric; 0 marks features that cost nothing.
        damping: added to the diagonal, as a share of its mean.
    """
    unusable = "none" if hessian is None else hessian.usable()
    if hessian is None or unusable is not None:
        return Side(Metric(None), None, unusable)
    matrix = hessian.matrix.to(scales.device, torch.float32)
    factor = factor_metric(rotated_metric(matrix, scales, damping), damping)
    if factor is None:
        return Side(Metric(None), None, "Cholesky factorization failed")
    return Side(Metric(matrix, damping * float(matrix.diagonal().mean())), factor, None, factor.damping)


def code_weight(
    regular: Regularized, inputs: Side, outputs: Side, coder: TileCoder, workers: Workers
) -> tuple[Tensor, Tensor]:
    """Code a regularized weight, which is overwritten.

    Returns:
        The coded weight rotated back, without scales (in, out), and the trellis.
    """
    weight = regular.weight
    if outputs.factor is not None:
        lower_in = weight.new_zeros(weight.shape[0], weight.shape[0]) if inputs.factor is None else inputs.factor.lower
        coded, trellis = two_sided_ldlq(weight, lower_in, outputs.factor.lower, coder, workers)
    elif inputs.factor is not None:
        coded, trellis = ldlq(weight, inputs.factor.lower, coder, workers)
    else:
        coded, trellis = quantize_plain(weight, coder)
    return rotate_both_sides_(coded), trellis

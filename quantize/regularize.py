"""Bring a weight matrix into the shape that the trellis codes best: scales out, signs flipped, rotated, near Gaussian.

What it computes, for W (in, out), in this order:

1. output scales `sv = sign * (column RMS / mean column RMS)` if they are wanted, else `sign`; W /= sv; rotate columns;
2. input scales `su = sign * row RMS / -1.24371088`; W /= su; rotate rows.

so that `W = diag(su) H R H diag(sv)` with R the result, of RMS 1.24. One global factor then moves R to the codebook's
best working point (`quantize.scale_search`). Scales on the output side give every output the same relative error.

Dead rows and columns: an all-zero column gets scale 0 and decodes to exactly 0. An all-zero row (padding is the common
case) gets scale 0 too; what the trellis holds there is then free, and LDLQ uses that freedom. The random signs come
from one generator with the given seed: input signs first, then output signs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantize.hadamard import hadamard_128

CODEBOOK_SCALE = 1.24371088
NEGLIGIBLE = 1e-30


@dataclass(frozen=True, eq=False)
class Regularized:
    """A weight in the basis in which it is coded.

    Attributes:
        weight: float32 (in, out), rotated and scaled.
        input_scales: float32 (in,) with signs; 0 for all-zero rows.
        output_scales: float32 (out,) with signs; 0 for all-zero columns.
    """

    weight: Tensor
    input_scales: Tensor
    output_scales: Tensor

    def rescaled(self, factor: float) -> Regularized:
        """The same weight with `weight` multiplied (in place) and the input scales divided by a global factor."""
        return Regularized(self.weight.mul_(factor), self.input_scales / factor, self.output_scales)


def random_signs(rows: int, columns: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Signs (rows,) and (columns,), each -1.0 or 1.0, drawn on the CPU without touching torch's global generator."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(size, generator=generator) for size in (rows, columns)]
    signs = [torch.where(values < 0, -1.0, 1.0).to(device) for values in drawn]
    return signs[0], signs[1]


def regularize(weight: Tensor, output_scaling: bool, seed: int) -> Regularized:
    """Regularize a padded weight.

    Args:
        weight: float32 (in, out), finite, of moderate size, both sides multiples of 128; left untouched.
        output_scaling: give every output channel a scale of its own.
        seed: of the random signs.
    """
    input_signs, output_signs = random_signs(weight.shape[0], weight.shape[1], seed, weight.device)
    column_rms = torch.linalg.vector_norm(weight, dim=0) / weight.shape[0] ** 0.5  # (out,)
    live_columns = column_rms > NEGLIGIBLE
    output_scales = output_signs * live_columns
    if output_scaling and bool(live_columns.any()):
        output_scales = output_scales * (column_rms / column_rms.mean())
    rotated = hadamard_128(weight / _divisor(output_scales), 1)
    row_rms = torch.linalg.vector_norm(rotated, dim=1) / weight.shape[1] ** 0.5  # (in,)
    input_scales = input_signs * (row_rms > NEGLIGIBLE) * row_rms / -CODEBOOK_SCALE
    rotated.div_(_divisor(input_scales)[:, None])
    return Regularized(hadamard_128(rotated, 0), input_scales, output_scales)


def _divisor(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales)

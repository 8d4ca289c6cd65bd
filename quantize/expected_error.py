"""The error that coding a layer will leave, in size and shape, before anything is coded.

What and why. To decide how many bits a layer deserves, one has to know what its error will cost. Coding with feedback
leaves the residual `L^T E K` (`quantize.two_sided`; L or K is the identity without feedback along that side), which is
nearly white: each tile is rounded on its own. So an error of the right shape is white noise N sent through the inverse
factors, `E = L^-T N K^-1`, rotated back and scaled like the weight. Its size is that of the residual:

- `TILE_ERRORS[codebook][bits]`, the mean squared error of the tile coder on Gaussian weights of variance 1, measured
  with the best scale; 1.06 to 1.4 times the `4^-bits` of rate-distortion theory;
- what is coded is not the weight but weight plus feedback, which is larger: by the amplification
  `a = |E|^2 / |N|^2`, variance 1 becomes `1 + (a - 1) * residual`. Put in twice, the residual is
  `d * (1 + x + x^2)` with `x = d * (a - 1)`. It matters at 2 bits and below.

Left out: the refit of the scales (a few per cent less error on the calibration rows, next to nothing on others), and
that coarse codes shrink the weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quantize.encoder import default_threads
from quantize.hadamard import rotate_both_sides_
from quantize.hessian import Hessian
from quantize.ldlq import Factor
from quantize.linear import QuantSettings, make_sides, padded_weight
from quantize.regularize import regularize
from quantize.workers import Workers

TILE_ERRORS: dict[str, dict[float, float]] = {
    "mul1": {
        1: 0.27343, 1.5: 0.13759, 2: 0.06840, 2.5: 0.03458, 3: 0.01739, 3.5: 0.00879,
        4: 0.00446, 5: 0.00115, 6: 3.01e-4, 7: 8.1e-5, 8: 2.1e-5,
    },
    "mcg": {1: 0.26759, 2: 0.06831, 3: 0.01743, 4: 0.00456, 5: 0.00121, 6: 3.26e-4, 7: 8.8e-5, 8: 2.4e-5},
    "3inst": {1: 0.26888, 2: 0.06867, 3: 0.01779, 4: 0.00464, 5: 0.00122, 6: 3.30e-4, 7: 8.8e-5, 8: 2.3e-5},
}  # fmt: skip
_NOISE_SEED = 0x5EED  # apart from the seed of the signs


@dataclass(frozen=True, eq=False)
class ExpectedError:
    """What coding will do to one layer.

    Attributes:
        unit: float32 (in, out), an error of the expected shape, as large as if the residual were the coded weight's own
            size.
        amplification: mean square of the error over that of its residual, both in the coded basis.
        codebook: as in `QuantSettings`.
    """

    unit: Tensor
    amplification: float
    codebook: str

    def residual(self, bits: float) -> float:
        """Expected mean square of the residual, relative to the coded weight's."""
        error = TILE_ERRORS[self.codebook][bits]
        drift = error * (self.amplification - 1.0)
        return error * (1.0 + drift + drift * drift)

    def draw(self, bits: float) -> Tensor:
        """An error of the size that coding at `bits` leaves, float32 (in, out)."""
        return self.unit * math.sqrt(self.residual(bits))


def expect_error(
    weight: Tensor, hessian: Hessian | None, output_hessian: Hessian | None, settings: QuantSettings
) -> ExpectedError:
    """The error that `quantize_linear` will leave with the same arguments, at any bits.

    Args:
        weight: (in, out), finite.
        hessian, output_hessian: as for `quantize_linear`.
        settings: its bits say nothing here; the same seed gives the same error.
    """
    threads = settings.threads or default_threads()
    rows, columns = weight.shape
    with torch.no_grad(), Workers(threads) as workers:
        regular = regularize(padded_weight(weight), settings.out_scales != "never", settings.seed)
        inputs, outputs = (side.factor for side in make_sides(regular, hessian, output_hessian, settings))
        generator = torch.Generator().manual_seed(settings.seed ^ _NOISE_SEED)
        noise = torch.randn(regular.weight.shape, generator=generator).to(regular.weight)
        noise.mul_(regular.weight.square().mean().sqrt())
        size = float(noise.square().mean())
        shaped = _unfeed(outputs, _unfeed(inputs, noise, workers).T, workers).T.contiguous()
        amplification = float(shaped.square().mean()) / size if size > 0.0 else 1.0
        error = rotate_both_sides_(shaped).mul_(regular.input_scales[:, None]).mul_(regular.output_scales)
    return ExpectedError(error[:rows, :columns].contiguous(), amplification, settings.codebook)


def _unfeed(factor: Factor | None, residual: Tensor, workers: Workers) -> Tensor:
    """Solve `L^T error = residual` for the error (side, other); the residual itself without a factor."""
    if factor is None:
        return residual
    error = torch.empty_like(residual)

    def solve(block: slice) -> None:
        error[:, block] = torch.linalg.solve_triangular(
            factor.lower.T, residual[:, block], upper=True, unitriangular=True
        )

    workers.each_block(residual.shape[1], solve)
    return error

"""The global scale that puts a regularized weight at the codebook's best working point.

What and why: a codebook has a fixed range. Scaled too small, a weight wastes resolution; too large, its tails are cut
off. The best scale depends on the bits and on the tails; it is found by coding a sample of the tiles at several scales.

The sample holds every tile row and column at least once (three wrapped diagonals, since outliers are whole channels)
and the tiles of extreme RMS. It is inflated by the drift that error feedback adds at low rates (ExLlamaV3's figures).

The search: the relative error falls like 1/scale^2 and rises steeply once tails are cut, with one flat minimum between.
A walk over a coarse grid (step 0.2, a third of the sample) starts beside the optimum usual for the codebook; a walk
over a fine grid (step 0.075, the whole sample) refines it, and a parabola through the best three points ends it.
ExLlamaV3 evaluates the same grids in full; walking downhill lands on the same point for half of the encodings. A point
and its neighbours are coded in one call, which keeps all threads busy on small samples too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quantize.coder import TileCoder
from quantize.trellis import weight_to_tiles

DIAGONALS = 3
COARSE_FIRST, COARSE_STEP = 0.1, 0.2
FINE_STEP = 0.075
SMALLEST_SCALE = 0.01
FEEDBACK_DRIFT = {1: 1.08, 1.5: 1.035, 2: 1.018, 2.5: 1.009, 3: 1.004}
USUAL_COARSE_INDEX = {"mul1": 3, "mcg": 4, "3inst": 4}


def search_scale(weight: Tensor, coder: TileCoder) -> float:
    """The factor by which to multiply a regularized weight (in, out) before coding it; 1.0 for an all-zero weight."""
    sample = sample_tiles(weight) * FEEDBACK_DRIFT.get(coder.bits, 1.0)  # (tiles, 256)
    if not bool(sample.any()):
        return 1.0
    coarse, _ = _walk(
        lambda indices: _errors(sample[::3], [_coarse_scale(index) for index in indices], coder),
        USUAL_COARSE_INDEX[coder.codebook],
    )
    centre = _coarse_scale(coarse)
    best, errors = _walk(lambda indices: _errors(sample, [_fine_scale(centre, index) for index in indices], coder), 0)
    before, here, after = (errors[best + offset] for offset in (-1, 0, 1))
    curvature = before - 2.0 * here + after
    offset = 0.5 * (before - after) / curvature if curvature > 0.0 else 0.0
    return max(_fine_scale(centre, best) + FINE_STEP * min(max(offset, -0.5), 0.5), SMALLEST_SCALE)


def sample_tiles(weight: Tensor) -> Tensor:
    """The tiles of a regularized weight (in, out) to judge a scale by: (tiles, 256) in ring order."""
    tile_rows, tile_columns = weight.shape[0] // 16, weight.shape[1] // 16
    blocks = weight.view(tile_rows, 16, tile_columns, 16)
    length = max(tile_rows, tile_columns)
    along = torch.arange(length, device=weight.device).repeat_interleave(DIAGONALS)
    across = torch.arange(DIAGONALS, device=weight.device).repeat(length)
    size = torch.linalg.vector_norm(blocks, dim=(1, 3)).flatten()  # (tile_rows * tile_columns,)
    extremes = min(max(8, length * DIAGONALS // 16), (len(size) + 1) // 2)
    extreme = torch.cat([torch.topk(size, extremes, largest=largest).indices for largest in (True, False)])
    rows = torch.cat([along % tile_rows, extreme // tile_columns])
    columns = torch.cat([(along + across) % tile_columns, extreme % tile_columns])
    return weight_to_tiles(blocks[rows, :, columns, :].reshape(-1, 16)).view(-1, 256)


def _coarse_scale(index: int) -> float:
    return COARSE_FIRST + COARSE_STEP * index


def _fine_scale(centre: float, index: int) -> float:
    return centre + FINE_STEP * index


def _errors(tiles: Tensor, scales: Sequence[float], coder: TileCoder) -> list[float]:
    """Mean squared errors of tiles (n, 256) coded at each scale; infinite where the scale is not positive."""
    positive = torch.tensor([scale for scale in scales if scale > 0.0], device=tiles.device)[:, None, None]
    scaled = (tiles * positive).view(-1, tiles.shape[1])  # (scales * n, 256)
    coded = coder.values(scaled).view(len(positive), *tiles.shape) / positive
    found = iter((coded - tiles).square().mean((1, 2), dtype=torch.float64).tolist())
    return [next(found) if scale > 0.0 else float("inf") for scale in scales]


def _walk(errors_at: Callable[[Sequence[int]], list[float]], start: int) -> tuple[int, dict[int, float]]:
    """Walk downhill over integers to a local minimum; returns it and every error seen, both neighbours included."""
    errors: dict[int, float] = {}
    best = start
    while True:
        around = (best, best - 1, best + 1)
        unseen = [index for index in around if index not in errors]
        errors.update(zip(unseen, errors_at(unseen), strict=True))
        lowest = min(around, key=lambda index: errors[index])
        if lowest == best:
            return best, errors
        best = lowest

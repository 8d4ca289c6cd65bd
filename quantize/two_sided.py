"""Two-sided LDLQ: errors are fed back along the inputs and along the outputs of a layer.

What it computes. Where outputs matter unequally, the error of a weight is `tr(E^T M E N)` with E = W - Q, M the metric
of the inputs and N that of the outputs, both in the rotated basis (`quantize.ldlq`). With the block factors
`M = L D L^T` and `N = K C K^T` it is a sum over 16 x 16 tiles of the size of `L^T E K`, so tile (a, c) is best coded as
`round(W + L^T E K)` with E of the tiles coded so far: those below, those to the right, and those below to the right.
(The Kronecker form of the objective is YAQA's: Tseng et al. 2025.)

Order: anti-diagonals from the far corner. The tiles of one are independent, so the encoder gets them in one call.

Cost: with `B[a,c] = sum_{l>a} L[l,a]^T E[l,c]`, what one-sided LDLQ feeds back, and `P = E + B`, what is fed back is
`B[a,c] + sum_{m>c} P[a,m] K[m,c]`: two products of the one-sided kind instead of a four-fold sum. Rows and columns that
are far away (finished when a block of 128 x 128 is entered) come in one product per block, near ones tile by tile.

Layout: factors are dense with zeros on and above their diagonal blocks, so products may run over tiles that are not
coded yet, whatever is stored there. `weight` turns into E tile by tile, B (stored transposed) into P, and the buffer
of Q holds the far feedback of the outputs until a tile is coded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantize.coder import TileCoder, empty_trellis
from quantize.ldlq import BLOCK, SPAN
from quantize.workers import Workers

NEAR = 2 * SPAN  # a tile's own block of 128 and the next: the tiles that finish while the block is being coded
TILES_PER_SPAN = SPAN // BLOCK
TILES_AT_ONCE = 32  # of one job of the workers


@dataclass(frozen=True, eq=False)
class _Buffers:
    """The matrices of one run; `carried` is (out, in), all others as in the module's docstring."""

    lower_in: Tensor
    lower_out: Tensor
    error: Tensor
    carried: Tensor
    quantized: Tensor


def two_sided_ldlq(
    weight: Tensor, lower_in: Tensor, lower_out: Tensor, coder: TileCoder, workers: Workers
) -> tuple[Tensor, Tensor]:
    """Quantize with error feedback in both directions.

    Args:
        weight: float32 (in, out), both multiples of 128; overwritten by the error W - Q.
        lower_in: factor of the inputs' metric from `ldlq.factor_metric`, (in, in).
        lower_out: factor of the outputs' metric, (out, out).
        coder: how tiles are coded.
        workers: run the products.

    Returns:
        The quantized weight (in, out) and the packed trellis, int16 (in/16, out/16, 16 * bits).
    """
    rows, columns = weight.shape
    buffers = _Buffers(lower_in, lower_out, weight, weight.new_zeros(columns, rows), torch.zeros_like(weight))
    trellis = empty_trellis(rows, columns, coder.bits, weight.device)
    tile_rows, tile_columns = rows // BLOCK, columns // BLOCK
    for diagonal in range(tile_rows + tile_columns - 2, -1, -1):
        _enter_blocks(buffers, diagonal, workers)
        first, last = max(0, diagonal - tile_columns + 1), min(tile_rows - 1, diagonal)
        down = torch.arange(first, last + 1, device=weight.device)  # (tiles,) tile rows
        across = diagonal - down
        target = weight.new_empty(len(down), BLOCK, BLOCK)
        chunks = [slice(start, start + TILES_AT_ONCE) for start in range(0, len(down), TILES_AT_ONCE)]

        def feed(chunk: slice, down: Tensor = down, across: Tensor = across, target: Tensor = target) -> None:
            target[chunk] = _near_feedback(buffers, down[chunk], across[chunk])

        workers.each(chunks, feed)
        error, carried, quantized = _tile_views(buffers)
        coded, packed = coder.rows(target.view(-1, BLOCK))
        trellis[down, across] = packed[:, 0]
        quantized[down, :, across] = coded.view_as(target)
        made = error[down, :, across] - coded.view_as(target)  # (tiles, 16, 16)
        error[down, :, across] = made
        carried[across, :, down] += made.transpose(1, 2)
    return buffers.quantized, trellis


def _enter_blocks(buffers: _Buffers, diagonal: int, workers: Workers) -> None:
    """Far feedback of the blocks of 128 x 128 whose last tile lies on this anti-diagonal of tiles."""
    rows, columns = buffers.error.shape
    spans, rest = divmod(diagonal - 2 * (TILES_PER_SPAN - 1), TILES_PER_SPAN)
    if rest or spans < 0:
        return
    first, last = max(0, spans - columns // SPAN + 1), min(rows // SPAN - 1, spans)

    def enter(span: int) -> None:
        down, across = (slice(SPAN * index, SPAN * index + SPAN) for index in (span, spans - span))
        below, right = slice(SPAN * span + NEAR, None), slice(SPAN * (spans - span) + NEAR, None)
        torch.mm(buffers.error[below, across].T, buffers.lower_in[below, down], out=buffers.carried[across, down])
        torch.mm(buffers.carried[right, down].T, buffers.lower_out[right, across], out=buffers.quantized[down, across])

    workers.each(range(first, last + 1), enter)


def _tile_views(buffers: _Buffers) -> tuple[Tensor, Tensor, Tensor]:
    """error, carried and quantized as (tile rows, 16, tile columns, 16) of their own orientation."""
    views = (buffers.error, buffers.carried, buffers.quantized)
    error, carried, quantized = (v.view(v.shape[0] // BLOCK, BLOCK, v.shape[1] // BLOCK, BLOCK) for v in views)
    return error, carried, quantized


def _near_feedback(buffers: _Buffers, down: Tensor, across: Tensor) -> Tensor:
    """What the tiles (down, across) are to be coded as, (tiles, 16, 16); completes their B in `carried`."""
    error, carried, quantized = _tile_views(buffers)
    from_below = torch.bmm(
        _near_rows(buffers.error, across, down).transpose(1, 2), _near_rows(buffers.lower_in, down, down)
    )  # (tiles, 16 columns, 16 rows)
    from_below += carried[across, :, down]
    carried[across, :, down] = from_below
    from_right = torch.bmm(
        _near_rows(buffers.carried, down, across).transpose(1, 2), _near_rows(buffers.lower_out, across, across)
    )
    return from_right.add_(from_below.transpose(1, 2)).add_(quantized[down, :, across]).add_(error[down, :, across])


def _near_rows(matrix: Tensor, columns: Tensor, tiles: Tensor) -> Tensor:
    """Columns of tiles `columns (n,)` in the near rows of tiles `tiles (n,)`: (n, near, 16).

    The last block of 128 has no next one; it takes the previous one instead, where its factor is zero.
    """
    rows = matrix.shape[0]
    near = min(NEAR, rows)
    start = (tiles // TILES_PER_SPAN * SPAN).clamp(max=rows - near)
    index = start[:, None] + torch.arange(near, device=matrix.device)  # (n, near)
    return matrix.view(rows, -1, BLOCK)[index, columns[:, None]]

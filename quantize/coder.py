"""Rows of weights in, quantized rows and packed trellis out: the tile encoder as LDLQ and the scale search use it.

The encoder works on tiles in ring order on the CPU; this adapter cuts rows of a matrix into tiles, and puts the result
back in matrix order on the matrix's own device. The layout is the one of `quantize.trellis`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantize.encoder import encode_tiles
from quantize.trellis import pack_states, tiles_to_weight, weight_to_tiles


@dataclass(frozen=True)
class TileCoder:
    """How tiles are coded: bits per weight, codebook, threads (which never change the result), and the search."""

    bits: float
    codebook: str
    threads: int = 0
    encoder: str = "exact"

    def values(self, tiles: Tensor) -> Tensor:
        """The quantized values of tiles (n, 256) in ring order, same shape, order and device."""
        values, _ = self._encode(tiles.cpu().contiguous())
        return values.to(tiles.device)

    def rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize whole rows of tiles.

        Args:
            rows: float32 (rows, out), both multiples of 16.

        Returns:
            The quantized values (rows, out) and the packed trellis, int16 (rows/16, out/16, 16 * bits).
        """
        tiles = weight_to_tiles(rows)  # (rows/16, out/16, 256)
        values, states = self._encode(tiles.view(-1, 256).cpu())
        packed = pack_states(states, self.bits).to(rows.device)
        quantized = tiles_to_weight(values.to(rows.device).view_as(tiles))
        return quantized, packed.view(*tiles.shape[:2], -1)

    def _encode(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        return encode_tiles(tiles, self.bits, self.codebook, self.threads, encoder=self.encoder)


def empty_trellis(rows: int, columns: int, bits: float, device: torch.device) -> Tensor:
    """Room for the packed trellis of a (rows, columns) matrix: int16 (rows/16, columns/16, 16 * bits)."""
    return torch.empty(rows // 16, columns // 16, round(16 * bits), dtype=torch.int16, device=device)

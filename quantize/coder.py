"""Rows of weights in, quantized rows and packed trellis out: the tile encoder as LDLQ and the scale search use it.

The encoders work on tiles in ring order: `quantize.encoder` on the CPU, `quantize.cuda_encoder` on a GPU. This adapter
takes the one that the matrix's device has, cuts rows of the matrix into tiles, and puts the result back in matrix order
on the same device. The layout is the one of `quantize.trellis`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantize.cuda_batch import encode_in_batch
from quantize.encoder import encode_tiles
from quantize.trellis import pack_states, tiles_to_weight, weight_to_tiles


@dataclass(frozen=True)
class TileCoder:
    """How tiles are coded: bits per weight, codebook; on a CPU also threads (no matter for the result) and search."""

    bits: float
    codebook: str
    threads: int = 0
    encoder: str = "exact"

    def values(self, tiles: Tensor) -> Tensor:
        """The quantized values of tiles (n, 256) in ring order, same shape, order and device."""
        return self._encode(tiles)[0]

    def rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize whole rows of tiles.

        Args:
            rows: float32 (rows, out), both multiples of 16.

        Returns:
            The quantized values (rows, out) and the packed trellis, int16 (rows/16, out/16, 16 * bits).
        """
        tiles = weight_to_tiles(rows)  # (rows/16, out/16, 256)
        values, states = self._encode(tiles.view(-1, 256))
        return tiles_to_weight(values.view_as(tiles)), pack_states(states, self.bits).view(*tiles.shape[:2], -1)

    def _encode(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        if tiles.device.type == "cuda":
            return encode_in_batch(tiles, self.bits, self.codebook)
        on_cpu = tiles.cpu().contiguous()
        values, states = encode_tiles(on_cpu, self.bits, self.codebook, self.threads, encoder=self.encoder)
        return values.to(tiles.device), states.to(tiles.device)


def empty_trellis(rows: int, columns: int, bits: float, device: torch.device) -> Tensor:
    """Room for the packed trellis of a (rows, columns) matrix: int16 (rows/16, columns/16, 16 * bits)."""
    return torch.empty(rows // 16, columns // 16, round(16 * bits), dtype=torch.int16, device=device)

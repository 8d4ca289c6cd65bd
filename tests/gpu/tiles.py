"""(a) The GPU's tile encoder against the CPU's exact search, and ExLlamaV3's reading of the streams against ours."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from quantize.codebook import codebook_table
from quantize.cuda_encoder import ALTERNATING, encode_tiles_on_gpu
from quantize.encoder import encode_tiles
from quantize.trellis import SUPPORTED_BITS, decode_trellis, pack_states, unpack_states

from .outcome import Findings

RATES = [(bits, "mul1") for bits in SUPPORTED_BITS] + [(4, "mcg"), (4, "3inst")]
WORST_RATIO = 1.01  # of mean squared errors; fp16 costs gave -0.22 to +0.19 % in a simulation


def compare_tiles(device: torch.device, extension: ModuleType, count: int = 512) -> Findings:
    """Encode the same Gaussian tiles on both; decode the GPU's streams by both projects.

    Args:
        device: a CUDA device.
        extension: ExLlamaV3's compiled extension.
        count: tiles per rate.

    Returns:
        Passed where every stream is a ring whose values are the codebook's, both projects pack and decode it to the
        same bits, and the mean squared error is at most WORST_RATIO of the exact search's.
    """
    tiles = torch.randn(count, 256, generator=torch.Generator().manual_seed(1))
    figures: dict[str, Any] = {"tiles": count}
    passed = True
    for bits, codebook in RATES:
        row = _compare(tiles, bits, codebook, device, extension)
        passed &= all(row[key] for key in ("ring", "values", "packed", "decoded")) and row["error_ratio"] <= WORST_RATIO
        figures[f"{bits:g} bits {codebook}"] = row
    return passed, figures


def _compare(
    tiles: torch.Tensor, bits: float, codebook: str, device: torch.device, extension: ModuleType
) -> dict[str, Any]:
    exact, _ = encode_tiles(tiles, bits, codebook)
    on_device, states = encode_tiles_on_gpu(tiles.to(device), bits, codebook)
    values, found = on_device.cpu(), states.cpu().int() & 0xFFFF
    packed = pack_states(states, bits)
    trellis = packed.view(len(tiles), 1, -1)
    errors = [float((coded - tiles).square().mean(dtype=torch.float64)) for coded in (values, exact)]
    return {
        "error_ratio": errors[0] / errors[1],
        "same_tiles": float((values == exact).all(1).float().mean()),
        "ring": torch.equal(unpack_states(packed.cpu(), bits), found),
        "values": torch.equal(codebook_table(codebook)[found.long()], values),
        "packed": torch.equal(_their_packed(extension, states, bits).cpu(), trellis.cpu()),
        "decoded": torch.equal(
            _their_decoded(extension, trellis, bits, codebook).cpu(), decode_trellis(trellis.cpu(), bits, codebook)
        ),
    }


def _their_packed(extension: ModuleType, states: torch.Tensor, bits: float) -> torch.Tensor:
    """ExLlamaV3's packing of states (tiles, 256): (tiles, 1, words)."""
    grid = states.view(len(states), 1, 256)
    packed = torch.zeros(len(states), 1, round(16 * bits), dtype=torch.int16, device=states.device)
    if bits == int(bits):
        extension.pack_trellis(packed, grid, int(bits))
    else:
        extension.pack_trellis_frac(packed, grid, int(bits), ALTERNATING)
    return packed


def _their_decoded(extension: ModuleType, trellis: torch.Tensor, bits: float, codebook: str) -> torch.Tensor:
    """ExLlamaV3's decoding of a trellis (tiles, 1, words): float32 (16 * tiles, 16), exact in fp16."""
    weight = torch.empty(16 * len(trellis), 16, dtype=torch.float16, device=trellis.device)
    extension.reconstruct(weight, trellis.contiguous(), bits, codebook == "mcg", codebook == "mul1")
    return weight.float()

"""Trellis encoding on a GPU, by ExLlamaV3's kernels: the counterpart of `quantize.encoder`, and the same streams.

What the kernels do. One thread block searches one tile (`quantize_tiles`, and `quantize_tiles_frac` for half rates):
the same dynamic programming as the exact search on the CPU, run twice around the ring, but with costs in fp16. So a
stream is as valid, its states are the same ring, and its error differs from the exact one by some tenths of a percent
either way; it is not the same bytes.

Layout: tiles float32 (n, 256) in ring order in; values float32 (n, 256) and states int16 (n, 256) out, every state the
full 16-bit window, as unsigned bits. Scratch memory for a wave of tiles is the caller's to give:

- dense kernels (chosen by the extension for some GPUs): one byte of history per state and position, a bit at K = 1;
- all others: int16 history (wave, 256, 65536 >> K) and fp16 costs (wave, 2, 65536 >> K).

A wave is what the GPU can run at once, less where its scratch would take more than a share of the GPU's memory (16 MiB
per tile at 1 bit, 2 at 4, 0.13 at 8, without the dense kernels). The result does not depend on it.

fp16 costs end at 65,504 and are coarse long before: tiles with outliers far beyond the codebook's range would be coded
badly, or as anything. They are rare after rotation, and go to the exact search on the CPU.

ExLlamaV3 1.4.2 has neither half rates nor `quantize_tiles_scratch`; what the extension offers decides, not its version.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from quantize.codebook import codebook_table
from quantize.cuda_extension import load_extension
from quantize.cuda_plan import SCRATCH_SHARE, scratch_bytes
from quantize.encoder import encode_tiles
from quantize.errors import Exl3DflashError
from quantize.trellis import TILE_WEIGHTS, check_bits, position_bits

MAX_TILES = 1 << 15  # of one call: 80 MiB of tiles, values and states; kernels index them with 32 bits

MAX_OUTSIDE = 64.0  # squared distance of a tile from the codebook's range that fp16 costs can hold beside its error
ALTERNATING = 0xAAAA  # half rates: odd ring positions own one bit more
LEGACY_WAVE = 256  # tiles of a wave whose history ExLlamaV3 1.4.2 can still index with 32 bits

_import_lock = threading.Lock()


def encode_tiles_on_gpu(tiles: Tensor, bits: float, codebook: str) -> tuple[Tensor, Tensor]:
    """Find a near-optimal trellis stream for every tile, on the tiles' own CUDA device.

    Args:
        tiles: float32 (tiles, 256) in ring order and in the scale of the codebook.
        bits: one of `quantize.trellis.SUPPORTED_BITS`; half rates with mul1 only.
        codebook: one of `quantize.codebook.CODEBOOKS`.

    Returns:
        The decoded values, float32 (tiles, 256), and the states, int16 (tiles, 256) holding 16 unsigned bits; both on
        the device of `tiles`.

    Raises:
        Exl3DflashError: unsupported bits or codebook, values that are not finite, or an ExLlamaV3 without half rates.
    """
    check_bits(bits, codebook)
    assert tiles.shape[1:] == (TILE_WEIGHTS,)
    assert tiles.dtype == torch.float32
    extension = _extension(str(tiles.device))
    values = torch.empty_like(tiles, memory_format=torch.contiguous_format)
    states = torch.empty_like(values, dtype=torch.int16)
    outlying = _outlying(tiles, codebook)
    if outlying is not None:
        exact = encode_tiles(tiles[outlying].cpu(), bits, codebook)
        tiles = tiles.masked_fill(outlying[:, None], 0.0)
    scratch = make_scratch(extension, tiles.device, bits, codebook)
    for start in range(0, len(tiles), MAX_TILES):
        part = slice(start, start + MAX_TILES)
        _run_kernel(extension, (tiles[part].contiguous(), values[part], states[part], *scratch), bits, codebook)
    if outlying is not None:
        values[outlying] = exact[0].to(tiles.device)
        states[outlying] = exact[1].to(torch.int16).to(tiles.device)
    return values, states


def _run_kernel(extension: ModuleType, tensors: tuple[Tensor, ...], bits: float, codebook: str) -> None:
    """One call of ExLlamaV3's encoder; tensors: tiles, values, states, costs and history, all contiguous."""
    if bits == int(bits):
        extension.quantize_tiles(*tensors, int(bits), codebook == "mcg", codebook == "mul1")
    else:
        extension.quantize_tiles_frac(*tensors, int(bits), ALTERNATING)


def _outlying(tiles: Tensor, codebook: str) -> Tensor | None:
    """Which tiles fp16 costs cannot hold, bool (tiles,), also where weights are not finite; None where all fit."""
    outside = (tiles.abs() - _reach(codebook)).clamp_min_(0.0).square_().sum(1)
    outlying = ~(outside <= MAX_OUTSIDE)
    return outlying if bool(outlying.any()) else None


@lru_cache
def _reach(codebook: str) -> float:
    return float(codebook_table(codebook).abs().max())


def make_scratch(extension: ModuleType, device: torch.device, bits: float, codebook: str) -> tuple[Tensor, Tensor]:
    """Costs and history for a wave of tiles, as this extension's kernel wants them (see the module's docstring)."""
    narrow = position_bits(bits)[0]
    nodes = 65536 >> narrow
    dense, resident = _kernel_of(extension, device, bits, codebook)
    wave = min(resident, max(1, _memory(device) // SCRATCH_SHARE // scratch_bytes(bits, 1, dense)))
    if dense:
        columns = nodes // 8 if narrow == 1 else nodes
        costs = torch.empty(1, dtype=torch.float16, device=device)
        return costs, torch.empty(wave, TILE_WEIGHTS, columns, dtype=torch.uint8, device=device)
    costs = torch.empty(wave, 2, nodes, dtype=torch.float16, device=device)
    return costs, torch.empty(wave, TILE_WEIGHTS, nodes, dtype=torch.int16, device=device)


def _kernel_of(extension: ModuleType, device: torch.device, bits: float, codebook: str) -> tuple[bool, int]:
    """Whether the dense kernel runs, and how many tiles the GPU works on at once."""
    offered = dir(extension)
    if bits != int(bits):
        if "quantize_tiles_frac" not in offered:
            raise Exl3DflashError(
                f"this exllamav3 cannot encode {bits} bits per weight on a GPU",
                expected="a version with half rates",
                fix="pip install --upgrade exllamav3 (1.6.5 has them), or use a whole number of bits",
            )
        return False, wave_tiles(device)
    if "quantize_tiles_scratch" not in offered:
        return False, min(wave_tiles(device), LEGACY_WAVE)
    mcg, mul1 = codebook == "mcg", codebook == "mul1"
    return extension.quantize_tiles_scratch(device.index or 0, int(bits), mcg, mul1, TILE_WEIGHTS)


def wave_tiles(device: torch.device) -> int:
    """Tiles that a GPU codes at once: two on a multiprocessor (some kernels: up to eight)."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def _memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


@lru_cache
def _extension(device: str) -> ModuleType:
    """The extension; several threads may ask at once for what is imported (and compiled) only once."""
    with _import_lock:
        return load_extension(device)

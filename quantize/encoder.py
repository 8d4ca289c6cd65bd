"""Trellis encoding: for each tile of 256 weights, the bit stream whose decoded values are nearest in squared error.

Two searches, both in C++ on CPU tensors, compared by `benchmarks/encode.py`:

- `exact`: a float32 Viterbi search; `quantize/native/viterbi.h` defines it to the bit. Costs are float32 sums over 256
  positions: a tile with outliers far beyond the codebook's range (about 4) still gets a valid stream, with the
  resolution that float32 leaves.
- `fast`: the same dynamic programming in 16-bit integers, from 4 bits on over the nearest candidates of each node only
  (`quantize/native/fast.h`). Its mean squared error is within 0.02 % of the exact one's on Gaussian tiles. It is tuned
  for the mul1 codebook; tiles with outliers, and other codebooks, are given to the exact search.

Tiles are independent, so they are spread over threads, and the result of either search depends neither on their number
nor on the instruction set.

Left out: the CUDA encoder of ExLlamaV3.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from quantize.codebook import codebook_table
from quantize.errors import Exl3DflashError
from quantize.trellis import TILE_WEIGHTS, check_bits, position_bits

ENCODERS = ("fast", "exact")
_FAST_CODEBOOKS = ("mul1",)
_LARGEST_WEIGHT = 1e9  # squared and summed over a tile this is far from overflow, which would lose the ring's start


def encode_tiles(
    tiles: Tensor,
    bits: float,
    codebook: str,
    threads: int = 0,
    *,
    encoder: str = "exact",
    path: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Find the nearest trellis stream for every tile.

    Args:
        tiles: float32 (tiles, 256) on the CPU in ring order (`quantize.trellis.weight_to_tiles`), in the scale of the
            codebook (standard deviation about 1), finite.
        bits: one of `quantize.trellis.SUPPORTED_BITS`; half rates with mul1 only.
        codebook: one of `quantize.codebook.CODEBOOKS`.
        threads: worker threads; 0 means `default_threads()`. The result is the same for any number.
        encoder: one of `ENCODERS`.
        path: one of `encoder_paths()` to force an instruction set; None takes the fastest. The result is the same.

    Returns:
        The decoded values, float32 (tiles, 256), and the states, int32 (tiles, 256) in 0..65535, a ring per tile.

    Raises:
        Exl3DflashError: unsupported bits, codebook or encoder, or tiles of another shape, dtype or device, or values
            that are not finite.
    """
    check_bits(bits, codebook)
    check_encoder(encoder)
    _check_tiles(tiles)
    if threads < 0:
        raise Exl3DflashError(f"threads {threads}", expected="a positive number, or 0 for one per core")
    if path is not None and path not in encoder_paths():
        raise Exl3DflashError(f"encoder path {path!r}", expected="one of " + ", ".join(encoder_paths()))
    table = codebook_table(codebook)
    states = torch.empty(tiles.shape, dtype=torch.int32)
    even, odd = position_bits(bits)
    _native().encode(
        tiles.detach().contiguous().numpy(),
        table.numpy(),
        states.numpy(),
        even,
        odd,
        threads or default_threads(),
        path or "",
        used_encoder(encoder, codebook) == "fast",
    )
    return table.index_select(0, states.view(-1)).view(tiles.shape), states


def check_encoder(name: str) -> None:
    """Raise `Exl3DflashError` unless `name` is one of `ENCODERS`."""
    if name not in ENCODERS:
        raise Exl3DflashError(f"unknown encoder {name!r}", expected="one of " + ", ".join(ENCODERS))


def used_encoder(encoder: str, codebook: str) -> str:
    """The search that `encode_tiles` makes: `exact` for codebooks that the fast one is not tuned for."""
    return encoder if codebook in _FAST_CODEBOOKS else "exact"


def encoder_paths() -> tuple[str, ...]:
    """Instruction sets that this machine can encode with, fastest first; "portable" is always among them."""
    return tuple(_native().paths())


@cache
def clock_hertz() -> float:
    """The measured clock of a core, to compare times with what the machine can do; 0.0 where it cannot be measured."""
    return float(_native().clock())


@cache
def default_threads() -> int:
    """Physical cores that this process may run on: sibling threads share the vector units, which the search fills."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)
    cores = {_core_of(cpu) for cpu in allowed}
    return max(1, len(cores))


def _core_of(cpu: int) -> str:
    siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return siblings.read_text().strip()
    except OSError:
        return str(cpu)


def _check_tiles(tiles: Tensor) -> None:
    if tiles.ndim != 2 or tiles.shape[1] != TILE_WEIGHTS:
        raise Exl3DflashError(f"tiles of shape {tuple(tiles.shape)}", expected=f"(tiles, {TILE_WEIGHTS})")
    if tiles.dtype != torch.float32 or tiles.device.type != "cpu":
        raise Exl3DflashError(f"tiles of dtype {tiles.dtype} on {tiles.device}", expected="float32 on the CPU")
    if not len(tiles):
        return
    largest = tiles.abs().max().item()
    if not largest <= _LARGEST_WEIGHT:  # also false for NaN
        raise Exl3DflashError(
            f"tiles with the largest magnitude {largest}",
            expected=f"finite weights of at most {_LARGEST_WEIGHT:g}, near the codebook's scale",
            fix="check the weight and its Hessian for NaN, infinity and overflow",
        )


def _native() -> ModuleType:
    try:
        return import_module("quantize._native")
    except ImportError as error:
        raise Exl3DflashError(
            f"the compiled encoder quantize._native cannot be imported ({error})",
            expected="it was built when the package was installed",
            fix="reinstall with `pip install .` and a C++17 compiler",
        ) from error

"""The EXL3 bit stream: packing trellis states, unpacking them, and decoding a whole layer.

A tile of 16 x 16 weights is a ring of 256 positions. Each position owns K bits of a circular stream of 256 K bits,
and its 16-bit state is the window of the stream that ends with its own bits, so neighbouring states share 16 - K bits
and the first positions read around the end of the ring (tail-biting). A state is looked up in a codebook; see
`quantize.codebook`. Rates 1.5, 2.5 and 3.5 alternate: even positions own floor(K) bits, odd ones a bit more (mul1
only, as in ExLlamaV3).

Memory layout: the stream is stored most significant bit first in little-endian 32-bit words, kept as int16, so the
16-bit piece `j` of the stream is element `j ^ 1` of the tile's row. Within a tile, position 8t + q is row 2 (t % 4) +
(q & 1) + 8 ((q >> 1) & 1) and column t // 4 + 8 (q >> 2), the order in which a tensor core wants its weights. Written
in bits this transposes short axes, so tiles and matrices convert by reshape and permute.

Left out: rings of other lengths (ExLlamaV3 has 160 for n-gram tables). All of it is plain torch and runs on any
device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantize.codebook import check_codebook, codebook_table
from quantize.errors import Exl3DflashError

SUPPORTED_BITS = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)
TILE = 16
TILE_WEIGHTS = TILE * TILE
_CHUNK_TILES = 16384  # bounds the temporaries: 16 MiB for each int32 tensor of states

# Axes of a ring position, slowest first: t // 4 (8), t % 4 (4), then the three bits of q.
_RING_AXES = (8, 4, 2, 2, 2)


def check_bits(bits: float, codebook: str | None = None) -> None:
    """Raise `Exl3DflashError` unless the rate exists, and exists for this codebook where one is given."""
    if isinstance(bits, bool) or bits not in SUPPORTED_BITS:
        raise Exl3DflashError(f"unsupported bits per weight {bits!r}", expected=f"one of {_names(SUPPORTED_BITS)}")
    if codebook is None:
        return
    check_codebook(codebook)
    if bits != int(bits) and codebook != "mul1":
        raise Exl3DflashError(
            f"{bits} bits per weight with codebook {codebook}",
            expected="half rates with mul1 only",
            fix="use codebook mul1 or a whole number of bits",
        )


def position_bits(bits: float) -> tuple[int, int]:
    """Bits owned by even and by odd ring positions: (4, 4) at 4 bits, (2, 3) at 2.5."""
    check_bits(bits)
    low = int(bits)
    return low, low + (bits != low)


def trellis_words(bits: float) -> int:
    """int16 words that store one tile: 16 * bits."""
    return sum(position_bits(bits)) * TILE // 2


def tile_permutation() -> tuple[Tensor, Tensor]:
    """Row (in) and column (out) within the tile of each ring position, both int64 (256,)."""
    flat = weight_to_tiles(torch.arange(TILE_WEIGHTS).view(TILE, TILE)).flatten()
    return flat // TILE, flat % TILE


def weight_to_tiles(weight: Tensor) -> Tensor:
    """Cut a matrix (in, out), both multiples of 16, into tiles in ring order: contiguous (in/16, out/16, 256)."""
    rows, columns = weight.shape
    if rows % TILE or columns % TILE:
        raise Exl3DflashError(f"weight of shape ({rows}, {columns})", expected=f"multiples of {TILE} on both sides")
    axes = weight.reshape(rows // TILE, 2, 4, 2, columns // TILE, 2, 8)
    return axes.permute(0, 4, 6, 2, 5, 1, 3).reshape(rows // TILE, columns // TILE, TILE_WEIGHTS)


def tiles_to_weight(tiles: Tensor) -> Tensor:
    """Inverse of `weight_to_tiles`: (in/16, out/16, 256) in ring order to (in, out)."""
    tile_rows, tile_columns, _ = tiles.shape
    axes = tiles.reshape(tile_rows, tile_columns, *_RING_AXES)
    return axes.permute(0, 5, 3, 6, 1, 4, 2).reshape(tile_rows * TILE, tile_columns * TILE)


def pack_states(states: Tensor, bits: float) -> Tensor:
    """Store each position's own bits, the low ones of its state.

    Args:
        states: integer (tiles, 256); a ring, or else `unpack_states` gives the ring that these bits describe.
        bits: one of `SUPPORTED_BITS`.

    Returns:
        int16 (tiles, 16 * bits), on the device of `states`.
    """
    even, odd = position_bits(bits)
    if states.ndim != 2 or states.shape[1] != TILE_WEIGHTS:
        raise Exl3DflashError(f"states of shape {tuple(states.shape)}", expected=f"(tiles, {TILE_WEIGHTS})")
    packed = torch.empty(len(states), trellis_words(bits), dtype=torch.int16, device=states.device)
    for start in range(0, len(states), _CHUNK_TILES):
        chunk = states[start : start + _CHUNK_TILES].to(torch.int32).view(-1, TILE_WEIGHTS // 2, 2)
        pair = ((chunk[..., 0] & ((1 << even) - 1)) << odd) | (chunk[..., 1] & ((1 << odd) - 1))
        packed[start : start + _CHUNK_TILES] = _pack_fields(pair, even + odd)
    return packed


def unpack_states(packed: Tensor, bits: float) -> Tensor:
    """The 16-bit state of every ring position.

    Args:
        packed: int16 (tiles, 16 * bits).
        bits: one of `SUPPORTED_BITS`.

    Returns:
        int32 (tiles, 256) in 0..65535, on the device of `packed`.
    """
    words = trellis_words(bits)
    if packed.ndim != 2 or packed.shape[1] != words or packed.dtype != torch.int16:
        raise Exl3DflashError(
            f"packed trellis of shape {tuple(packed.shape)} and dtype {packed.dtype}",
            expected=f"int16 (tiles, {words}) at {bits} bits",
        )
    first = (_window_ends(bits).to(packed.device) - 16) % (words * 16)  # bit at which each window starts
    piece, offset = first // 16, (first % 16).to(torch.int32)
    states = torch.empty(len(packed), TILE_WEIGHTS, dtype=torch.int32, device=packed.device)
    for start in range(0, len(packed), _CHUNK_TILES):
        pieces = packed[start : start + _CHUNK_TILES].to(torch.int32) & 0xFFFF
        high, low = pieces[:, piece ^ 1], pieces[:, ((piece + 1) % words) ^ 1]
        states[start : start + _CHUNK_TILES] = ((high << offset) | (low >> (16 - offset))) & 0xFFFF
    return states


def decode_trellis(trellis: Tensor, bits: float, codebook: str) -> Tensor:
    """The quantized weight in the rotated basis, before the Hadamard transforms and the scales.

    Args:
        trellis: int16 (in/16, out/16, 16 * bits), as stored.
        bits: one of `SUPPORTED_BITS`; half rates with mul1 only.
        codebook: one of `CODEBOOKS`.

    Returns:
        float32 (in, out) on the device of `trellis`.
    """
    check_bits(bits, codebook)
    if trellis.ndim != 3:
        raise Exl3DflashError(f"trellis of shape {tuple(trellis.shape)}", expected="three axes: (in/16, out/16, words)")
    table = codebook_table(codebook).to(trellis.device)
    states = unpack_states(trellis.reshape(-1, trellis.shape[-1]), bits)
    values = table.index_select(0, states.view(-1))
    return tiles_to_weight(values.view(*trellis.shape[:2], TILE_WEIGHTS))


def _window_ends(bits: float) -> Tensor:
    """Bit of the stream just after each position's own bits, int64 (256,)."""
    even, odd = position_bits(bits)
    own = torch.tensor([even, odd], dtype=torch.int64).repeat(TILE_WEIGHTS // 2)
    return own.cumsum(0)


def _pack_fields(fields: Tensor, width: int) -> Tensor:
    """Concatenate int32 (tiles, n) fields of `width` bits, most significant first, to int16 (tiles, n * width / 16)."""
    shifts = torch.arange(width - 1, -1, -1, device=fields.device, dtype=torch.int32)
    stream = ((fields[..., None] >> shifts) & 1).view(len(fields), -1, 16)
    weights = 1 << torch.arange(15, -1, -1, device=fields.device, dtype=torch.int32)
    pieces = (stream * weights).sum(-1, dtype=torch.int32)
    signed = pieces - ((pieces & 0x8000) << 1)
    return signed.view(len(fields), -1, 2).flip(-1).reshape(len(fields), -1).to(torch.int16)


def _names(values: tuple[float, ...]) -> str:
    return ", ".join(str(value) for value in values)

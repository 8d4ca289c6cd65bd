"""A second, slow decoder of EXL3 tensors, written from the format's description alone.

It shares no code with `quantize` (it does not import it) and takes another road: bit strings instead of packed words,
float64 NumPy instead of torch, a table of tile positions instead of a permutation of axes. Where it, the project's
decoder and ExLlamaV3's own Python agree, all three read the format the same way.

Format: a linear layer of `in x out` weights (both multiples of 128) is stored as

- `trellis` int16 (in/16, out/16, 16*K): tiles of 16 x 16 weights in 256 positions on a ring, K bits per weight;
- `suh` (in,) and `svh` (out,): scales with signs;
- a marker `mul1` or `mcg`, or neither, that names the codebook.

Decoded: diag(suh) . H . What . H . diag(svh), with H Sylvester Hadamard matrices of size 128 along the diagonal, over
sqrt(128).
"""

from __future__ import annotations

import numpy as np

BLOCK = 128
TILE = 16
POSITIONS = 256
STATE_BITS = 16


def position_bits(bits: float) -> list[int]:
    """Bits stored at each of the 256 ring positions: K, or K - 1/2 at even and K + 1/2 at odd positions."""
    whole = int(bits)
    return [whole + (position % 2 if bits != whole else 0) for position in range(POSITIONS)]


def tile_row_column(position: int) -> tuple[int, int]:
    """Row (input) and column (output) inside its tile of ring position `position`."""
    thread, item = divmod(position, 8)
    return 2 * (thread % 4) + (item & 1) + 8 * ((item >> 1) & 1), thread // 4 + 8 * (item >> 2)


def ring_bits(tile: np.ndarray) -> np.ndarray:
    """One tile's int16 words as its ring of bits, uint8: 32-bit little-endian words, most significant bit first."""
    words = tile.astype("<i2").tobytes()
    bits = np.unpackbits(np.frombuffer(words, dtype=np.uint8).reshape(-1, 4)[:, ::-1], axis=1)
    return bits.reshape(-1)


def ring_states(tile: np.ndarray, bits: float) -> np.ndarray:
    """The 256 states of a tile: the 16 ring bits that end where the position's own bits end, int64."""
    ring = ring_bits(tile)
    ends = np.cumsum(position_bits(bits))
    offsets = (ends[:, None] - STATE_BITS + np.arange(STATE_BITS)[None, :]) % ring.size
    return ring[offsets].astype(np.int64) @ (1 << np.arange(STATE_BITS - 1, -1, -1))


def pack_states(states: np.ndarray, bits: float) -> np.ndarray:
    """The inverse of `ring_states`: uint16 (tiles, 256) to int16 (tiles, 16*K). A position keeps its own low bits."""
    every = (states[:, :, None] >> np.arange(STATE_BITS - 1, -1, -1)) & 1
    kept = [every[:, position, STATE_BITS - own :] for position, own in enumerate(position_bits(bits))]
    octets = np.packbits(np.concatenate(kept, axis=1).astype(np.uint8), axis=1)
    return np.ascontiguousarray(octets.reshape(len(states), -1, 4)[:, :, ::-1]).view("<i2").reshape(len(states), -1)


def codebook_value(states: np.ndarray, codebook: str) -> np.ndarray:
    """The weight that each 16-bit state stands for, float32."""
    if codebook == "mul1":
        product = states.astype(np.uint64) * 0x83DCD12D % 2**32
        total = np.sum([(product >> shift) & 0xFF for shift in (0, 8, 16, 24)], axis=0).astype(np.float64)
        scale, offset = np.array([0x1EEE, 0xC931], dtype=np.uint16).view(np.float16).astype(np.float64)
        return ((1024.0 + total) * scale + offset).astype(np.float16).astype(np.float32)
    if codebook == "mcg":
        product = states.astype(np.uint64) * 0xCBAC1FED % 2**32
    else:
        product = (states.astype(np.uint64) * 89226354 + 64248484) % 2**32
    halves = ((product & 0x8FFF8FFF) ^ 0x3B603B60).astype("<u4").view("<u2").view("<f2").reshape(*states.shape, 2)
    return (halves[..., 0] + halves[..., 1]).astype(np.float32)


def decode_rotated(trellis: np.ndarray, bits: float, codebook: str) -> np.ndarray:
    """The weight in the rotated basis, float32 (in, out), from `trellis` int16 (in/16, out/16, 16*K)."""
    rows, columns = np.array([tile_row_column(position) for position in range(POSITIONS)]).T
    weight = np.empty((trellis.shape[0], TILE, trellis.shape[1], TILE), dtype=np.float32)
    for tile_row in range(trellis.shape[0]):
        for tile_column in range(trellis.shape[1]):
            states = ring_states(trellis[tile_row, tile_column], bits)
            weight[tile_row, rows, tile_column, columns] = codebook_value(states, codebook)
    return weight.reshape(trellis.shape[0] * TILE, trellis.shape[1] * TILE)


def hadamard_matrix() -> np.ndarray:
    """The orthogonal Sylvester Hadamard matrix of size 128, float64: sign (-1)^popcount(row & column)."""
    index = np.arange(BLOCK)
    ones = np.array([[bin(row & column).count("1") for column in index] for row in index])
    return (1.0 - 2.0 * (ones % 2)) / np.sqrt(BLOCK)


def decode(trellis: np.ndarray, suh: np.ndarray, svh: np.ndarray, bits: float, codebook: str) -> np.ndarray:
    """The stored weight, float64 (in, out)."""
    hadamard = hadamard_matrix()
    rotated = decode_rotated(trellis, bits, codebook).astype(np.float64)
    rows, columns = rotated.shape
    left = (hadamard @ rotated.reshape(-1, BLOCK, columns)).reshape(rows, columns)
    both = (left.reshape(rows, -1, BLOCK) @ hadamard).reshape(rows, columns)
    return suh.astype(np.float64)[:, None] * both * svh.astype(np.float64)[None, :]

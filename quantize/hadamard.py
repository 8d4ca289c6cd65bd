"""Hadamard rotation in blocks of 128, the change of basis in which EXL3 codes weights.

What and why: a trellis codebook is made for Gaussian values. Rotating a weight matrix by a random-sign Hadamard matrix
on both sides mixes 128 neighbouring rows and columns, so that outliers are spread out and every tile looks Gaussian.
The matrix is Sylvester's, scaled by 1/sqrt(128): symmetric and orthogonal, hence its own inverse. Features are padded
with zeros to a multiple of 128.

Layout: rotations act on contiguous groups of 128 along one dimension. A 128-wide product is one matrix multiplication
per group; a butterfly would save arithmetic but not time at this size.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

HADAMARD_SIZE = 128


def padded_features(features: int) -> int:
    """The next multiple of 128 at or above `features`, the size EXL3 stores."""
    return -(-features // HADAMARD_SIZE) * HADAMARD_SIZE


@lru_cache(maxsize=8)
def hadamard_matrix(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """Sylvester's Hadamard matrix over sqrt(128): (128, 128). The tensor is shared: read only."""
    index = torch.arange(HADAMARD_SIZE)
    common_bits = index[:, None] & index[None, :]  # (128, 128); the sign is the parity of its set bits
    parity = torch.zeros_like(common_bits)
    for bit in range(HADAMARD_SIZE.bit_length() - 1):
        parity ^= (common_bits >> bit) & 1
    return ((1 - 2 * parity).to(torch.float64) / HADAMARD_SIZE**0.5).to(dtype=dtype, device=device)


def hadamard_128(x: Tensor, dim: int) -> Tensor:
    """Rotate `x` along `dim` in blocks of 128.

    Args:
        x: floating tensor whose size along `dim` is a multiple of 128.
        dim: the dimension to rotate.

    Returns:
        A new tensor of the same shape and dtype. Rotating twice gives `x` back.
    """
    assert x.shape[dim] % HADAMARD_SIZE == 0, f"dimension of {x.shape[dim]} is not a multiple of {HADAMARD_SIZE}"
    matrix = hadamard_matrix(x.device, x.dtype)
    if dim % x.ndim == x.ndim - 1:
        return (x.reshape(-1, HADAMARD_SIZE) @ matrix).reshape(x.shape)
    before, after = x.shape[:dim], x.shape[dim % x.ndim + 1 :]
    blocks = x.reshape(*before, -1, HADAMARD_SIZE, after.numel())  # (..., blocks, 128, rest)
    return (matrix @ blocks).reshape(x.shape)


def rotate_both_sides_(matrix: Tensor) -> Tensor:
    """Rotate both sides of a matrix (rows, columns) in place, one strip of 128 rows at a time."""
    for start in range(0, matrix.shape[0], HADAMARD_SIZE):
        strip = matrix[start : start + HADAMARD_SIZE]  # (128, features)
        strip.copy_(hadamard_128(hadamard_128(strip, 1), 0))
    return matrix

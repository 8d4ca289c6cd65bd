"""The block Hadamard rotation against a matrix built by Sylvester's doubling, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantize.hadamard import hadamard_128, hadamard_matrix, padded_features, rotate_both_sides_


def sylvester(size: int) -> Tensor:
    """Doubling [[S, S], [S, -S]] from [1], scaled to be orthogonal; float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def block_rotation(features: int) -> Tensor:
    return torch.block_diag(*[sylvester(128)] * (features // 128))


def test_matrix_is_sylvesters_and_its_own_inverse() -> None:
    matrix = hadamard_matrix("cpu", torch.float64)
    assert torch.allclose(matrix, sylvester(128), rtol=0, atol=1e-15)
    assert torch.allclose(matrix @ matrix, torch.eye(128, dtype=torch.float64), rtol=0, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(
    blocks=st.integers(1, 3), other=st.integers(1, 40), dim=st.sampled_from((0, 1, -1, -2)), seed=st.integers(0, 1000)
)
def test_rotation_along_each_dimension(blocks: int, other: int, dim: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    rows_rotated = dim in (0, -2)
    x = torch.randn((128 * blocks, other) if rows_rotated else (other, 128 * blocks), generator=random)
    rotation = block_rotation(128 * blocks)
    wanted = rotation @ x.double() if rows_rotated else x.double() @ rotation
    rotated = hadamard_128(x, dim)
    assert rotated.dtype == x.dtype
    assert torch.allclose(rotated.double(), wanted, rtol=0, atol=1e-5)
    assert torch.allclose(hadamard_128(rotated, dim), x, rtol=0, atol=1e-5)


def test_middle_dimension() -> None:
    x = torch.randn(3, 256, 5, generator=torch.Generator().manual_seed(0))
    wanted = torch.stack([block_rotation(256) @ part.double() for part in x])
    assert torch.allclose(hadamard_128(x, 1).double(), wanted, rtol=0, atol=1e-5)


def test_both_sides_in_place() -> None:
    x = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    wanted = block_rotation(256) @ x.double() @ block_rotation(384)
    given_memory = x.data_ptr()
    rotated = rotate_both_sides_(x)
    assert rotated.data_ptr() == given_memory
    assert torch.allclose(rotated.double(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("features", "padded"), [(1, 128), (128, 128), (129, 256), (576, 640), (2880, 2944)])
def test_padded_features(features: int, padded: int) -> None:
    assert padded_features(features) == padded

"""Weights and activations like those of real layers, and slow float64 references for what the quantizer computes."""

from __future__ import annotations

import torch
from torch import Tensor

from quantize.hessian import Hessian, HessianAccumulator


def uneven_weight(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Gaussian weights (rows, columns) of size 0.02 with uneven rows and columns."""
    random = torch.Generator().manual_seed(seed)
    weight = 0.02 * torch.randn(rows, columns, generator=random)
    weight *= torch.exp(0.5 * torch.randn(rows, 1, generator=random))
    return weight * torch.exp(0.4 * torch.randn(1, columns, generator=random))


def correlated_rows(count: int, features: int, seed: int = 0, layer: int = 0) -> Tensor:
    """Activations (count, features) whose directions differ in size by a factor of 30; `layer` fixes the directions."""
    directions = torch.randn(features, features, generator=torch.Generator().manual_seed(layer)) / features**0.5
    sizes = torch.logspace(0, -1.5, features)
    return (torch.randn(count, features, generator=torch.Generator().manual_seed(seed + 1)) * sizes) @ directions


def hessian_of(rows: Tensor) -> Hessian:
    accumulator = HessianAccumulator(rows.shape[-1])
    accumulator.add(rows)
    return accumulator.finish()


def output_error(weight: Tensor, decoded: Tensor, rows: Tensor) -> float:
    """|X (W - Wq)|^2 / |X W|^2 in float64."""
    exact, error = rows.double() @ weight.double(), rows.double() @ (weight.double() - decoded.double())
    return float(error.square().sum() / exact.square().sum())


def block_rotation(features: int) -> Tensor:
    """The float64 block Hadamard matrix (features, features), from the sign rule (-1)^popcount(i & j)."""
    block = (
        torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(128)] for i in range(128)]).double() / 128**0.5
    )
    return torch.block_diag(*[block] * (features // 128))


def block_ldl(metric: Tensor, block: int = 16) -> tuple[Tensor, Tensor]:
    """M = L D L^T by block elimination in float64: L unit lower (n, n), D (n / block, block, block)."""
    rest = metric.double().clone()
    size = len(rest)
    lower, diagonal = torch.eye(size, dtype=torch.float64), []
    for start in range(0, size, block):
        stop = start + block
        pivot = rest[start:stop, start:stop].clone()
        column = rest[stop:, start:stop] @ torch.linalg.inv(pivot)
        lower[stop:, start:stop] = column
        rest[stop:, stop:] -= column @ rest[start:stop, stop:]
        diagonal.append(pivot)
    return lower, torch.stack(diagonal)

"""The input-side Hessian of a linear layer: the weighted mean of x x^T over what the layer really received.

What and why: the output error of a quantized weight is `tr(E^T H E)` with `H = mean(x x^T)`, so H says which directions
of the input matter. It is summed in float32 while activations stream by; activations are never kept. A row with a NaN
or an infinity, or so large that its squared length overflows float32, would poison the sum: it is left out and counted.

Layout: `sum x x^T` is symmetric; only its upper triangle is kept, as strips of 1024 rows, strip s holding columns
`1024 s ...`: half the memory and half the arithmetic, and 12288 features need 0.33 GB instead of 0.6.

Left out: the regularization and factorization, which belong to LDLQ (`quantize.ldlq`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quantize.errors import Exl3DflashError

STRIP_ROWS = 1024
MAX_ROWS_AT_ONCE = 2048
MIN_MEAN_DIAGONAL = 1e-20


@dataclass(frozen=True, eq=False)
class Hessian:
    """Second moments of a linear layer's inputs.

    Attributes:
        matrix: float32 (features, features), the weighted mean of x x^T; zero where nothing was added.
        count: the sum of the row weights.
        rows: how many rows were added.
        dropped_rows: how many rows were left out because they were not finite.
    """

    matrix: Tensor
    count: float
    rows: int
    dropped_rows: int

    @property
    def features(self) -> int:
        """The number of input features."""
        return self.matrix.shape[0]

    def usable(self) -> str | None:
        """None when LDLQ can use this Hessian, else the reason why it cannot, in a few words for the report."""
        if self.rows == 0 or self.count <= 0:
            return "no rows" if self.dropped_rows == 0 else f"no rows ({self.dropped_rows} non-finite rows dropped)"
        smallest, largest = torch.aminmax(self.matrix)  # both NaN if anything is; no copy, unlike isfinite
        if not (math.isfinite(smallest) and math.isfinite(largest)):
            return "non-finite"
        if float(self.matrix.diagonal().mean(dtype=torch.float64)) < MIN_MEAN_DIAGONAL:
            return f"mean diagonal < {MIN_MEAN_DIAGONAL:g}"
        return None


class HessianAccumulator:
    """Sums x x^T over streamed rows in float32 (upper triangle only).

    Args:
        features: the width of a row.
        device: where the sums live; rows are moved there.
    """

    def __init__(self, features: int, device: torch.device | str = "cpu") -> None:
        self.features = features
        self.count = 0.0
        self.rows = 0
        self.dropped_rows = 0
        self._strips = [
            torch.zeros(min(STRIP_ROWS, features - start), features - start, device=device)
            for start in range(0, features, STRIP_ROWS)
        ]

    @property
    def strips(self) -> list[Tensor]:
        """The packed sums (see the module's docstring), to store and to give to `restored`."""
        return list(self._strips)

    @classmethod
    def restored(cls, strips: list[Tensor], count: float, rows: int, dropped_rows: int) -> HessianAccumulator:
        """The accumulator that had these strips and counts; the strips are not copied."""
        accumulator = cls(0)
        accumulator.features = strips[0].shape[1] if strips else 0
        accumulator.count, accumulator.rows, accumulator.dropped_rows = count, rows, dropped_rows
        accumulator._strips = list(strips)
        return accumulator

    def add(self, rows: Tensor, weight: float = 1.0) -> None:
        """Add rows (..., features), each counted `weight` times. Non-finite rows are dropped and counted.

        Raises:
            Exl3DflashError: the rows have another width, or the weight is negative or not finite.
        """
        if rows.shape[-1] != self.features:
            raise Exl3DflashError(f"activation rows have {rows.shape[-1]} features", f"{self.features}")
        if not 0.0 <= weight < float("inf"):
            raise Exl3DflashError(f"row weight {weight}", "a finite weight of at least 0")
        for part in rows.detach().reshape(-1, self.features).split(MAX_ROWS_AT_ONCE):
            self._add_matrix(part.to(self._strips[0]), weight)

    def _add_matrix(self, rows: Tensor, weight: float) -> None:
        finite = torch.isfinite(torch.linalg.vector_norm(rows, dim=1))  # (rows,)
        kept = int(finite.sum())
        self.dropped_rows += len(rows) - kept
        if kept == 0:
            return
        if kept < len(rows):
            rows = rows[finite]
        for index, strip in enumerate(self._strips):
            start = index * STRIP_ROWS
            strip.addmm_(rows[:, start : start + STRIP_ROWS].T, rows[:, start:], alpha=weight)
        self.rows += kept
        self.count += weight * kept

    def merge(self, other: HessianAccumulator) -> None:
        """Add everything that `other` has summed (another stream, process or device) to this accumulator.

        Raises:
            Exl3DflashError: the other accumulator has another number of features.
        """
        if other.features != self.features:
            raise Exl3DflashError(f"cannot merge a Hessian of {other.features} features", f"{self.features} features")
        for mine, theirs in zip(self._strips, other._strips, strict=True):
            mine.add_(theirs.to(mine.device))
        self.count += other.count
        self.rows += other.rows
        self.dropped_rows += other.dropped_rows

    def finish(self) -> Hessian:
        """The mean over everything added so far, as a full symmetric matrix. The accumulator stays usable."""
        matrix = torch.empty(self.features, self.features, device=self._strips[0].device)
        scale = 1.0 / self.count if self.count > 0 else 0.0
        for index, strip in enumerate(self._strips):
            start, stop = index * STRIP_ROWS, index * STRIP_ROWS + strip.shape[0]
            torch.mul(strip, scale, out=matrix[start:stop, start:])
            square = matrix[start:stop, start:stop]
            square.copy_(torch.triu(square) + torch.triu(square, 1).T)
            matrix[stop:, start:stop] = matrix[start:stop, stop:].T
        return Hessian(matrix, self.count, self.rows, self.dropped_rows)

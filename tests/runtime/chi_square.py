"""Pearson's chi-square test, small enough to need no statistics library."""

from __future__ import annotations

import math

import torch


def chi_square_p(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """P(a statistic at least this large) for counts (n,) drawn from probabilities (n,) that sum to 1.

    Categories that expect fewer than 5 are pooled; a count where the probability is 0 gives 0. The upper tail uses
    Wilson and Hilferty's cube-root normal approximation, good to about 1e-3.
    """
    if bool((counts[probabilities == 0] > 0).any()):
        return 0.0
    expected = probabilities.double() * counts.sum()
    small = expected < 5
    pooled_counts = torch.cat([counts[~small].double(), counts[small].sum().double().unsqueeze(0)])
    pooled = torch.cat([expected[~small], expected[small].sum().unsqueeze(0)])
    used = pooled > 0
    freedom = int(used.sum()) - 1
    if freedom < 1:
        return 1.0
    statistic = float(((pooled_counts - pooled)[used] ** 2 / pooled[used]).sum())
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2))

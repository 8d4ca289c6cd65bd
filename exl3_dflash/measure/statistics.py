"""Bootstrap intervals over rows for ratios of sums.

Every figure of fidelity is a ratio `sum(numerator) / sum(denominator)` over rows; retention too, whose two sides share
their anchors. Rows are independent, anchors inside one row are not, so rows are resampled (with replacement), and the
same resample serves every drafter of a paired comparison.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Interval = tuple[float, float]
RESAMPLES = 2000


def resample_weights(rows: int, seed: int = 0, resamples: int = RESAMPLES) -> NDArray[np.float64]:
    """How often each row is drawn in each bootstrap sample: `(resamples, rows)`, every line sums to `rows`."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(rows, np.full(rows, 1.0 / rows), size=resamples).astype(np.float64)


def ratio_interval(numerator: NDArray, denominator: NDArray, weights: NDArray, level: float = 0.95) -> Interval:
    """Percentile interval (95 % by default) of `sum(numerator) / sum(denominator)`; both `(rows,)`."""
    samples = _safe_ratio(weights @ numerator, weights @ denominator)
    return percentile_interval(samples, level)


def percentile_interval(samples: NDArray, level: float = 0.95) -> Interval:
    """The middle `level` of the samples (2.5 and 97.5 percentiles for 0.95), ignoring those that are not finite."""
    finite = samples[np.isfinite(samples)]
    if not len(finite):
        return float("nan"), float("nan")
    low, high = np.percentile(finite, [50 * (1 - level), 50 * (1 + level)])
    return float(low), float(high)


def _safe_ratio(numerator: NDArray, denominator: NDArray) -> NDArray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(numerator / denominator)

"""Bootstrap intervals against what theory says about them."""

import numpy as np
import pytest

from exl3_dflash.measure.statistics import ratio_interval, resample_weights


def test_every_resample_draws_as_many_rows_as_there_are() -> None:
    weights = resample_weights(17, seed=3, resamples=50)
    assert weights.shape == (50, 17)
    assert (weights.sum(axis=1) == 17).all()


def test_interval_of_a_mean_matches_the_normal_approximation() -> None:
    generator = np.random.default_rng(0)
    values = generator.normal(3.0, 1.0, size=400)
    low, high = ratio_interval(values, np.ones(400), resample_weights(400, seed=1, resamples=4000))
    half_width = 1.96 * values.std() / np.sqrt(400)
    assert low == pytest.approx(values.mean() - half_width, abs=0.02)
    assert high == pytest.approx(values.mean() + half_width, abs=0.02)


def test_paired_ratio_is_tighter_than_its_parts() -> None:
    """Rows differ much, the drafters little: pairing must remove the rows' spread."""
    generator = np.random.default_rng(0)
    reference = generator.uniform(100, 900, size=60)
    other = 0.98 * reference + generator.normal(0, 1, size=60)
    weights = resample_weights(60)
    low, high = ratio_interval(other, reference, weights)
    assert low < 0.98 < high
    assert high - low < 0.005
    alone_low, alone_high = ratio_interval(other, np.full(60, reference.mean()), weights)
    assert alone_high - alone_low > 0.1


def test_identical_drafters_retain_exactly_everything() -> None:
    values = np.arange(1.0, 30.0)
    assert ratio_interval(values, values, resample_weights(29)) == (1.0, 1.0)

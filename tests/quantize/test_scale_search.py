"""The global scale search against full evaluation of its grids, and the sample against its description."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from quantize.coder import TileCoder
from quantize.regularize import regularize
from quantize.scale_search import FEEDBACK_DRIFT, sample_tiles, search_scale
from quantize.trellis import weight_to_tiles
from tests.quantize.layer_samples import uneven_weight


@dataclass(frozen=True)
class GridCoder(TileCoder):
    """A cheap quantizer with a limited range: rounding to multiples of 1/8, cut off at `limit`. Counts tiles."""

    limit: float = 3.0
    coded: list[int] = field(default_factory=list)

    def values(self, tiles: Tensor) -> Tensor:
        self.coded.append(len(tiles))
        return (tiles * 8).round().div(8).clamp(-self.limit, self.limit)


def full_search(sample: Tensor, coder: GridCoder) -> float:
    """Ten coarse scales on a third of the sample, five fine ones on all of it, and a parabola."""

    def error(scale: float, tiles: Tensor) -> float:
        return float((coder.values(tiles * scale) / scale - tiles).double().square().mean())

    coarse = min((0.1 + 0.2 * step for step in range(10)), key=lambda scale: error(scale, sample[::3]))
    scales = [coarse + 0.075 * step for step in range(-2, 3)]
    errors = [error(scale, sample) for scale in scales]
    best = errors.index(min(errors))
    assert 0 < best < 4
    before, here, after = errors[best - 1 : best + 2]
    return scales[best] + 0.075 * 0.5 * (before - after) / (before - 2 * here + after)


@pytest.mark.parametrize("limit", [1.0, 2.0, 3.0, 4.0, 6.0])
def test_the_walk_ends_where_the_full_grids_do(limit: float) -> None:
    weight = regularize(uneven_weight(256, 384), True, 0).weight
    coder, reference = GridCoder(4, "mul1", limit=limit), GridCoder(4, "mul1", limit=limit)
    assert search_scale(weight, coder) == pytest.approx(full_search(sample_tiles(weight), reference), rel=1e-6)
    assert sum(coder.coded) <= sum(reference.coded)


def test_drift_of_low_rates_lowers_the_scale() -> None:
    weight = regularize(uneven_weight(256, 256), True, 0).weight
    wanted = full_search(sample_tiles(weight) * FEEDBACK_DRIFT[1], GridCoder(1, "mul1"))
    assert search_scale(weight, GridCoder(1, "mul1")) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(("codebook", "low", "high"), [("mul1", 0.57, 0.78), ("mcg", 0.8, 1.0), ("3inst", 0.8, 1.0)])
def test_known_optima(codebook: str, low: float, high: float) -> None:
    weight = regularize(uneven_weight(128, 128), True, 0).weight
    assert low < search_scale(weight, TileCoder(5, codebook)) < high


def test_scales_stay_positive_where_the_codebook_is_far_too_narrow() -> None:
    weight = regularize(uneven_weight(128, 128), True, 0).weight
    assert 0.0 < search_scale(weight, GridCoder(4, "mul1", limit=0.02)) < 0.2


def test_a_scale_and_its_neighbours_are_coded_in_one_call() -> None:
    coder = GridCoder(4, "mul1")
    weight = regularize(uneven_weight(256, 384), True, 0).weight
    search_scale(weight, coder)
    tiles = len(sample_tiles(weight))
    assert coder.coded[0] == 3 * -(-tiles // 3)
    assert len(coder.coded) < sum(coder.coded) / tiles


def test_zero_weight_needs_no_scale() -> None:
    assert search_scale(torch.zeros(128, 128), TileCoder(4, "mul1")) == 1.0


def test_sample_sees_every_row_column_and_extreme() -> None:
    weight = torch.arange(24 * 16, dtype=torch.float32).view(24, 1, 16, 1).expand(24, 16, 16, 16).reshape(384, 256)
    numbers = {int(number) for number in sample_tiles(weight)[:, 0]}
    assert {number // 16 for number in numbers} == set(range(24))
    assert {number % 16 for number in numbers} == set(range(16))
    assert {0, 1, 24 * 16 - 2, 24 * 16 - 1} <= numbers
    loud = torch.randn(384, 256, generator=torch.Generator().manual_seed(0))
    loud[32:48, 160:176] *= 10.0
    tile = weight_to_tiles(loud)[2, 10]
    assert (sample_tiles(loud) == tile).all(1).any()

"""The plan: its memory formula is what quantizing takes, and a 1.7 B drafter fits into a 12 GB card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quantize import coder
from quantize.cuda_plan import RESERVED, BatchLimits, LayerShape, join, scratch_bytes
from quantize.hessian import Hessian
from quantize.linear import QuantSettings, quantize_linear

from .layer_samples import correlated_rows, hessian_of, uneven_weight
from .memory_meter import MemoryMeter

GIB = 1 << 30


def rounding(tiles: torch.Tensor, *arguments: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of the tile search: what it returns, without its time."""
    return tiles.round(), tiles.new_zeros(tiles.shape, dtype=torch.int32)


def copied(hessian: Hessian) -> Hessian:
    """A Hessian that has to be copied to be used, as one that comes from another device."""
    return Hessian(hessian.matrix.double(), hessian.count, hessian.rows, hessian.dropped_rows)


@pytest.mark.parametrize(
    ("rows", "columns", "inputs", "outputs"),
    [
        (512, 512, True, True),
        (1024, 256, True, True),
        (256, 1024, True, True),
        (1024, 1024, True, False),
        (1024, 256, True, False),
        (256, 1024, False, True),
    ],
)
def test_memory_is_what_the_formula_says(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, inputs: bool, outputs: bool
) -> None:
    monkeypatch.setattr(coder, "encode_tiles", rounding)
    weight = uneven_weight(rows, columns)
    sides = [
        hessian_of(correlated_rows(64, size)) if known else None
        for size, known in zip(weight.shape, (inputs, outputs), strict=True)
    ]
    given = [None if hessian is None else copied(hessian) for hessian in sides]
    with MemoryMeter() as meter:
        quantize_linear(weight, given[0], QuantSettings(bits=4, threads=1), output_hessian=given[1])
    planned = LayerShape(rows, columns, 4, inputs, outputs).peak_bytes()
    print(f"{rows} x {columns} {inputs} {outputs}: measured {meter.peak / planned:.3f} of the plan", end=" ")
    assert 0.8 * planned < meter.peak < 1.08 * planned


def drafter_of_qwen36_27b() -> list[LayerShape]:
    """The linear layers of DFlash for Qwen3.6-27B, 1.7 B weights: 5 layers of 5120, MLP 17408, fc from 5 taps."""
    layers = [LayerShape(25600, 5120, 6, True, True)]
    for _ in range(5):
        sizes = [(5120, 4096), (5120, 1024), (5120, 1024), (4096, 5120), (5120, 17408), (5120, 17408), (17408, 5120)]
        layers += [LayerShape(*size, 6, True, True) for size in sizes]
    return layers


def test_a_1_7_b_drafter_fits_into_a_12_gb_card() -> None:
    layers = drafter_of_qwen36_27b()
    assert 1.6e9 < sum(layer.in_features * layer.out_features for layer in layers) < 1.8e9
    limits = BatchLimits(int(11.6 * GIB), 12 * GIB, wave=2 * 46)  # an RTX 4070
    assert all(limits.hold(layer) for layer in layers)
    batches = list(join(layers, lambda layer: layer, limits))
    assert [layer for batch in batches for layer in batch] == layers
    assert all(sum(layer.peak_bytes() for layer in batch) <= limits.room(6) for batch in batches)
    assert max(map(len, batches)) > 1
    smaller = BatchLimits(int(7.6 * GIB), 8 * GIB, wave=2 * 28)
    assert [limits.hold(layer) for layer in layers] != [smaller.hold(layer) for layer in layers]


def test_small_layers_are_joined_until_the_gpu_is_busy_or_full() -> None:
    layers = [LayerShape(2048, 2048, 4, True)] * 6 + [LayerShape(2048, 2048, 6, True)]  # 128 tiles per step each

    def sizes(room: int, wave: int) -> list[int]:
        limits = BatchLimits(room + RESERVED + scratch_bytes(4, wave), 1 << 40, wave)
        batches = list(join(layers, lambda layer: layer, limits))
        assert [layer for batch in batches for layer in batch] == layers
        return [len(batch) for batch in batches]

    assert sizes(140 * GIB, 256) == [4, 2, 1], "two rates do not go together"
    assert sizes(140 * GIB, 257) == [5, 1, 1]
    assert sizes(140 * GIB, 50) == [1] * 7
    assert sizes(2 * layers[0].peak_bytes(), 256) == [2, 2, 2, 1]
    assert sizes(0, 256) == [1] * 7


def test_batches_are_made_as_they_are_needed() -> None:
    seen = []

    def layers() -> Iterator[LayerShape]:
        for bits in (2, 4, 6):
            seen.append(bits)
            yield LayerShape(128, 128, bits)

    batches = join(layers(), lambda layer: layer, BatchLimits(4 * GIB, 4 * GIB, 256))
    assert next(batches)[0].bits == 2
    assert seen == [2, 4]


def test_steps_and_reserve() -> None:
    assert LayerShape(100, 200, 4).tiles == (8, 16)
    assert LayerShape(100, 200, 4).steps == 8
    assert LayerShape(100, 200, 4).tiles_per_step == 16
    assert LayerShape(100, 200, 4, True, True).steps == 23
    assert BatchLimits(10 * GIB, 16 * GIB, 4).room(4) == 10 * GIB - RESERVED - 4 * 258 * 4096 * 2
    assert BatchLimits(10 * GIB, 16 * GIB, 264).room(1) == 10 * GIB - RESERVED - 2 * GIB

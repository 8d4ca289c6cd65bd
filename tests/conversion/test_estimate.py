"""The time that is promised before encoding: against the model and the figures of docs/performance.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from exl3_dflash.conversion.estimate import estimate_seconds, product_speed, tensor_seconds
from exl3_dflash.conversion.plan import TensorPlan, make_plan
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.layout import LinearSpec
from tests.tiny_models import make_tiny_drafter


def planned(rows: int, columns: int) -> TensorPlan:
    linear = LinearSpec("layers.0.mlp.up_proj", rows, columns, False, "layers.0.gate_up")
    return TensorPlan(linear, 6, "", 0)


def job(**options: object) -> JobSettings:
    return JobSettings(source="demo", target="demo", out_dir=Path("out"), threads=1, **options)  # type: ignore[arg-type]


def test_a_wide_layer_takes_what_performance_md_says() -> None:
    """29.2 CPU seconds at 2048 x 6144, 0.139 ms a tile and 100 GFLOP/s; factorizations at 62."""
    assert tensor_seconds(planned(2048, 6144), job(), 0.139e-3, 100e9) == pytest.approx(29.2, rel=0.04)
    assert tensor_seconds(planned(10240, 2048), job(), 0.139e-3, 100e9) == pytest.approx(64.2, rel=0.04)
    one_sided = tensor_seconds(planned(2048, 6144), job(method="one-sided"), 0.139e-3, 100e9)
    plain = tensor_seconds(planned(2048, 6144), job(calibration="none"), 0.139e-3, 100e9)
    assert plain < one_sided < 29.2


def test_every_tensor_that_is_encoded_counts(tmp_path: Path) -> None:
    checkpoint = DrafterCheckpoint.open(make_tiny_drafter(tmp_path / "drafter"))
    plan = make_plan(checkpoint, job())
    halved = replace(plan, tensors=plan.quantized[: len(plan.quantized) // 2])
    assert estimate_seconds(halved, job()) > 0
    assert estimate_seconds(replace(plan, tensors=()), job()) == 0
    assert 1e6 < product_speed() < 1e14

"""The predicted retention of the embedded pair against the measured one, at a rate where a tenth is lost."""

from __future__ import annotations

from pathlib import Path

from exl3_dflash.conversion.job import quantize_drafter
from exl3_dflash.conversion.settings import JobSettings


def test_retention_is_predicted_before_anything_is_encoded(tmp_path: Path) -> None:
    settings = JobSettings(
        "demo",
        "demo",
        tmp_path / "out",
        bits=2.5,
        plan="mixed",
        cal_data="chat",
        cal_rows=8,
        cal_cols=192,
        eval_rows=12,
        device="cpu",
        dtype="float32",
        threads=1,
    )
    report = quantize_drafter(settings)
    assert report.accept_length is not None
    measured = report.accept_length["quantized"] / report.accept_length["unquantized"]
    assert 0.7 < measured < 0.96
    assert report.predicted_retention is not None
    assert abs(report.predicted_retention - measured) < 0.03
    assert report.mean_bits <= 2.5

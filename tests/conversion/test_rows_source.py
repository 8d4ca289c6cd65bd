"""`--cal-data auto`: the target's own answers where they were measured to pay and can be had."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exl3_dflash.conversion.job import quantize_drafter
from exl3_dflash.conversion.recipe import Recipe
from exl3_dflash.conversion.settings import JobSettings
from tests.conversion.small_job import job_in, make_pair


@pytest.mark.parametrize(
    ("options", "source"),
    [
        ({}, "default"),
        ({"bits": 3}, "default"),
        ({"bits": 2.75}, "chat"),
        ({"bits": 2}, "chat"),
        ({"bits": 4, "tune": True}, "chat"),
        ({"bits": 2, "cal_data": "default"}, "default"),
        ({"bits": 2, "cal_data": "rows.jsonl"}, "rows.jsonl"),
        ({"bits": 2, "calibration": "none"}, "default"),
        ({"recipe": Recipe({"*": 2.0}, target_bpw=2.0)}, "chat"),
        ({"recipe": Recipe({"*": 2.0})}, "default"),
    ],
)
def test_where_rows_come_from(options: dict[str, Any], source: str) -> None:
    settings = JobSettings(source="demo", target="demo", out_dir=Path("out"), **options)
    assert settings.rows_source(has_chat_template=True) == source
    assert settings.rows_source(has_chat_template=False) == source.replace("chat", "default")


def test_the_report_says_which_rows_were_taken(tmp_path: Path) -> None:
    settings = replace(make_pair(tmp_path), cal_data="auto", cal_cols=512)
    for bits, source in ((2, "chat"), (6, "default")):
        report = quantize_drafter(job_in(settings, tmp_path / str(bits), bits=bits))
        assert report.calibration.source == source

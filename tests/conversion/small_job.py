"""A quantization job on a tiny pair that runs in a second, and what to compare of its output."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from exl3_dflash.conversion.settings import JobSettings
from tests.tiny_models import make_tiny_drafter
from tests.tiny_targets import make_tiny_llama


def make_pair(folder: Path) -> JobSettings:
    """Writes target, drafter and text under `folder`; the settings of a job without a place for its output."""
    make_tiny_llama(folder / "target")
    make_tiny_drafter(folder / "drafter", num_hidden_layers=1, tap_shift=0)
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog, again and again.\n\n" * 60)
    return JobSettings(
        source=str(folder / "drafter"),
        target=str(folder / "target"),
        out_dir=folder / "out",
        cal_data=str(folder / "text.txt"),
        bits=6,
        cal_rows=4,
        cal_cols=64,
        eval_rows=2,
        device="cpu",
        dtype="float32",
        threads=1,
    )


def job_in(settings: JobSettings, folder: Path, **options: Any) -> JobSettings:
    """The same job with its output in `folder`."""
    return replace(settings, out_dir=folder / "out", **options)


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of an output by name; the report without its times and place."""
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    report = json.loads(files["quantize_report.json"])
    for part in (report, *report["tensors"]):
        part.pop("seconds")
    report.pop("out_dir")
    return files | {"quantize_report.json": json.dumps(report).encode()}

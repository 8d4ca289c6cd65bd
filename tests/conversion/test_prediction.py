"""What a plan is decided on, and its predicted retention against the measured one of the embedded pair."""

from __future__ import annotations

from pathlib import Path

import torch

from exl3_dflash.calibration.capture import calibrate
from exl3_dflash.calibration.rowset import RowSet, TokenRow
from exl3_dflash.conversion.deciding import PROBE_ROWS, Pair, decide
from exl3_dflash.conversion.job import quantize_drafter
from exl3_dflash.conversion.plan import make_plan
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.progress import Reporter
from exl3_dflash.target.load import load_target
from tests.conversion.small_job import make_pair


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


def test_rows_without_a_whole_block_decide_nothing(tmp_path: Path) -> None:
    """Answers may be shorter than a block; calibration uses them, and tensors are weighed on the others."""
    folders = make_pair(tmp_path)
    checkpoint = DrafterCheckpoint.open(Path(folders.source))
    target = load_target(Path(folders.target or ""), device="cpu", dtype=torch.float32)
    drafter = DrafterModel.from_checkpoint(checkpoint)
    random = torch.Generator().manual_seed(3)
    lengths = [drafter.config.block_size - 1] * PROBE_ROWS + [40]
    rows = tuple(TokenRow(torch.randint(0, 256, (length,), generator=random), 0, "test") for length in lengths)
    calibration = calibrate(drafter, checkpoint.linears, target, rows, accept_length=1.0)
    settings = JobSettings("drafter", "target", tmp_path / "out", bits=2.25, threads=1)
    plans = [
        decide(
            settings,
            checkpoint,
            make_plan(checkpoint, settings),
            Pair(target, drafter, RowSet(given, "test"), calibration),
            Reporter(quiet=True),
        )
        for given in (rows, rows[PROBE_ROWS:])
    ]
    assert plans[0] == plans[1]
    assert plans[0].decided

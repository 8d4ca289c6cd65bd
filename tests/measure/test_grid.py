"""The grid of variants on a tiny pair: every method runs as named, and methods are compared at equal bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exl3_dflash.calibration.rowset import RowSet, TokenRow
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.measure.grid import REFERENCE, Variant, run_grid
from exl3_dflash.progress import Reporter
from exl3_dflash.target.load import load_target
from tests.tiny_models import make_tiny_drafter
from tests.tiny_targets import make_tiny_llama


def text_rows(count: int, seed: int) -> tuple[TokenRow, ...]:
    random = torch.Generator().manual_seed(seed)
    return tuple(TokenRow(torch.randint(0, 256, (32,), generator=random), 0, "text") for _ in range(count))


def test_methods_on_one_pair(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path / "target")
    checkpoint = DrafterCheckpoint.open(make_tiny_drafter(tmp_path / "drafter", num_hidden_layers=1))
    target = load_target(tmp_path / "target", device="cpu", dtype="float32")
    settings = JobSettings(source="drafter", target="target", out_dir=tmp_path / "out", threads=1)
    variants = [Variant(6, "uncalibrated"), Variant(6, "one-sided"), Variant(6, "two-sided")]
    rows = RowSet(text_rows(2, 1), "rows", text_rows(3, 2))
    result = run_grid(checkpoint, target, rows, variants, settings, Reporter(quiet=True))
    names = [variant.name for variant in variants]
    assert [row.name for row in result.fidelity] == [REFERENCE, *names]
    assert [(c.base, c.better) for c in result.comparisons] == [(names[0], names[1]), (names[1], names[2])]
    accept_length = {row.name: row.accept_length for row in result.fidelity}
    for compared in result.comparisons:
        ratio = accept_length[compared.better] / accept_length[compared.base]
        assert compared.ratio == pytest.approx(ratio)
        assert compared.ci95[0] <= compared.ratio <= compared.ci95[1]
    means = [sum(result.output_errors[name].values()) for name in names]
    assert means[1] < means[0]
    assert set(result.seconds) == set(result.bpw) == set(names)


def test_unknown_methods_are_refused() -> None:
    with pytest.raises(Exl3DflashError, match="three-sided"):
        Variant(4, "three-sided")

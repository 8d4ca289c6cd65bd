"""The probe: the right tap shift is chosen on a pair that needs it, and a tie or a failure is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from exl3_dflash.calibration.rows import load_rows
from exl3_dflash.conversion.job import quantize_drafter
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.measure.candidates import Candidate, CandidateFigures, Gain
from exl3_dflash.measure.probe import _choose, embedding_scales, open_settings, probe_settings
from exl3_dflash.target.load import load_target
from tests.demo_pair import demo_directories, edited_drafter, with_identity_layer
from tests.tiny_models import make_tiny_drafter
from tests.tiny_targets import make_tiny_family, make_tiny_llama


class FixedProbe:
    """A probe whose figures are given: (accept length, acceptance of the first token) by candidate, and one gain."""

    def __init__(self, figures: dict[str, tuple[float, float]], interval: tuple[float, float]) -> None:
        self._figures = figures
        self._interval = interval

    def figures(self, candidate: Candidate) -> CandidateFigures:
        length, first = self._figures[candidate.name]
        return CandidateFigures(candidate.name, length, (length - 0.1, length + 0.1), [first, 0.5])

    def gain(self, candidate: Candidate, base: Candidate) -> Gain:
        value = self._figures[candidate.name][0] - self._figures[base.name][0]
        return Gain(value, self._interval, 0.0, (0.0, 0.0), 0.95)


@pytest.mark.parametrize(
    ("other", "interval", "outcome", "choice"),
    [
        ((3.0, 0.8), (0.7, 1.3), "changed", 1.0),
        ((1.2, 0.2), (-1.0, -0.6), "default", 0.0),
        ((2.1, 0.6), (-0.1, 0.3), "tie", 0.0),
        ((2.01, 0.6), (0.005, 0.02), "tie", 0.0),
    ],
)
def test_another_value_must_be_clearly_better(other, interval, outcome: str, choice: float) -> None:
    probe = FixedProbe({"0": (2.0, 0.5), "1": other}, interval)
    candidates = [Candidate("0", None), Candidate("1", None)]  # type: ignore[arg-type]
    found = _choose(probe, "tap_shift", candidates, [0.0, 1.0])  # type: ignore[arg-type]
    assert (found.outcome, found.choice) == (outcome, choice)
    if outcome == "tie":
        assert "cannot tell" in found.reason


def test_a_drafter_that_accepts_nothing_is_a_failed_probe(tmp_path: Path) -> None:
    target = load_target(make_tiny_llama(tmp_path / "target"), device="cpu", dtype="float32")
    checkpoint = DrafterCheckpoint.open(
        make_tiny_drafter(tmp_path / "drafter", dflash_config={"mask_token_id": 260, "target_layer_ids": [0, 1, 2]})
    )
    rows = load_rows("chat", target, rows=0, cols=1024, held_out=2, answer_tokens=40).held_out
    result = probe_settings(checkpoint, target, rows)
    assert {choice.setting: choice.outcome for choice in result.settings} == {
        "tap_shift": "failed",
        "embedding_scale": "failed",
    }
    assert [choice.choice for choice in result.settings] == [0.0, 1.0]


def test_only_what_the_checkpoint_leaves_open_is_probed(tmp_path: Path) -> None:
    target = SimpleNamespace(facts=SimpleNamespace(embedding_scale=1.0, hidden_size=32, num_layers=4))
    open_one = DrafterCheckpoint.open(make_tiny_drafter(tmp_path / "open"))
    pinned = DrafterCheckpoint.open(make_tiny_drafter(tmp_path / "pinned", tap_shift=0))
    own = DrafterCheckpoint.open(make_tiny_drafter(tmp_path / "own", optional=["embed_tokens.weight"]))
    assert open_settings(open_one, target) == ("tap_shift", "embedding_scale")  # type: ignore[arg-type]
    assert open_settings(pinned, target) == ("embedding_scale",)  # type: ignore[arg-type]
    assert open_settings(own, target) == ("tap_shift",)  # type: ignore[arg-type]


def test_scales_are_the_targets_own_one_and_the_root_of_the_width(tmp_path: Path) -> None:
    gemma = load_target(make_tiny_family(tmp_path / "gemma", "gemma"), device="cpu", dtype="float32")
    assert embedding_scales(gemma) == pytest.approx((32**0.5, 1.0), rel=1e-3)


def test_a_pair_that_needs_a_shift_of_one_gets_it_and_keeps_it_in_its_config(tmp_path: Path) -> None:
    """The drafter's ids are one too low for a target with a silent first layer; the output pins what was measured."""
    target, drafter = demo_directories()
    deeper = with_identity_layer(target, tmp_path / "target")
    edited = edited_drafter(drafter, tmp_path / "drafter", num_target_layers=None)
    settings = JobSettings(
        source=str(edited),
        target=str(deeper),
        out_dir=tmp_path / "out",
        bits=4,
        cal_data="chat",
        cal_rows=4,
        cal_cols=256,
        eval_rows=4,
        device="cpu",
        dtype="float32",
        threads=1,
    )
    report = quantize_drafter(settings)
    choice = report.probe["settings"][0]
    assert (choice["setting"], choice["outcome"], choice["choice"]) == ("tap_shift", "changed", 1.0)
    assert choice["margin_ci95"][0] > 0
    assert [figures["name"] for figures in choice["candidates"]] == ["0", "1"]
    assert choice["candidates"][1]["accept_length"] > choice["candidates"][0]["accept_length"] + 0.5
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert report.tap_shift == config["tap_shift"] == 1
    assert report.accept_length["unquantized"] > 2, "calibration and measurement must read the chosen taps"
    assert DrafterCheckpoint.open(tmp_path / "out").config.tap_shift == 1


def test_the_embedded_pair_keeps_the_default(tmp_path: Path) -> None:
    target_path, drafter_path = demo_directories()
    target = load_target(target_path, device="cpu", dtype="float32")
    checkpoint = DrafterCheckpoint.open(drafter_path)
    checkpoint.config = replace(checkpoint.config, tap_shift=None)
    rows = load_rows("chat", target, rows=0, cols=256, held_out=4, target_directory=target_path).held_out
    result = probe_settings(checkpoint, target, rows)
    assert [(choice.choice, choice.outcome) for choice in result.settings] == [(0.0, "default"), (1.0, "default")]
    assert torch.tensor([choice.margin for choice in result.settings]).lt(0).all()

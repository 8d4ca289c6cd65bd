"""`--tune`: gradients are right, trellises stay, nothing gets worse on rows that were not trained on, runs repeat."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from exl3_dflash.calibration.capture import Calibration
from exl3_dflash.calibration.rowset import TokenRow
from exl3_dflash.conversion import tuning_step
from exl3_dflash.conversion.job import quantize_drafter
from exl3_dflash.conversion.report import QuantizeReport
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.conversion.tunable import TunableDrafter
from exl3_dflash.conversion.tuning import TuningFacts, TuningResult, TuningSettings, deal_rows, tune
from exl3_dflash.conversion.tuning_loss import LossSums, TeacherRow, TuningLoss
from exl3_dflash.conversion.tuning_step import UNTUNED, Drafted, choose, tuned_drafter
from exl3_dflash.conversion.work_directory import WorkDirectory
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.layout import SELECTOR
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.drafter.modules import RMSNorm
from exl3_dflash.drafter.taps import tap_layer_indices
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.measure.tallies import RowTally, TallyTable
from exl3_dflash.progress import Reporter
from exl3_dflash.target.base import Target
from exl3_dflash.target.load import load_target
from quantize.linear import QuantizedLinear, QuantSettings, decode_linear, quantize_linear
from tests.conformance.tiny_drafter import random_layers
from tests.family_models import FAMILY, make_family_drafter
from tests.tiny_models import make_tiny_drafter
from tests.tiny_targets import make_tiny_llama

QUIET = Reporter(quiet=True)
FAST = TuningSettings(epochs=2, rows_per_step=2, anchors_per_row=6, divergence_weight=3.0, learning_rate=1e-2)
NOTHING = Calibration({}, 0, 0, 0, 0, 0)

Pair = tuple[DrafterCheckpoint, Target, dict[str, QuantizedLinear]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A tiny pair and the drafter's linears at 3 bits."""
    folder = tmp_path_factory.mktemp("pair")
    target = load_target(make_tiny_llama(folder / "target"), device="cpu", dtype="float32")
    checkpoint = DrafterCheckpoint.open(make_tiny_drafter(folder / "drafter", num_hidden_layers=1))
    settings = QuantSettings(bits=3, threads=1, encoder="fast")
    linears = {}
    for spec in checkpoint.linears:
        linears[spec.name] = quantize_linear(checkpoint.load(f"{spec.name}.weight").float().T, None, settings)
    return checkpoint, target, linears


def text_rows(count: int) -> list[TokenRow]:
    random = torch.Generator().manual_seed(3)
    return [TokenRow(torch.randint(0, 256, (24,), generator=random), 4, "text") for _ in range(count)]


def run(pair: Pair, rows: list[TokenRow], settings: TuningSettings = FAST) -> TuningResult:
    checkpoint, target, linears = pair
    return tune(checkpoint, linears, DrafterModel.from_checkpoint(checkpoint), target, rows, settings, QUIET)


def test_at_the_start_the_tunable_drafter_is_the_quantized_one(pair: Pair) -> None:
    checkpoint, _, linears = pair
    plain = DrafterModel.from_checkpoint(checkpoint, dtype=torch.float64)
    for name, linear in linears.items():
        plain.set_linear_weight(name, decode_linear(linear))
    tunable = TunableDrafter(checkpoint, linears, "cpu", torch.float64)
    tunable.apply()
    random = torch.Generator().manual_seed(1)
    taps = torch.randn(9, 96, generator=random, dtype=torch.float64)
    block = torch.randn(2, 4, 32, generator=random, dtype=torch.float64)
    anchors = torch.tensor([4, 9])
    ours, expected = (model.forward_anchors(taps, block, anchors) for model in (tunable.model, plain))
    assert torch.allclose(ours, expected, rtol=1e-6, atol=1e-6)


def test_gradients_of_scales_and_norms_are_those_of_finite_differences(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exl3_dflash.conversion.tuning_loss.GROUP_ROWS", 20)  # several backward passes
    checkpoint, target, linears = pair
    tunable = TunableDrafter(checkpoint, linears, "cpu", torch.float64)
    teacher = DrafterModel.from_checkpoint(checkpoint, dtype=torch.float64)
    row = text_rows(1)[0]
    output = target.tap_rows(row.ids, tap_layer_indices(checkpoint.config), want_logits=True)
    features = TeacherRow(row, output.taps.double(), output.logits.argmax(-1))
    loss = TuningLoss(tunable.model, teacher, _InDouble(target), 0.5)
    anchors = features.measured_anchors()

    tunable.apply()
    loss.backward(features, anchors, 1.0, LossSums())
    tunable.collect()
    random = torch.Generator().manual_seed(2)
    for name, factor in tunable.factors.items():
        direction = torch.randn(factor.shape, generator=random, dtype=torch.float64)
        sides = []
        for step in (1e-5, -1e-5):
            factor += step * direction
            tunable.apply()
            sides.append(loss.measure([features]).loss)
            factor -= step * direction
        slope = (sides[0] - sides[1]) / 2e-5
        assert factor.grad is not None
        assert float((factor.grad * direction).sum()) == pytest.approx(slope, rel=1e-4, abs=1e-7), name


class _InDouble:
    """A target whose table and head compute in float64."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.facts, self.device = target.facts, target.device
        self._head = target.head(torch.eye(target.facts.hidden_size)).double()  # (H, V)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._target.embed(ids).double()

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self._head


def test_the_tuned_state_is_better_on_rows_that_gave_no_gradients(pair: Pair) -> None:
    checkpoint, target, linears = pair
    rows = text_rows(16)
    result = run(pair, rows)
    facts = result.facts
    assert result.tensors is not None, facts.reason
    assert facts.loss_after < facts.loss_before
    assert facts.accept_length_after >= facts.accept_length_before
    assert (facts.rows, facts.stopping_rows) == (14, 2)
    # Measured once more, on what would be stored:
    tuned = tuned_drafter(
        checkpoint, DrafterModel.from_checkpoint(checkpoint), target, rows, linears, NOTHING, FAST, QUIET, threads=1
    )
    teacher = DrafterModel.from_checkpoint(checkpoint)
    loss = TuningLoss(
        tuned.model(checkpoint, torch.float32, torch.device("cpu")), teacher, target, FAST.divergence_weight
    )
    watched = []
    for row in deal_rows(rows, 4, FAST.seed)[1]:
        output = target.tap_rows(row.ids, tap_layer_indices(checkpoint.config), want_logits=True)
        watched.append(TeacherRow(row, output.taps, output.logits.argmax(-1)))
    assert loss.measure(watched).mean == pytest.approx(facts.loss_after, rel=1e-5)


def test_only_scales_and_norms_change_and_their_errors_are_reported(pair: Pair) -> None:
    checkpoint, target, linears = pair
    drafter = DrafterModel.from_checkpoint(checkpoint)
    tuned = tuned_drafter(checkpoint, drafter, target, text_rows(16), linears, NOTHING, FAST, QUIET, threads=1)
    assert set(tuned.linears) == set(linears)
    for name, before in linears.items():
        after = tuned.linears[name]
        assert torch.equal(after.trellis, before.trellis)
        assert not torch.equal(after.suh, before.suh)
        assert after.suh.dtype == after.svh.dtype == torch.float16
        assert (after.suh[before.in_features :] == 0).all()
        weight = checkpoint.load(f"{name}.weight").float().T
        error = float((decode_linear(after) - weight).square().sum() / weight.square().sum())
        assert after.weight_error == pytest.approx(error, rel=1e-3)
    assert {name: tensor.dtype for name, tensor in tuned.norms.items()} == {
        name: checkpoint.load(name).dtype for name in checkpoint.tensor_names() if "norm" in name
    }


def test_runs_repeat_bit_for_bit(pair: Pair) -> None:
    first, second = (run(pair, text_rows(12)) for _ in range(2))
    assert first.facts == second.facts
    assert first.tensors is not None
    assert second.tensors is not None
    for part in ("suh", "svh", "norms"):
        ours, theirs = getattr(first.tensors, part), getattr(second.tensors, part)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_pass_that_only_does_harm_leaves_the_drafter_as_it_was(pair: Pair) -> None:
    result = run(pair, text_rows(16), replace(FAST, learning_rate=5.0))
    assert result.tensors is None
    assert not result.facts.kept
    assert "stopping rows" in result.facts.reason
    assert result.facts.loss_after == result.facts.loss_before


def test_too_few_prompts_are_not_tuned_on(pair: Pair) -> None:
    row = text_rows(1)[0]
    result = run(pair, [row] * 12)  # twelve answers to one prompt
    assert result.tensors is None
    assert "fewer than" in result.facts.reason


def test_all_answers_to_a_prompt_are_on_one_side() -> None:
    rows = text_rows(20)
    answers = [TokenRow(torch.cat([row.ids[:4], row.ids.flip(0)]), 4, "text") for row in rows]
    train, watched = deal_rows([*rows, *answers], 4, 0)
    prompts = [{tuple(row.ids[:4].tolist()) for row in side} for side in (train, watched)]
    assert not prompts[0] & prompts[1]
    assert (len(train), len(watched)) == (36, 4)


def test_a_finished_step_is_not_run_again(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, target, linears = pair
    drafter = DrafterModel.from_checkpoint(checkpoint)
    arguments = (checkpoint, drafter, target, text_rows(12), linears, NOTHING, FAST, QUIET)
    with WorkDirectory(tmp_path / "work") as work:
        work.begin({})
        first = tuned_drafter(*arguments, work, threads=1)
        monkeypatch.setattr(tuning_step, "tune", lambda *_: pytest.fail("ran again"))
        second = tuned_drafter(*arguments, work, threads=1)
    assert first.tuning == second.tuning
    assert all(torch.equal(first.linears[name].suh, second.linears[name].suh) for name in linears)
    assert all(torch.equal(first.norms[name], second.norms[name]) for name in first.norms)


def tallies(emitted: list[float]) -> list[RowTally]:
    nothing = np.zeros(3)
    return [RowTally(10, value, nothing, nothing, nothing, nothing, nothing) for value in emitted]


@pytest.mark.parametrize(("accepted", "kept"), [([22.0, 24.0], True), ([19.0, 20.0], False)])
def test_what_accepts_less_on_the_reported_rows_is_dropped(accepted: list[float], kept: bool) -> None:
    rows = tuple(text_rows(2))
    columns = {"unquantized": tallies([30, 30]), "quantized": tallies(accepted), UNTUNED: tallies([20, 20])}
    tuned, untuned = Drafted({}, {"norm.weight": torch.ones(2)}, {"kept": True, "reason": ""}), Drafted({}, {})
    fidelity, chosen = choose(TallyTable(rows, columns, 0, 4), tuned, untuned, "quantized")
    assert [row.name for row in fidelity.drafters] == ["unquantized", "quantized"]
    assert fidelity.drafters[1].accept_length == max(sum(accepted), 40) / 20
    assert chosen.tuning is not None
    assert chosen.tuning["kept"] is kept
    assert chosen.norms == (tuned.norms if kept else {})
    assert json.loads(json.dumps(chosen.tuning))["held_out"]["accept_length_untuned"] == 2.0


def quantized_directory(pair: Pair, out: Path, **options: Any) -> QuantizeReport:
    """A whole job on the tiny pair."""
    checkpoint, _, _ = pair
    text = out.parent / "text.txt"
    letters = torch.randint(97, 123, (3000,), generator=torch.Generator().manual_seed(5))
    text.write_text("".join(map(chr, letters.tolist())))
    settings = JobSettings(
        source=str(checkpoint.directory.path),
        target=str(checkpoint.directory.path.parent / "target"),
        out_dir=out,
        bits=6,
        cal_data=str(text),
        cal_rows=24,
        cal_cols=48,
        eval_rows=3,
        device="cpu",
        dtype="float32",
        threads=1,
        **options,
    )
    return quantize_drafter(settings)


def slightly_tuned(
    checkpoint: DrafterCheckpoint, quantized: dict[str, QuantizedLinear], *arguments: object
) -> TuningResult:
    """In place of a pass that may end where it began on so small a pair: everything a little larger."""
    tunable = TunableDrafter(checkpoint, quantized, "cpu")
    for factor in tunable.factors.values():
        factor.fill_(0.01)
    facts = TuningFacts(True, "", 608, 21, 3, 2, 22, 2, 0.5, 0.4, 1.0, 1.0)
    return TuningResult(tunable.rounded(), facts)


def test_a_job_writes_tuned_scales_beside_the_same_trellises(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning_step, "tune", slightly_tuned)
    plain = quantized_directory(pair, tmp_path / "plain")
    report = quantized_directory(pair, tmp_path / "tuned", tune=True)
    assert plain.tuning is None
    assert report.tuning is not None
    assert report.tuning["kept"], report.tuning
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "tuned"))
    assert {name: (t.dtype, t.shape) for name, t in before.items()} == {n: (t.dtype, t.shape) for n, t in after.items()}
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed
    assert all(name.endswith((".suh", ".svh", "norm.weight")) for name in changed)
    assert report.fidelity is not None
    assert [row["name"] for row in report.fidelity["drafters"]] == ["unquantized", "quantized"]
    assert report.accept_length is not None
    assert plain.accept_length is not None
    assert report.accept_length["quantized"] >= plain.accept_length["quantized"]
    assert "scales and norm weights" in report.summary()


def test_tuning_needs_a_calibration(tmp_path: Path) -> None:
    with pytest.raises(Exl3DflashError, match="--tune with --calibration none"):
        JobSettings(source="demo", target=None, out_dir=tmp_path, calibration="none", tune=True)


@pytest.mark.parametrize("name", FAMILY)
def test_every_member_of_the_family_has_gradients(pair: Pair, name: str, tmp_path: Path) -> None:
    _, target, _ = pair
    checkpoint = DrafterCheckpoint.open(make_family_drafter(tmp_path / name, name))
    shapes = {s.name: (s.in_features, s.out_features) for s in checkpoint.linears if not s.bias}
    tunable = TunableDrafter(checkpoint, random_layers({}, shapes), "cpu")
    row = text_rows(1)[0]
    output = target.tap_rows(row.ids, tap_layer_indices(checkpoint.config), want_logits=True)
    features = TeacherRow(row, output.taps, output.logits.argmax(-1))
    loss, sums = TuningLoss(tunable.model, DrafterModel.from_checkpoint(checkpoint), target, 0.5), LossSums()
    tunable.apply()
    loss.backward(features, features.measured_anchors(), 1.0, sums)
    tunable.collect()
    assert 0.0 < sums.mean < float("inf")
    norms = {f"{name}.weight" for name, module in tunable.model.named_modules() if isinstance(module, RMSNorm)}
    assert set(tunable.factors) == norms | {f"{n}.{s}" for n in shapes if SELECTOR not in n for s in ("suh", "svh")}
    for factor_name, factor in tunable.factors.items():
        assert factor.grad is not None, factor_name
        assert torch.isfinite(factor.grad).all(), factor_name
        assert factor.grad.any(), factor_name

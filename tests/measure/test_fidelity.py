"""Teacher-forced fidelity against a plain loop over anchors, on a target and drafters whose logits are tables."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from exl3_dflash.calibration.rowset import TokenRow
from exl3_dflash.drafter.selector import Proposal
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.measure.fidelity import measure_fidelity
from exl3_dflash.target.base import TapRows

VOCABULARY, BLOCK, ROW = 11, 5, 40


class TableTarget:
    """Greedy token after position i of a row is a fixed random table; taps carry the row's number and positions."""

    device = torch.device("cpu")
    facts = SimpleNamespace(head_size=VOCABULARY)

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.logits = torch.randn(rows, ROW, VOCABULARY, generator=generator)

    def tap_rows(self, ids: torch.Tensor, tap_ids: tuple[int, ...], want_logits: bool = False) -> TapRows:
        row = int(ids[0])
        taps = torch.full((len(ids), 1), float(row))
        return TapRows(taps, self.logits[row, : len(ids)])


class TableDrafter:
    """Copies the target's greedy tokens, wrong with the given probability; logits come from the same table."""

    def __init__(self, target: TableTarget, error_rate: float, seed: int) -> None:
        self.config = SimpleNamespace(block_size=BLOCK, target_layer_ids=(0,), tap_shift=0, num_target_layers=1)
        generator = torch.Generator().manual_seed(seed)
        rows = target.logits.shape[0]
        self.table = torch.randn(rows, ROW, BLOCK, VOCABULARY, generator=generator)
        greedy = target.logits.argmax(-1)
        for row in range(rows):
            for anchor in range(ROW - BLOCK + 1):
                for k in range(1, BLOCK):
                    if torch.rand((), generator=generator) > error_rate:
                        self.table[row, anchor, k, greedy[row, anchor + k - 1]] = 9.0

    def block_embeddings(self, target: TableTarget, anchor_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(anchor_ids), BLOCK, 1)

    def forward_anchors(self, taps: torch.Tensor, embeddings: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        return self.table[int(taps[0, 0]), anchors]

    def propose(self, target: TableTarget, anchors: torch.Tensor, hidden: torch.Tensor) -> Proposal:
        return Proposal(hidden.argmax(-1), hidden)


def make_rows(count: int, prompt_length: int = 6) -> list[TokenRow]:
    return [TokenRow(ids=torch.tensor([row] * ROW), prompt_length=prompt_length, kind="test") for row in range(count)]


def brute_force_accept_length(target: TableTarget, drafter: TableDrafter, rows: int, prompt_length: int) -> float:
    emitted = []
    for row in range(rows):
        for anchor in range(prompt_length, ROW - BLOCK + 1):
            accepted = 0
            for k in range(1, BLOCK):
                if int(drafter.table[row, anchor, k].argmax()) != int(target.logits[row, anchor + k - 1].argmax()):
                    break
                accepted += 1
            emitted.append(accepted + 1)
    return float(np.mean(emitted))


def test_accept_length_and_positions_equal_a_plain_loop() -> None:
    target = TableTarget(6)
    good, bad = TableDrafter(target, 0.1, seed=2), TableDrafter(target, 0.4, seed=3)
    result = measure_fidelity(target, {"good": good, "bad": bad}, make_rows(6))  # type: ignore[arg-type,dict-item]
    assert result.anchors == 6 * (ROW - BLOCK + 1 - 6)
    for figures, drafter in zip(result.drafters, (good, bad), strict=True):
        expected = brute_force_accept_length(target, drafter, 6, 6)
        assert figures.accept_length == pytest.approx(expected)
        chained = 1 + sum(np.cumprod(figures.position_acceptance))
        assert chained == pytest.approx(expected), "position-wise acceptance must chain to the accept length"
        assert figures.ci95[0] < expected < figures.ci95[1]
    assert result.drafters[1].retention == pytest.approx(
        result.drafters[1].accept_length / result.drafters[0].accept_length
    )


def test_reference_against_itself_is_perfect() -> None:
    target = TableTarget(3)
    drafter = TableDrafter(target, 0.3, seed=2)
    same = measure_fidelity(target, {"a": drafter, "b": drafter}, make_rows(3)).drafters[1]  # type: ignore[arg-type,dict-item]
    assert same.retention == 1.0
    assert same.retention_ci95 == (1.0, 1.0)
    assert same.top1_agreement == 1.0
    assert same.kl == 0.0


def test_divergence_equals_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """KL over all positions, with the logits cut into chunks of one anchor."""
    monkeypatch.setattr("exl3_dflash.measure.fidelity.LOGIT_CHUNK_ELEMENTS", 1)
    target = TableTarget(2)
    first, second = TableDrafter(target, 0.3, seed=2), TableDrafter(target, 0.3, seed=4)
    result = measure_fidelity(target, {"a": first, "b": second}, make_rows(2, 0))  # type: ignore[arg-type,dict-item]
    left = first.table[:2, 1 : ROW - BLOCK + 1, 1:].reshape(-1, VOCABULARY).double().log_softmax(-1)
    right = second.table[:2, 1 : ROW - BLOCK + 1, 1:].reshape(-1, VOCABULARY).double().log_softmax(-1)
    expected = torch.nn.functional.kl_div(right, left, reduction="batchmean", log_target=True)
    assert result.drafters[1].kl == pytest.approx(float(expected), rel=1e-5)


def test_rows_with_non_finite_features_are_counted_and_left_out() -> None:
    target = TableTarget(3)
    target.logits[1, 5, 0] = float("nan")
    drafter = TableDrafter(target, 0.2, seed=2)
    result = measure_fidelity(target, {"a": drafter}, make_rows(3))  # type: ignore[arg-type,dict-item]
    assert (result.rows, result.dropped_rows) == (2, 1)


def test_rows_too_short_are_one_clear_error() -> None:
    target = TableTarget(1)
    drafter = TableDrafter(target, 0.2, seed=2)
    with pytest.raises(Exl3DflashError, match="none of the rows can be measured"):
        measure_fidelity(target, {"a": drafter}, make_rows(1, prompt_length=ROW - 2))  # type: ignore[arg-type,dict-item]

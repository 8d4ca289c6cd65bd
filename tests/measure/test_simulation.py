"""Errors added to a drafter: what is shared, what they cost, and what is left of the accept length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from exl3_dflash.calibration.rowset import TokenRow
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.measure.simulation import divergence_cost, measure_costs, simulated_retention, with_errors
from exl3_dflash.measure.tallies import RowTally
from exl3_dflash.target.base import Target
from exl3_dflash.target.load import load_target
from tests.tiny_models import make_tiny_drafter
from tests.tiny_targets import make_tiny_llama

NAMES = ("layers.0.self_attn.v_proj", "layers.0.mlp.up_proj")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(make_tiny_llama(tmp_path_factory.mktemp("target")), device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> DrafterModel:
    folder: Path = make_tiny_drafter(tmp_path_factory.mktemp("drafter"), num_hidden_layers=1)
    return DrafterModel.from_checkpoint(DrafterCheckpoint.open(folder))


@pytest.fixture(scope="module")
def rows() -> list[TokenRow]:
    random = torch.Generator().manual_seed(3)
    return [TokenRow(torch.randint(0, 256, (60,), generator=random), 4, "test") for _ in range(4)]


def error_of(drafter: DrafterModel, name: str, size: float) -> torch.Tensor:
    weight = drafter.get_submodule(name).weight
    assert isinstance(weight, torch.Tensor)
    noise = torch.randn(weight.T.shape, generator=torch.Generator().manual_seed(len(name)))
    return size * float(weight.std()) * noise


def test_only_the_disturbed_weights_are_copied(drafter: DrafterModel) -> None:
    before = {name: tensor.clone() for name, tensor in drafter.named_buffers()}
    error = error_of(drafter, NAMES[0], 0.5)
    other = with_errors(drafter, {NAMES[0]: error})
    for name, tensor in drafter.named_buffers():
        assert torch.equal(tensor, before[name])
        mine = dict(other.named_buffers())[name]
        if name == f"{NAMES[0]}.weight":
            assert torch.allclose(mine, tensor + error.T)
        else:
            assert mine.data_ptr() == tensor.data_ptr(), name
    with other.observe(lambda *_: pytest.fail("observers are not shared")):
        drafter.fc(torch.zeros(1, drafter.fc.weight.shape[1]), "context")


def test_cost_is_the_slope_of_the_accept_length() -> None:
    """Against the numeric derivative of 1 + sum of products of the acceptances."""
    acceptance, anchors = np.array([0.9, 0.7, 0.8, 0.4]), 1000
    survival = np.cumprod(acceptance)
    accepted, reached = anchors * survival, anchors * np.append(1.0, survival[:-1])
    length = 1.0 + survival.sum()
    nothing = np.zeros(4)
    exact = RowTally(anchors, anchors * length, reached, accepted, nothing, nothing, nothing)
    for position in range(4):
        divergence = np.eye(4)[position]
        disturbed = RowTally(anchors, 0.0, nothing, nothing, nothing, anchors * divergence, nothing)
        changed = acceptance - 1e-6 * divergence
        slope = (length - 1.0 - np.cumprod(changed).sum()) / 1e-6
        assert divergence_cost(exact, disturbed) == pytest.approx(slope / length, rel=1e-6)


def test_cost_where_nothing_is_accepted_is_finite() -> None:
    nothing = np.zeros(3)
    exact = RowTally(10, 10.0, np.array([10.0, 0.0, 0.0]), nothing, nothing, nothing, nothing)
    other = RowTally(10, 10.0, nothing, nothing, nothing, np.ones(3), nothing)
    assert divergence_cost(exact, other) == pytest.approx(0.1)


def test_costs_grow_with_the_squared_error_and_add_up(target: Target, drafter: DrafterModel, rows) -> None:
    small = {name: error_of(drafter, name, 0.05) for name in NAMES}
    sets = {name: {name: error} for name, error in small.items()}
    sets |= {"both": small, "none": {}, "twice": {NAMES[0]: 2 * small[NAMES[0]]}}
    costs = measure_costs(target, drafter, sets, rows)
    assert costs["none"] == pytest.approx(0.0, abs=1e-9)
    assert min(costs[name] for name in NAMES) > 1e-6
    assert costs["twice"] == pytest.approx(4 * costs[NAMES[0]], rel=0.1)
    assert costs["both"] == pytest.approx(sum(costs[name] for name in NAMES), rel=0.2)


def test_retention_without_errors_is_one(target: Target, drafter: DrafterModel, rows) -> None:
    assert simulated_retention(target, drafter, {}, rows) == 1.0
    ruined = {name: error_of(drafter, name, 100.0) for name in NAMES}
    assert simulated_retention(target, drafter, ruined, rows) != 1.0

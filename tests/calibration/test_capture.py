"""Hessians against float64 products of inputs recomputed from the checkpoint, without the drafter's own code."""

from __future__ import annotations

import pytest
import torch

from exl3_dflash.calibration.anchors import sample_anchors
from exl3_dflash.calibration.capture import calibrate, mix_streams
from exl3_dflash.calibration.rowset import TokenRow
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.target.base import TapRows
from exl3_dflash.target.load import load_target
from quantize.hessian import Hessian
from tests.tiny_models import make_tiny_drafter
from tests.tiny_targets import make_tiny_llama


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("pair")
    make_tiny_llama(folder / "target")
    make_tiny_drafter(folder / "drafter", optional=["lm_head.weight"])
    target = load_target(folder / "target", device="cpu", dtype="float32")
    checkpoint = DrafterCheckpoint.open(folder / "drafter")
    return target, checkpoint, DrafterModel.from_checkpoint(checkpoint)


def text_rows(count: int, length: int = 40) -> list[TokenRow]:
    generator = torch.Generator().manual_seed(5)
    return [TokenRow(torch.randint(0, 256, (length,), generator=generator), 0, "text") for _ in range(count)]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float = 1e-6) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def mean_outer(x: torch.Tensor) -> torch.Tensor:
    flat = x.double().reshape(-1, x.shape[-1])
    return flat.T @ flat / len(flat)


def test_hessians_are_the_mean_outer_products_of_the_real_inputs(pair) -> None:
    target, checkpoint, drafter = pair
    rows = text_rows(3)
    result = calibrate(drafter, checkpoint.linears, target, rows, accept_length=2.5, anchors_per_row=7, seed=3)
    assert (result.rows, result.tokens, result.anchors, result.dropped_rows) == (3, 120, 21, 0)

    generator = torch.Generator().manual_seed(3)
    anchors = [sample_anchors(len(row.ids), 0, 1, 7, generator) for row in rows]
    taps = torch.cat([target.tap_rows(row.ids, (0, 2, 3)).taps for row in rows]).double()
    torch.testing.assert_close(result.hessians["fc"].matrix.double(), mean_outer(taps), rtol=1e-4, atol=1e-5)

    load = {name: checkpoint.load(name).double() for name in checkpoint.tensor_names()}
    context = rms_norm(taps @ load["fc.weight"].T, load["hidden_norm.weight"])
    embeddings = []
    for row, chosen in zip(rows, anchors, strict=True):
        for anchor in chosen:
            embeddings.append(target.embed(torch.tensor([int(row.ids[anchor]), 260, 260, 260])))
    block = rms_norm(torch.stack(embeddings).double(), load["layers.0.input_layernorm.weight"])
    torch.testing.assert_close(result.hessians["layers.0.q"].matrix.double(), mean_outer(block), rtol=1e-4, atol=1e-5)
    weight = 4 / 2.5  # block size / accept length
    mixed = (mean_outer(context) + weight * mean_outer(block)) / (1 + weight)
    torch.testing.assert_close(result.hessians["layers.0.kv"].matrix.double(), mixed, rtol=1e-4, atol=1e-5)


def test_every_linear_has_a_hessian_of_its_width(pair) -> None:
    target, checkpoint, drafter = pair
    result = calibrate(drafter, checkpoint.linears, target, text_rows(1), accept_length=2.0)
    for linear in checkpoint.linears:
        assert result.hessians[linear.group].matrix.shape == (linear.in_features, linear.in_features), linear.name
        assert result.hessians[linear.group].usable() is None


def test_head_sees_the_final_hidden_states(pair) -> None:
    target, checkpoint, drafter = pair
    row = text_rows(1)[0]
    result = calibrate(drafter, checkpoint.linears, target, [row], accept_length=2.0, anchors_per_row=5, seed=1)
    anchors = sample_anchors(40, 0, 1, 5, torch.Generator().manual_seed(1))
    taps = target.tap_rows(row.ids, (0, 2, 3)).taps
    hidden = drafter.forward_anchors(taps, drafter.block_embeddings(target, row.ids[anchors]), anchors)[:, 1:]
    torch.testing.assert_close(result.hessians["lm_head"].matrix.double(), mean_outer(hidden), rtol=1e-4, atol=1e-5)


class OverflowingTarget:
    """A target whose features overflow on one row, as FP16 residuals do."""

    def __init__(self, target: object, bad_first_id: int) -> None:
        self._target = target
        self._bad = bad_first_id

    def __getattr__(self, name: str) -> object:
        return getattr(self._target, name)

    def tap_rows(self, ids: torch.Tensor, tap_ids: tuple[int, ...], want_logits: bool = False) -> TapRows:
        output = self._target.tap_rows(ids, tap_ids, want_logits)  # type: ignore[attr-defined]
        if int(ids[0]) == self._bad:
            output.taps[3, 4] = float("inf")
        return output


def test_a_row_with_overflowing_features_is_dropped_and_counted(pair) -> None:
    target, checkpoint, drafter = pair
    rows = text_rows(3)
    broken = OverflowingTarget(target, int(rows[1].ids[0]))
    result = calibrate(drafter, checkpoint.linears, broken, rows, accept_length=2.0, anchors_per_row=3)  # type: ignore[arg-type]
    assert (result.rows, result.dropped_rows) == (2, 1)
    assert all(torch.isfinite(hessian.matrix).all() for hessian in result.hessians.values())


def test_a_stream_that_was_never_seen_takes_no_part() -> None:
    full = Hessian(torch.eye(4), count=3, rows=3, dropped_rows=0)
    empty = Hessian(torch.zeros(4, 4), count=0, rows=0, dropped_rows=2)
    assert mix_streams(empty, full, 2.0) is full
    assert mix_streams(full, empty, 2.0) is full

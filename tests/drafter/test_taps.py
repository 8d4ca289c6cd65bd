"""Which target layers feed fc, and in which order, on a target whose layer i emits the constant i."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.config import DrafterConfig
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.drafter.taps import tap_layer_indices
from exl3_dflash.errors import Exl3DflashError
from tests.tiny_models import make_tiny_drafter, tiny_config


def config(**nested: Any) -> DrafterConfig:
    return DrafterConfig.from_dict(tiny_config(dflash_config={"mask_token_id": 1, **nested}))


@pytest.mark.parametrize(("pinned", "layers"), [(None, (2, 0)), (0, (2, 0)), (1, (3, 1))])
def test_shift_and_order(pinned: int | None, layers: tuple[int, ...]) -> None:
    assert tap_layer_indices(config(target_layer_ids=[2, 0], tap_shift=pinned)) == layers


def test_a_tried_shift_overrides_the_pinned_one() -> None:
    pinned = config(target_layer_ids=[2, 0], tap_shift=1)
    assert tap_layer_indices(pinned, tap_shift=0) == (2, 0)
    with pytest.raises(Exl3DflashError, match=r"\[3, 0\] with tap_shift 1 read layer 4.*layers 0 to 3"):
        tap_layer_indices(config(target_layer_ids=[3, 0]), tap_shift=1)


def test_fc_sees_the_outputs_of_the_listed_layers_in_their_order(tmp_path: Path) -> None:
    nested = {"mask_token_id": 1, "target_layer_ids": [3, 0, 2]}
    model = DrafterModel.from_checkpoint(DrafterCheckpoint.open(make_tiny_drafter(tmp_path, dflash_config=nested)))
    layer_outputs = [torch.full((5, 32), float(layer)) for layer in range(4)]
    taps = torch.cat([layer_outputs[layer] for layer in tap_layer_indices(model.config)], dim=1)
    seen: list[torch.Tensor] = []
    with model.observe(lambda name, stream, x: seen.append(x) if name == "fc" else None):
        model.extend_context(model.new_cache(), taps)
    assert seen[0][:, ::32].tolist() == [[3.0, 0.0, 2.0]] * 5

"""ExLlamaV3 reads from an exported config what the drafter's reader reads from the original, in every dialect."""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest
import torch

from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.export import exllamav3_config
from exl3_dflash.drafter.taps import tap_layer_indices
from tests.drafter.test_export import DIALECTS
from tests.tiny_models import make_tiny_drafter

pytestmark = pytest.mark.conformance


@pytest.mark.parametrize("name", DIALECTS)
def test_exported_configs_mean_the_same_to_exllama(name: str, exllama: types.ModuleType, tmp_path: Path) -> None:
    from exllamav3.util.rope import RoPE

    ours = DrafterCheckpoint.open(make_tiny_drafter(tmp_path, **DIALECTS[name])).config
    tap_shift = ours.tap_shift or 0
    (tmp_path / "config.json").write_text(json.dumps(exllamav3_config(ours, tap_shift)))
    theirs = exllama.Config.from_directory(str(tmp_path))
    assert (theirs.block_size, theirs.mask_token_id) == (ours.block_size, ours.mask_token_id)
    assert tuple(theirs.target_layer_ids) == tap_layer_indices(ours)
    for index in range(ours.num_layers):
        window, causal = ours.layer_window(index), ours.layer_is_causal(index)
        if window is None:
            assert theirs.block_window(index)[0] == -1
            assert (theirs.is_causal is True) == causal
        else:  # their windows count keys to the left and to the right, the row itself apart
            assert theirs.block_window(index) == (window - 1, 0 if causal else window - 1)
    rope = RoPE("cpu", theirs.rope_settings)
    torch.testing.assert_close(rope.inv_freq, ours.rope.frequencies(ours.head_dim).float(), rtol=2e-6, atol=0)
    assert rope.attn_factor == pytest.approx(ours.rope.scale())

"""Drafters between here and ExLlamaV3: our exported configs mean the same to it, and its converted files run here."""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest
import torch

from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.export import exllamav3_config
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.drafter.taps import tap_layer_indices
from tests.drafter.test_export import DIALECTS
from tests.tiny_models import make_tiny_drafter

from .test_directories import CPU, convert
from .tiny_drafter import Sizes, save_source

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


def test_a_drafter_of_its_converter_runs_as_its_source(exllama: types.ModuleType, tmp_path: Path) -> None:
    sizes = Sizes(heads=1, kv_heads=1, intermediate=100, bias=True)  # widths of 64 and 100 are padded
    source = save_source(tmp_path / "source", sizes, sizes.tensors())
    quant_args = {"K": 8, "devices": [CPU], "apply_out_scales": None, "mul1": True}
    convert(exllama, source, tmp_path / "work", tmp_path / "out", quant_args)
    original, converted = DrafterCheckpoint.open(source), DrafterCheckpoint.open(tmp_path / "out")
    assert converted.linears == original.linears
    assert all(converted.is_quantized(spec.name) for spec in converted.linears)
    generator = torch.Generator().manual_seed(0)
    taps = torch.randn(9, sizes.taps * sizes.hidden, generator=generator)
    blocks, anchors = torch.randn(2, 4, sizes.hidden, generator=generator), torch.tensor([4, 9])
    hidden = [DrafterModel.from_checkpoint(c).forward_anchors(taps, blocks, anchors) for c in (original, converted)]
    assert (hidden[0] - hidden[1]).norm() < 0.05 * hidden[0].norm()

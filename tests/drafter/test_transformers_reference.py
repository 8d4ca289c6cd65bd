"""The one drafter that transformers has a class for: its own files are read, and computed as it computes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel

assistant = pytest.importorskip("transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant")


def test_muse_glimmer_assistant_of_transformers(tmp_path: Path) -> None:
    """The window is longer than the context: transformers counts it one key wider on either side."""
    torch.manual_seed(0)
    config = assistant.MuseGlimmerAssistantConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, block_size=4, mask_token_id=260, target_layer_ids=[2, 0, 3],
        layer_types=["sliding_attention", "full_attention"], sliding_window=64,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, attn_implementation="eager",
    )  # fmt: skip
    theirs = assistant.MuseGlimmerAssistantModel(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else parameter.data.add_(
            0.2 * torch.randn_like(parameter)
        )
    theirs.save_pretrained(tmp_path)
    checkpoint = DrafterCheckpoint.open(tmp_path)
    assert checkpoint.config.vocab_size is None
    assert [checkpoint.config.layer_is_causal(i) for i in range(2)] == [False, False]
    taps, block = torch.randn(9, 96), torch.randn(4, 32)
    with torch.inference_mode():
        expected = theirs(noise_embeds=block[None], context_hidden_states=taps[None]).last_hidden_state[0]
    ours = DrafterModel.from_checkpoint(checkpoint).forward_anchors(taps, block[None], torch.tensor([9]))[0]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)

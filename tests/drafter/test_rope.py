"""RoPE frequencies against transformers' own, and the rotation against complex numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from exl3_dflash.drafter.rope import RopeSettings, RotaryTable, rotate

TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "half rotary": {"partial_rotary_factor": 0.5},
    "linear": {"type": "linear", "factor": 4.0},
    "llama3": {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
    "yarn": {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    "yarn not truncated": {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    "yarn with a factor given": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096,
                                 "attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn with mscale": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096, "mscale": 0.7,
                         "mscale_all_dim": 1.0},
    "yarn, half rotary": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096,
                          "partial_rotary_factor": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_frequencies_equal_those_of_transformers(name: str) -> None:
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = RopeSettings(theta=150000.0, **TYPES[name])
    parameters = {key: value for key, value in TYPES[name].items() if key != "type"}
    parameters |= {"rope_type": settings.type, "rope_theta": settings.theta}
    if settings.type == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = Qwen3Config(head_dim=64, hidden_size=256, rope_parameters=parameters, max_position_embeddings=131072)
    if settings.type == "default":
        width = settings.rotary_width(64)
        expected, scale = 150000.0 ** (-torch.arange(0, width, 2) / width), 1.0
    else:
        expected, scale = ROPE_INIT_FUNCTIONS[settings.type](config, torch.device("cpu"))
    torch.testing.assert_close(settings.frequencies(64).float(), expected, rtol=2e-6, atol=0)
    assert settings.scale() == pytest.approx(scale)


@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_rotation_is_a_turn_of_pairs(partial: float) -> None:
    table = RotaryTable(RopeSettings(100.0, partial_rotary_factor=partial), 8, torch.float64, torch.device("cpu"))
    x = torch.randn(3, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 5, 3000])
    turned = rotate(x, *table.at(positions, 3001))
    half = int(8 * partial) // 2
    for row, position in enumerate(positions.tolist()):
        for pair in range(half):
            angle = position * 100.0 ** (-pair / half)
            a, b = x[row, :, pair], x[row, :, pair + half]
            torch.testing.assert_close(turned[row, :, pair], a * math.cos(angle) - b * math.sin(angle))
            torch.testing.assert_close(turned[row, :, pair + half], b * math.cos(angle) + a * math.sin(angle))
    assert torch.equal(turned[..., 2 * half :], x[..., 2 * half :])


def test_far_positions_keep_their_digits() -> None:
    """Scores depend on the distance alone, also at 10^5 tokens."""
    table = RotaryTable(RopeSettings(1e6), 64, torch.float32, torch.device("cpu"))
    query, key = torch.randn(2, 1, 1, 64, generator=torch.Generator().manual_seed(0))
    near = [rotate(x, *table.at(torch.tensor([p]), 100)) for x, p in ((query, 90), (key, 20))]
    far = [rotate(x, *table.at(torch.tensor([p]), 100_001)) for x, p in ((query, 100_000), (key, 99_930))]
    torch.testing.assert_close((near[0] * near[1]).sum(), (far[0] * far[1]).sum(), rtol=0, atol=2e-5)

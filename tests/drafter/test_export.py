"""What is written for ExLlamaV3 reads back as the same facts, and says them under the names that ExLlamaV3 reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from exl3_dflash.drafter.config import DrafterConfig
from exl3_dflash.drafter.export import exllamav3_config
from tests.family_models import FAMILY, family_config
from tests.tiny_models import tiny_config

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
DIALECTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "theta in rope_scaling": {"rope_theta": None, "rope_scaling": {"rope_type": "default", "rope_theta": 5e5}},
    "yarn": {"rope_scaling": {**YARN, "truncate": False}},
    "yarn with mscale": {"rope_theta": None, "rope_parameters": {**YARN, "rope_theta": 1e6, "mscale": 0.7,
                                                                 "mscale_all_dim": 1.0}},
    "llama3": {"rope_scaling": {**YARN, "rope_type": "llama3"}},
    "causal": {"causal": True},
    "not causal": {"dflash_config": {"causal": False, "mask_token_id": 260, "target_layer_ids": [2, 0]}},
    "use_swa": {"use_swa": True, "swa_window_size": 7, "layer_types": None},
    "half rotary": {"rope_parameters": {"rope_theta": 10000, "partial_rotary_factor": 0.5}},
    "tap_shift": {"dflash_config": {"tap_shift": 1, "mask_token_id": 260, "target_layer_ids": [2, 0]}},
    "aux ids": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
}  # fmt: skip

LAGUNA = {"architectures": ["DFlashLagunaForCausalLM"], "dflash_config": None, "target_layer_ids": [2, 0],
          "gating": "per-head"}  # fmt: skip


def source(name: str) -> DrafterConfig:
    return DrafterConfig.from_dict(tiny_config(**DIALECTS[name]) if name in DIALECTS else family_config(name))


@pytest.mark.parametrize("name", [*DIALECTS, *FAMILY])
def test_the_same_facts_are_read_back(name: str) -> None:
    config = source(name)
    before = dict(config.raw)
    read = DrafterConfig.from_dict(exllamav3_config(config, tap_shift=0))
    assert read.tap_shift == 0
    assert read.attention_value_scale == 1.0  # it is in the o_proj that goes with this config
    same = {"raw": {}, "rope": config.rope, "tap_shift": None, "attention_value_scale": 1.0}
    assert replace(read, **same) == replace(config, **same)
    assert torch.equal(read.rope.frequencies(8), config.rope.frequencies(8))
    assert read.rope.scale() == pytest.approx(config.rope.scale())
    assert config.raw == before
    again = DrafterConfig.from_dict(exllamav3_config(read, tap_shift=0))
    assert replace(again, raw={}) == replace(read, raw={})


def test_everything_that_exllamav3_would_default_is_written() -> None:
    written = exllamav3_config(source("yarn with mscale"), tap_shift=1)
    assert written["tap_shift"] == 1
    assert written["rope_theta"] == 1e6
    assert written["max_position_embeddings"] == 8 * 512
    assert written["rope_parameters"]["attention_factor"] == pytest.approx(source("yarn with mscale").rope.scale())
    swa = exllamav3_config(source("use_swa"), tap_shift=0)
    assert (swa["layer_types"], swa["sliding_window"]) == (["sliding_attention"] * 2, 7)
    assert exllamav3_config(source("causal"), 0)["is_causal"] is True
    assert exllamav3_config(source("not causal"), 0)["is_causal"] is False
    assert "is_causal" not in exllamav3_config(source("plain"), 0)


def test_laguna_keys_are_where_exllamav3_reads_them() -> None:
    config = DrafterConfig.from_dict({**tiny_config(**LAGUNA, block_size=4, mask_token_id=260), "causal": False})
    written = exllamav3_config(config, tap_shift=0)
    expected = {"causal": False, "block_size": 4, "mask_token_id": 260, "target_layer_ids": [2, 0]}
    assert written["dflash_config"] == expected
    assert exllamav3_config(source("laguna"), 0)["dflash_config"]["causal"] is True
    shifted = exllamav3_config(source("laguna"), 1)  # it reads no tap_shift there
    assert (shifted["dflash_config"]["target_layer_ids"], shifted["tap_shift"]) == ([1, 3, 4], 0)
    assert exllamav3_config(source("mimo"), 0)["is_causal"] is False

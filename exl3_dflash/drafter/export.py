"""A drafter's config.json written so that ExLlamaV3 reads the facts that it was measured with.

ExLlamaV3 knows fewer names than the dialects have, and where it finds none of them it takes a default in silence:

    fact               it reads                                        else
    theta              rope_theta, rope_parameters.rope_theta          10,000
    yarn factor        max_position_embeddings / original_max_...      (never `factor` itself)
    yarn magnitude     attention_factor                                0.1 ln(factor) + 1, whatever mscale says
    window             layer_types, sliding_window                     full attention, 2,048
    causality          is_causal                                       causal where sliding
    (Laguna)           dflash_config.causal                            causal
    taps               target_layer_ids + tap_shift                    tap_shift 1
    (Laguna)           dflash_config.target_layer_ids, no tap_shift
    V scale            attention_value_scale, for a plain o_proj       1

So these are written out where the source says the same in other words; the V scale is left out, because it is in
the o_proj that goes with this config. Everything else is kept as it was. A dialect that ExLlamaV3 cannot load keeps its
own keys, with ours beside them.
"""

from __future__ import annotations

import copy
from typing import Any

from exl3_dflash.drafter.config import SLIDING, DrafterConfig
from exl3_dflash.drafter.config_reader import LAYER_CONFIG_KEY, NESTED_KEY
from exl3_dflash.drafter.dialects import LAGUNA


def folded_config(config: DrafterConfig) -> dict[str, Any]:
    """The config's source for weights as `DrafterCheckpoint.load` gives them: the V scale is in o_proj already."""
    written = copy.deepcopy(config.raw)
    for place in _places(written):
        place.pop("attention_value_scale", None)
    return written


def exllamav3_config(config: DrafterConfig, tap_shift: int) -> dict[str, Any]:
    """The config's source with ExLlamaV3's names for its facts added.

    Args:
        config: as read.
        tap_shift: what the drafter was measured with, in ExLlamaV3's meaning (`drafter.taps`).

    Returns:
        A new object for config.json; `DrafterConfig.from_dict` reads the same facts from it.
    """
    written = folded_config(config)
    places = _places(written)
    for place in places:
        place.pop("tap_shift", None)
    written["tap_shift"] = tap_shift
    if config.is_causal is not None:
        written["is_causal"] = config.is_causal
    if SLIDING in config.layer_types:
        written["layer_types"] = list(config.layer_types)
        written["sliding_window"] = config.sliding_window
    _write_rope(config, written, places)
    if config.dialect is LAGUNA:
        _write_laguna(config, written, places, tap_shift)
    return written


def _write_laguna(config: DrafterConfig, written: dict[str, Any], places: list[dict[str, Any]], tap_shift: int) -> None:
    """ExLlamaV3's class for Laguna looks into dflash_config alone, and knows no tap_shift: the ids are shifted."""
    for place in places:
        for key in ("target_layer_ids", "eagle_aux_hidden_state_layer_ids"):
            place.pop(key, None)
    written["tap_shift"] = 0
    nested = written.get(NESTED_KEY) or {}
    written[NESTED_KEY] = nested | {
        "causal": config.is_causal,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [layer + tap_shift for layer in config.target_layer_ids],
    }


def _places(written: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of a config in which a key may lie."""
    nested = (written.get(key) for key in (NESTED_KEY, LAYER_CONFIG_KEY))
    return [written, *(place for place in nested if isinstance(place, dict))]


def _write_rope(config: DrafterConfig, written: dict[str, Any], places: list[dict[str, Any]]) -> None:
    rope = config.rope
    written["rope_theta"] = rope.theta
    if rope.partial_rotary_factor != 1.0:
        written["partial_rotary_factor"] = rope.partial_rotary_factor
    if rope.type == "default":
        return
    scaling: dict[str, Any] = {"rope_type": rope.type, "factor": rope.factor}
    if rope.original_max_position_embeddings is not None:
        scaling["original_max_position_embeddings"] = rope.original_max_position_embeddings
    if rope.type == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.type == "yarn":
        assert rope.original_max_position_embeddings is not None
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        scaling["attention_factor"] = rope.scale()
        written["max_position_embeddings"] = round(rope.factor * rope.original_max_position_embeddings)
    for place in places:
        for key in ("rope_scaling", "rope_parameters"):
            place.pop(key, None)
    written["rope_parameters"] = {**scaling, "rope_theta": rope.theta}

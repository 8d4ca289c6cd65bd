"""A drafter's config.json written so that ExLlamaV3 reads the facts that it was measured with.

ExLlamaV3 knows fewer names than the dialects have, and where it finds none of them it takes a default in silence:

    fact               it reads                                        else
    theta              rope_theta, rope_parameters.rope_theta          10,000
    yarn factor        max_position_embeddings / original_max_...      (never `factor` itself)
    yarn magnitude     attention_factor                                0.1 ln(factor) + 1, whatever mscale says
    window             layer_types, sliding_window                     full attention, 2,048
    causality          is_causal                                       causal where sliding
    taps               target_layer_ids + tap_shift                    tap_shift 1

So these are written out where the source says the same in other words. Everything else is kept as it was.
"""

from __future__ import annotations

import copy
from typing import Any

from exl3_dflash.drafter.config import SLIDING, DrafterConfig
from exl3_dflash.drafter.dialects import NESTED_KEY


def exllamav3_config(config: DrafterConfig, tap_shift: int) -> dict[str, Any]:
    """The config's source with ExLlamaV3's names for its facts added.

    Args:
        config: as read.
        tap_shift: what the drafter was measured with, in ExLlamaV3's meaning (`drafter.taps`).

    Returns:
        A new object for config.json; `DrafterConfig.from_dict` reads the same facts from it.
    """
    written = copy.deepcopy(config.raw)
    nested = written.get(NESTED_KEY)
    if isinstance(nested, dict):
        nested.pop("tap_shift", None)
    written["tap_shift"] = tap_shift
    if config.is_causal is not None:
        written["is_causal"] = config.is_causal
    if SLIDING in config.layer_types:
        written["layer_types"] = list(config.layer_types)
        written["sliding_window"] = config.sliding_window
    _write_rope(config, written)
    return written


def _write_rope(config: DrafterConfig, written: dict[str, Any]) -> None:
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
    for place in (written, written.get(NESTED_KEY)):
        if isinstance(place, dict):
            for key in ("rope_scaling", "rope_parameters"):
                place.pop(key, None)
    written["rope_parameters"] = {**scaling, "rope_theta": rope.theta}

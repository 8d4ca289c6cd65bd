"""Settings other than the configured ones, by the area of the fault that each would explain.

Only settings that occur in published drafters are tried: taps one layer up and down, the usual RoPE bases and the
target's own, windows of the usual sizes and any that a config names, the other causality, the special tokens of the
tokenizer as mask, and the other embedding scales. A setting that computes the same as the configured one is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from exl3_dflash.doctor.papers import unused_window
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.config import FULL, SLIDING, DrafterConfig
from exl3_dflash.drafter.taps import DEFAULT_TAP_SHIFT, tap_layer_indices
from exl3_dflash.measure.candidates import Candidate
from exl3_dflash.measure.fidelity import all_layers
from exl3_dflash.measure.probe import embedding_scales, open_settings, rescaled, shifted_layers
from exl3_dflash.target.base import Target
from exl3_dflash.target.load import TargetSketch

AREAS = ("taps", "rope", "window", "causality", "mask token", "embedding scale")
ROPE_BASES = (1e4, 1e5, 1.5e5, 5e5, 1e6, 5e6, 1e7)
WINDOWS = (512, 1024, 2048, 4096)
MASK_CANDIDATES = 8
CLEAR_GAIN = 0.05  # of the base's accept length
CLEAR_CAUSALITY_GAIN = 0.01  # it is the one or the other, and a block is short: the difference is small but certain


@dataclass(frozen=True)
class Alternative:
    """A setting to try.

    Attributes:
        area: one of AREAS.
        candidate: the drafter under it; the name says what was changed.
        advice: what to do if it is the right one.
        least_gain: share of the base's accept length by which it must be better.
    """

    area: str
    candidate: Candidate
    advice: str
    least_gain: float = CLEAR_GAIN


def base_candidate(config: DrafterConfig) -> Candidate:
    """The drafter as it is configured."""
    return Candidate("as configured", config)


def alternatives(checkpoint: DrafterCheckpoint, target: Target, sketch: TargetSketch) -> list[Alternative]:
    """Everything to try for this pair, in the order of AREAS."""
    config = checkpoint.config
    return [
        *_taps(config, target.facts.num_layers),
        *_rope(config, sketch),
        *_windows(config, sketch),
        *_causality(config),
        *_mask_tokens(checkpoint, sketch),
        *_embedding_scales(checkpoint, target),
    ]


def tapped_layers(config: DrafterConfig, tried: list[Alternative]) -> tuple[int, ...]:
    """Every target layer that the drafter or an alternative reads."""
    return all_layers([tap_layer_indices(config), *(tap_layer_indices(item.candidate.config) for item in tried)])


def _taps(config: DrafterConfig, num_layers: int) -> Iterator[Alternative]:
    now = DEFAULT_TAP_SHIFT if config.tap_shift is None else config.tap_shift
    for step in (-1, 1):
        layers = shifted_layers(config, now + step, num_layers)
        if layers is not None:
            yield Alternative(
                "taps",
                Candidate(f"taps {list(layers)}", replace(config, tap_shift=now + step)),
                f"the taps are off by one: set target_layer_ids to {list(layers)}, or tap_shift to {now + step}",
            )


def _rope(config: DrafterConfig, sketch: TargetSketch) -> Iterator[Alternative]:
    for theta in sorted({*ROPE_BASES, *((sketch.rope_theta,) if sketch.rope_theta else ())} - {config.rope.theta}):
        yield Alternative(
            "rope",
            Candidate(f"rope_theta {theta:g}", replace(config, rope=replace(config.rope, theta=float(theta)))),
            f"set rope_theta to {theta:g}" + (", the target's" if theta == sketch.rope_theta else ""),
        )


def _windows(config: DrafterConfig, sketch: TargetSketch) -> Iterator[Alternative]:
    """Full attention for sliding layers, other windows for them, and windows for full ones.

    Where no layer slides, all layers and all but the last are tried with the usual windows; a window that a config
    names is tried on every single layer, too. Causality stays as it is in every layer where it can.
    """
    named = {int(value) for value in (unused_window(config), sketch.sliding_window) if value}
    if SLIDING in config.layer_types:
        full = replace(config, layer_types=(FULL,) * config.num_layers, sliding_window=None)
        yield Alternative("window", _same_causality("full attention", config, full), "remove the sliding layers")
    for window in sorted({*WINDOWS, *named} - {config.sliding_window}):
        for types in _layer_patterns(config, each=window in named):
            slid = replace(config, layer_types=types, sliding_window=window)
            layers = [index for index, kind in enumerate(types) if kind == SLIDING]
            yield Alternative(
                "window",
                _same_causality(f"window {window} in layers {layers}", config, slid),
                f"set sliding_window to {window} and layer_types to {list(types)}",
            )


def _layer_patterns(config: DrafterConfig, each: bool) -> list[tuple[str, ...]]:
    """Which layers may slide: those that do; if none, all, all but the last, and (with `each`) every one alone."""
    count = config.num_layers
    if SLIDING in config.layer_types:
        return [config.layer_types]
    patterns = [(SLIDING,) * count]
    if count > 1:
        patterns.append((*(SLIDING,) * (count - 1), FULL))
        patterns += [tuple(SLIDING if i == index else FULL for i in range(count)) for index in range(count) if each]
    return list(dict.fromkeys(patterns))


def _same_causality(name: str, before: DrafterConfig, after: DrafterConfig) -> Candidate:
    causal = {before.layer_is_causal(index) for index in range(before.num_layers)}
    return Candidate(name, replace(after, is_causal=causal.pop()) if len(causal) == 1 else after)


def _causality(config: DrafterConfig) -> Iterator[Alternative]:
    now = [config.layer_is_causal(index) for index in range(config.num_layers)]
    for causal in (True, False):
        if now != [causal] * config.num_layers:
            name = "causal" if causal else "bidirectional"
            yield Alternative(
                "causality",
                Candidate(f"{name} inside the block", replace(config, is_causal=causal)),
                f"set is_causal to {str(causal).lower()}",
                CLEAR_CAUSALITY_GAIN,
            )


def _mask_tokens(checkpoint: DrafterCheckpoint, sketch: TargetSketch) -> Iterator[Alternative]:
    """Tokens named like a mask first, then padding rows of the table, then other special tokens."""
    if checkpoint.has_mask_embedding:
        return
    config, special = checkpoint.config, sketch.special_tokens
    rows = (config.vocab_size or 0) if checkpoint.has_embedding else sketch.vocab_size
    named = [token for token, text in special.items() if "mask" in text.lower()]
    unused = range(sketch.tokenizer_size, min(rows, sketch.tokenizer_size + 2))
    ordered = dict.fromkeys((*named, *unused, *sorted(special, reverse=True)))
    for token in [token for token in ordered if 0 <= token < rows and token != config.mask_token_id][:MASK_CANDIDATES]:
        label = special.get(token, "unused row")
        yield Alternative(
            "mask token",
            Candidate(f"mask_token_id {token} ({label})", replace(config, mask_token_id=token)),
            f"set mask_token_id to {token} ({label})",
        )


def _embedding_scales(checkpoint: DrafterCheckpoint, target: Target) -> Iterator[Alternative]:
    if "embedding_scale" not in open_settings(checkpoint, target):
        return
    own, *others = embedding_scales(target)
    for scale in others:
        yield Alternative(
            "embedding scale",
            Candidate(f"embedding scale {scale:g}", rescaled(checkpoint.config, scale / own)),
            f"the drafter was trained on embeddings scaled by {scale:g}: set input_embedding_scale to {scale / own:g}",
        )

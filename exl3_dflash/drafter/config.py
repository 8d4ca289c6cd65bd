"""One `DrafterConfig` out of every config.json dialect of a DFlash v1 drafter.

Facts without a right default (RoPE theta, taps, mask token, block size) must be there; facts given twice must agree.
Sliding layers come from `layer_types` with `sliding_window`, or from `use_swa` with `swa_window_size`. Inside the block
a layer is causal if `is_causal` says so; where that is absent or null, sliding layers are causal and full ones are
bidirectional. Tensors are not looked at here (`drafter.checkpoint`), and the target neither (`exl3_dflash.pairing`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exl3_dflash.drafter.dialects import ConfigReader, check_architecture, check_features
from exl3_dflash.drafter.rope import RopeSettings, read_rope
from exl3_dflash.errors import Exl3DflashError

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class DrafterConfig:
    """Everything that decides what a v1 drafter computes.

    Attributes:
        target_layer_ids: as listed, which is the order of concatenation (`drafter.taps` maps them to target layers).
        num_target_layers, target_hidden_size: None where the config does not say.
        layer_types: per layer, "full_attention" or "sliding_attention".
        sliding_window: keys a sliding layer sees, itself included; None without sliding layers.
        is_causal: None where the config does not say.
        tap_shift: exllamav3's offset on target_layer_ids where the checkpoint pins it, else None.
        final_logit_softcap: applied to the logits of the drafter's own head only.
        raw: the config.json it was read from.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    target_hidden_size: int | None
    layer_types: tuple[str, ...]
    sliding_window: int | None
    is_causal: bool | None
    attention_bias: bool
    rope: RopeSettings
    tap_shift: int | None
    final_logit_softcap: float | None
    raw: dict[str, Any]

    def layer_is_causal(self, index: int) -> bool:
        """Whether block rows of layer `index` see only themselves and earlier block rows."""
        return self.layer_types[index] == SLIDING if self.is_causal is None else self.is_causal

    def layer_window(self, index: int) -> int | None:
        """Window of layer `index`, or None for full attention."""
        return self.sliding_window if self.layer_types[index] == SLIDING else None

    @classmethod
    def from_directory(cls, path: str | Path) -> DrafterConfig:
        """Read `path/config.json`.

        Raises:
            Exl3DflashError: no such file, no JSON object, or what `from_dict` refuses.
        """
        file = Path(path).expanduser() / "config.json"
        if not file.is_file():
            raise Exl3DflashError(f"{file} does not exist", "a drafter's Hugging Face directory", "check the path")
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise Exl3DflashError(f"{file} cannot be read: {error}", "a JSON object", "download it again") from error
        if not isinstance(raw, dict):
            raise Exl3DflashError(f"{file} holds a {type(raw).__name__}", expected="a JSON object")
        try:
            return cls.from_dict(raw)
        except Exl3DflashError as error:
            raise Exl3DflashError(f"{file}: {error.what}", error.expected, error.fix) from None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> DrafterConfig:
        """Read the contents of a config.json.

        Raises:
            Exl3DflashError: another architecture, an unsupported feature, a missing, malformed or contradictory key.
        """
        check_architecture(raw)
        reader = ConfigReader(raw)
        vocab_size = reader.integer("vocab_size")
        check_features(reader, vocab_size)
        hidden_size, num_layers = reader.integer("hidden_size"), reader.integer("num_hidden_layers")
        heads = _read_heads(reader, hidden_size)
        layer_types, window = _read_layers(reader, num_layers)
        return cls(
            architecture=raw["architectures"][0],
            hidden_size=hidden_size,
            num_layers=num_layers,
            **heads,
            intermediate_size=reader.integer("intermediate_size"),
            rms_norm_eps=reader.number("rms_norm_eps"),
            vocab_size=vocab_size,
            block_size=reader.integer("block_size", minimum=2),
            mask_token_id=reader.integer("mask_token_id", minimum=0),
            target_layer_ids=_read_taps(reader),
            num_target_layers=reader.integer("num_target_layers", default=None),
            target_hidden_size=reader.integer("target_hidden_size", default=None),
            layer_types=layer_types,
            sliding_window=window,
            is_causal=reader.boolean("is_causal", "causal", "dflash_query_causal", default=None),
            attention_bias=reader.boolean("attention_bias", default=False),
            rope=read_rope(reader, heads["head_dim"]),
            tap_shift=reader.integer("tap_shift", default=None, minimum=-1),
            final_logit_softcap=reader.number("final_logit_softcapping", default=None),
            raw=dict(raw),
        )


def _read_heads(reader: ConfigReader, hidden_size: int) -> dict[str, int]:
    heads = reader.integer("num_attention_heads")
    kv_heads = reader.integer("num_key_value_heads", default=heads)
    head_dim = reader.integer("head_dim", default=None)
    if heads % kv_heads:
        raise Exl3DflashError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim is None:
        if hidden_size % heads:
            raise Exl3DflashError(
                f"config.json has no 'head_dim', and hidden_size {hidden_size} is not a multiple of {heads} heads",
                fix="add head_dim",
            )
        head_dim = hidden_size // heads
    scalar = reader.number("query_pre_attn_scalar", default=float(head_dim))
    if scalar != head_dim:
        raise Exl3DflashError(
            f"query_pre_attn_scalar {scalar} in config.json is not supported", f"scores scaled by head_dim {head_dim}"
        )
    return {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}


def _read_layers(reader: ConfigReader, num_layers: int) -> tuple[tuple[str, ...], int | None]:
    """Attention type of each layer, and the window if any layer slides."""
    types = reader.value("layer_types")
    use_swa = reader.boolean("use_swa", default=None)
    if types is None:
        types = [SLIDING if use_swa else FULL] * num_layers
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in (FULL, SLIDING) for kind in types):
        raise Exl3DflashError(
            f"'layer_types' in config.json is {types!r}", expected=f"{num_layers} times {FULL!r} or {SLIDING!r}"
        )
    slides = SLIDING in types
    if use_swa is not None and use_swa != slides:
        raise Exl3DflashError(f"use_swa is {use_swa} but layer_types is {types}", "settings that agree")
    if not slides:
        return tuple(types), None
    return tuple(types), reader.integer("sliding_window", "swa_window_size")


def _read_taps(reader: ConfigReader) -> tuple[int, ...]:
    """The tap ids in their listed order, checked against everything else that the config says about them."""
    taps: tuple[int, ...] = reader.integers("target_layer_ids")
    listed = f"target_layer_ids {list(taps)} in config.json"
    if not taps:
        raise Exl3DflashError(f"{listed} is empty", "the target layers that the drafter reads")
    duplicates = sorted({tap for tap in taps if taps.count(tap) > 1})
    if duplicates:
        raise Exl3DflashError(f"{listed} names layer {duplicates[0]} twice", "distinct layers")
    limit = reader.integer("num_target_layers", default=None)
    shift = reader.integer("tap_shift", default=0, minimum=-1)
    outside = [tap for tap in taps if min(tap, tap + shift) < 0 or (limit and max(tap, tap + shift) >= limit)]
    if outside:
        what = f"{listed} names layer {outside[0]}" + (f" and tap_shift is {shift}" if shift else "")
        raise Exl3DflashError(what, f"layers 0 to {limit - 1}" if limit else "layers from 0 on")
    aux = reader.integers("eagle_aux_hidden_state_layer_ids", default=None)
    if aux is not None and aux != tuple(tap + 1 for tap in taps):
        raise Exl3DflashError(
            f"{listed} and eagle_aux_hidden_state_layer_ids {list(aux)} disagree",
            expected="aux ids one above the tap ids (they count layer inputs)",
            fix="remove the wrong one",
        )
    if reader.integer("num_aux_layers", default=len(taps)) != len(taps):
        raise Exl3DflashError(f"{listed} has {len(taps)} taps but num_aux_layers is {reader.value('num_aux_layers')}")
    return taps

"""Single facts of a drafter's config that need more than one key, a cross-check or a rule.

Sliding layers come from `layer_types` with `sliding_window`, or from `use_swa` with `swa_window_size`, which makes all
layers slide where `layer_types` names none (the configuration classes of trainers fill in full attention by
themselves); `use_swa: false` says nothing. Whether a layer is causal inside the block, in this order:

    is_causal, causal, dflash_query_causal, causal_head (true only)   as it says, for all layers
    sliding_window_non_causal (speculators)                           true: bidirectional; false: as below
    the dialect's default                                             Laguna causal, Muse-Glimmer bidirectional
    use_swa where layer_types names no sliding layer (MiMo)           bidirectional
    else                                                              sliding layers causal, full ones bidirectional
"""

from __future__ import annotations

from dataclasses import dataclass

from exl3_dflash.drafter.config_reader import ConfigReader
from exl3_dflash.drafter.dialects import Dialect
from exl3_dflash.errors import Exl3DflashError

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class ConvolutionSettings:
    """What DFlash 2 adds: dynamic convolutions around each sublayer, and the candidate selector.

    Attributes:
        kernel_size: rows that a convolution mixes, the row itself and those before it.
        group_size: neighbouring features that share a dynamic weight.
        selector_rank: width R of the codebooks.
        selector_top_k: candidates of each row.
    """

    kernel_size: int
    group_size: int
    selector_rank: int
    selector_top_k: int


def read_heads(reader: ConfigReader, hidden_size: int) -> dict[str, int]:
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
    if reader.integer("v_head_dim", default=head_dim) != head_dim:
        raise Exl3DflashError(
            f"v_head_dim {reader.value('v_head_dim')} in config.json is not supported", f"{head_dim}, as head_dim"
        )
    return {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}


def read_draft_vocabulary(reader: ConfigReader, vocab_size: int | None) -> int | None:
    """Rows of the drafter's own head; fewer than the vocabulary where `d2t` maps them to target ids."""
    rows: int | None = reader.integer("draft_vocab_size", default=vocab_size)
    if rows is not None and (vocab_size is None or rows > vocab_size):
        raise Exl3DflashError(f"draft_vocab_size in config.json is {rows}", f"at most vocab_size {vocab_size}")
    return rows


def read_causality(reader: ConfigReader, dialect: Dialect) -> bool | None:
    """Causality of all layers inside the block; None where it follows the layer type (see the module)."""
    said: bool | None = reader.boolean("is_causal", "causal", "dflash_query_causal", default=None)
    if reader.boolean("causal_head", default=False):  # how JetSpec drafters say is_causal; false says nothing
        if said is False:
            raise Exl3DflashError("config.json says causal_head but is_causal = False", "settings that agree")
        said = True
    if said is None and reader.boolean("sliding_window_non_causal", default=False):
        said = False
    if said is None:
        said = dialect.causal
    if said is None and SLIDING not in (reader.value("layer_types") or ()) and reader.boolean("use_swa", default=False):
        said = False
    return said


def read_sinks(reader: ConfigReader, layer_types: tuple[str, ...]) -> tuple[bool, ...] | None:
    """Which layers have attention sinks: all, the sliding ones, or (None) those whose tensors are there."""
    everywhere = reader.boolean("attention_sink_bias", default=None)
    if everywhere is not None:
        return (everywhere,) * len(layer_types)
    sliding = reader.boolean("add_swa_attention_sink_bias", default=None)
    return None if sliding is None else tuple(sliding and kind == SLIDING for kind in layer_types)


def read_convolutions(
    reader: ConfigReader, hidden_size: int, vocab_size: int, block_size: int | None
) -> ConvolutionSettings:
    settings = ConvolutionSettings(
        kernel_size=reader.integer("conv_kernel_size", default=2),
        group_size=reader.integer("conv_group_size", default=16),
        selector_rank=reader.integer("selector_rank"),
        selector_top_k=reader.integer("selector_top_k"),
    )
    for name, value, fits, expected in (
        (
            "conv_kernel_size",
            settings.kernel_size,
            block_size is None or settings.kernel_size <= block_size,
            f"at most block_size {block_size}",
        ),
        ("conv_group_size", settings.group_size, hidden_size % settings.group_size == 0, f"a divisor of {hidden_size}"),
        ("selector_top_k", settings.selector_top_k, settings.selector_top_k <= vocab_size, f"at most {vocab_size}"),
    ):
        if not fits:
            raise Exl3DflashError(f"{name} in config.json is {value}", expected)
    return settings


def read_layers(reader: ConfigReader, num_layers: int) -> tuple[tuple[str, ...], int | None]:
    """Attention type of each layer, and the window if any layer slides."""
    types = reader.value("layer_types")
    if types is None:
        types = [FULL] * num_layers
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in (FULL, SLIDING) for kind in types):
        raise Exl3DflashError(
            f"'layer_types' in config.json is {types!r}", expected=f"{num_layers} times {FULL!r} or {SLIDING!r}"
        )
    if SLIDING not in types:
        if not reader.boolean("use_swa", default=False):
            return tuple(types), None
        types = [SLIDING] * num_layers
    return tuple(types), reader.integer("sliding_window", "swa_window_size")


def read_taps(reader: ConfigReader) -> tuple[int, ...]:
    """The tap ids in their listed order, checked against everything else that the config says about them."""
    taps: tuple[int, ...] = reader.integers("target_layer_ids", "aux_hidden_state_layer_ids")
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

"""The tensors of a DFlash v1 checkpoint: canonical names, shapes, and which linears share an input.

Shapes are those of the file, [out, in] for a linear. H hidden size, Ht target hidden size, K taps, nh/nkv heads, hd
head dim, I intermediate size, V vocabulary:

    fc.weight [H, K*Ht]   hidden_norm.weight [H]   norm.weight [H]
    layers.i.{input_layernorm, post_attention_layernorm}.weight [H]
    layers.i.self_attn.{q_proj [nh*hd, H], k_proj, v_proj [nkv*hd, H], o_proj [H, nh*hd]}.weight (.bias)
    layers.i.self_attn.{q_norm, k_norm}.weight [hd]
    layers.i.mlp.{gate_proj, up_proj [I, H], down_proj [H, I]}.weight
    optional: embed_tokens.weight [V, H]   lm_head.weight [V, H]   mask_embedding [H]
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from exl3_dflash.drafter.config import DrafterConfig

HEAD = "lm_head"
EMBEDDING = "embed_tokens.weight"
MASK_EMBEDDING = "mask_embedding"
OPTIONAL_TENSORS = (EMBEDDING, MASK_EMBEDDING)


@dataclass(frozen=True)
class LinearSpec:
    """One linear layer of a drafter.

    Attributes:
        name: canonical, without ".weight".
        in_features, out_features: without any padding.
        bias: whether it has one.
        group: linears of one group see the same input.
    """

    name: str
    in_features: int
    out_features: int
    bias: bool
    group: str


def linear_specs(config: DrafterConfig, target_hidden_size: int, has_head: bool) -> tuple[LinearSpec, ...]:
    """All linears of a drafter, in the order in which an input passes them."""
    hidden, middle, bias = config.hidden_size, config.intermediate_size, config.attention_bias
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    taps = len(config.target_layer_ids) * target_hidden_size
    specs = [LinearSpec("fc", taps, hidden, False, "fc")]
    for index in range(config.num_layers):
        layer = f"layers.{index}"
        for name, inputs, outputs, has_bias, group in (
            ("self_attn.q_proj", hidden, query, bias, "q"),
            ("self_attn.k_proj", hidden, key, bias, "kv"),
            ("self_attn.v_proj", hidden, key, bias, "kv"),
            ("self_attn.o_proj", query, hidden, bias, "o"),
            ("mlp.gate_proj", hidden, middle, False, "gate_up"),
            ("mlp.up_proj", hidden, middle, False, "gate_up"),
            ("mlp.down_proj", middle, hidden, False, "down"),
        ):
            specs.append(LinearSpec(f"{layer}.{name}", inputs, outputs, has_bias, f"{layer}.{group}"))
    if has_head:
        specs.append(LinearSpec(HEAD, hidden, config.vocab_size, False, HEAD))
    return tuple(specs)


def plain_shapes(config: DrafterConfig, present: Container[str]) -> dict[str, tuple[int, ...]]:
    """Shapes of everything that is not a linear; optional tensors only where `present` has them."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for index in range(config.num_layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"layers.{index}.{norm}.weight"] = (hidden,)
        for norm in ("q_norm", "k_norm"):
            shapes[f"layers.{index}.self_attn.{norm}.weight"] = (config.head_dim,)
    if EMBEDDING in present:
        shapes[EMBEDDING] = (config.vocab_size, hidden)
    if MASK_EMBEDDING in present:
        shapes[MASK_EMBEDDING] = (hidden,)
    return shapes

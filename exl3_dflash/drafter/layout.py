"""The tensors of a DFlash checkpoint: canonical names, shapes, and which linears share an input.

Shapes are those of the file, [out, in] for a linear. H hidden size, Ht target hidden size, K taps, nh/nkv heads, hd
head dim, I intermediate size, V vocabulary, D draft vocabulary:

    fc.weight [H, K*Ht]   hidden_norm.weight [H]   norm.weight [H]
    layers.i.{input_layernorm, post_attention_layernorm}.weight [H]
    layers.i.self_attn.{q_proj [nh*hd, H], k_proj, v_proj [nkv*hd, H], o_proj [H, nh*hd]}.weight (.bias)
    layers.i.self_attn.{q_norm, k_norm}.weight [hd]
    layers.i.mlp.{gate_proj, up_proj [I, H], down_proj [H, I]}.weight
    optional: embed_tokens.weight [V, H]   lm_head.weight [D, H]   mask_embedding [H]
              d2t [D] whole numbers, target id - draft id   t2d [V] true where a target id has a draft id
    sinks     layers.i.self_attn.attention_sink_bias [nh]
    Laguna    aux_hidden_norms.j.weight [Ht]   layers.i.self_attn.g_proj.weight [nh, H]
    DFlash 2  layers.i.{attention_conv, mlp_conv}.base_kernel [2, k, H], .kernel_projection.weight [2*k*H/g, H]
              candidate_selector.hidden_projection.weight [R, H], .{predecessor, successor}_codebook [V, R]

with k conv_kernel_size, g conv_group_size, R selector_rank. Names that differ in the files are listed in
`drafter.stored_tensors`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from exl3_dflash.drafter.config import DrafterConfig

HEAD = "lm_head"
EMBEDDING = "embed_tokens.weight"
MASK_EMBEDDING = "mask_embedding"
DRAFT_TO_TARGET = "d2t"
TARGET_TO_DRAFT = "t2d"
SELECTOR = "candidate_selector"
CODEBOOKS = (f"{SELECTOR}.predecessor_codebook", f"{SELECTOR}.successor_codebook")
CONVOLUTIONS = ("attention_conv", "mlp_conv")
SINKS = "attention_sink_bias"
OPTIONAL_TENSORS = (EMBEDDING, MASK_EMBEDDING, DRAFT_TO_TARGET, TARGET_TO_DRAFT)


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
    hidden = config.hidden_size
    specs = [LinearSpec("fc", len(config.target_layer_ids) * target_hidden_size, hidden, False, "fc")]
    for index in range(config.num_layers):
        specs += _layer_linears(config, f"layers.{index}")
    if config.convolutions is not None:
        name = f"{SELECTOR}.hidden_projection"
        specs.append(LinearSpec(name, hidden, config.convolutions.selector_rank, False, SELECTOR))
    if has_head:
        specs.append(LinearSpec(HEAD, hidden, config.draft_vocab_size or 0, False, HEAD))
    return tuple(specs)


def output_linears(config: DrafterConfig, has_head: bool) -> tuple[str, ...]:
    """Linears that read the final hidden states of block rows 1.., outside the drafter's own forward."""
    selector = (f"{SELECTOR}.hidden_projection",) if config.convolutions is not None else ()
    return (*selector, HEAD) if has_head else selector


def _layer_linears(config: DrafterConfig, layer: str) -> Iterator[LinearSpec]:
    hidden, middle, bias = config.hidden_size, config.intermediate_size, config.attention_bias
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = [
        ("self_attn.q_proj", hidden, query, bias, "q"),
        ("self_attn.k_proj", hidden, key, bias, "kv"),
        ("self_attn.v_proj", hidden, key, bias, "kv"),
        ("self_attn.o_proj", query, hidden, bias, "o"),
        ("mlp.gate_proj", hidden, middle, False, "gate_up"),
        ("mlp.up_proj", hidden, middle, False, "gate_up"),
        ("mlp.down_proj", middle, hidden, False, "down"),
    ]
    if config.dialect.head_gates:
        rows.insert(1, ("self_attn.g_proj", hidden, config.num_heads, False, "q"))
    if config.convolutions is not None:
        width = 2 * config.convolutions.kernel_size * (hidden // config.convolutions.group_size)
        for place, convolution in ((0, CONVOLUTIONS[0]), (5, CONVOLUTIONS[1])):
            rows.insert(place, (f"{convolution}.kernel_projection", hidden, width, False, convolution))
    for name, inputs, outputs, has_bias, group in rows:
        yield LinearSpec(f"{layer}.{name}", inputs, outputs, has_bias, f"{layer}.{group}")


def plain_shapes(
    config: DrafterConfig, present: Container[str], target_hidden_size: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Shapes of everything that is not a linear.

    Args:
        config: the drafter's.
        present: names in the files; optional tensors, and sinks that the config leaves open, are expected where
            they are there.
        target_hidden_size: width Ht of a tap norm; the drafter's own width by default.
    """
    hidden, vocabulary = config.hidden_size, config.vocab_size or 0
    shapes: dict[str, tuple[int, ...]] = {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    if config.dialect.norm_per_tap:
        for tap in range(len(config.target_layer_ids)):
            shapes[f"aux_hidden_norms.{tap}.weight"] = (target_hidden_size or hidden,)
    for index in range(config.num_layers):
        shapes |= _layer_shapes(config, f"layers.{index}", _has_sinks(config, index, present))
    if config.convolutions is not None:
        shapes |= dict.fromkeys(CODEBOOKS, (vocabulary, config.convolutions.selector_rank))
    optional = {
        EMBEDDING: (vocabulary, hidden),
        MASK_EMBEDDING: (hidden,),
        DRAFT_TO_TARGET: (config.draft_vocab_size or 0,),
        TARGET_TO_DRAFT: (vocabulary,),
    }
    return shapes | {name: shape for name, shape in optional.items() if name in present}


def _layer_shapes(config: DrafterConfig, layer: str, sinks: bool) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{layer}.{norm}.weight"] = (hidden,)
    for norm in ("q_norm", "k_norm"):
        shapes[f"{layer}.self_attn.{norm}.weight"] = (config.head_dim,)
    if sinks:
        shapes[f"{layer}.self_attn.{SINKS}"] = (config.num_heads,)
    if config.convolutions is not None:
        for convolution in CONVOLUTIONS:
            shapes[f"{layer}.{convolution}.base_kernel"] = (2, config.convolutions.kernel_size, hidden)
    return shapes


def _has_sinks(config: DrafterConfig, index: int, present: Container[str]) -> bool:
    """As the config says; where it does not, every layer if any has them (ExLlamaV3 looks at the first)."""
    if config.attention_sinks is not None:
        return config.attention_sinks[index]
    return any(f"layers.{layer}.self_attn.{SINKS}" in present for layer in range(config.num_layers))

"""A tiny seeded drafter of every member of the DFlash family, with the keys and tensor names of its own dialect.

`make_family_drafter(directory, name)` writes one of FAMILY; `family_config` and `family_tensors` give its config.json
and its tensors under canonical names (for references), `stored_tensors` the latter as the files have them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.tiny_models import tiny_config, tiny_tensors, write_drafter

Tensors = dict[str, torch.Tensor]
SLIDING, FULL = "sliding_attention", "full_attention"
TAPS = {"mask_token_id": 260, "target_layer_ids": [0, 2, 3]}
DRAFT_VOCABULARY = 40


@dataclass(frozen=True)
class Member:
    """One drafter.

    Attributes:
        config: keys that differ from `tests.tiny_models.DEFAULT_CONFIG`.
        extra: shapes of its own tensors, from the config.
        optional: as for `tiny_tensors`.
        store: canonical tensors to those of the files.
        nested: flat keys to those of config.json.
    """

    config: dict[str, Any]
    extra: Callable[[dict[str, Any]], dict[str, tuple[int, ...]]] = lambda config: {}
    optional: tuple[str, ...] = ()
    store: Callable[[Tensors], Tensors] = lambda tensors: tensors
    nested: Callable[[dict[str, Any]], dict[str, Any]] = field(default=lambda config: config)


def _layers(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"layers.{i}.{name}": shape for i in range(config["num_hidden_layers"]) for name, shape in shapes.items()}


def _dflash2_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    nested, hidden = config["dflash_config"], config["hidden_size"]
    kernel, groups = nested["conv_kernel_size"], hidden // nested["conv_group_size"]
    codebook = (config["vocab_size"], nested["selector_rank"])
    shapes = {}
    for name in ("attention_conv", "mlp_conv"):
        shapes[f"{name}.base_kernel"] = (2, kernel, hidden)
        shapes[f"{name}.kernel_projection.weight"] = (2 * kernel * groups, hidden)
    return {
        **_layers(config, shapes),
        "candidate_selector.hidden_projection.weight": (nested["selector_rank"], hidden),
        "candidate_selector.predecessor_codebook": codebook,
        "candidate_selector.successor_codebook": codebook,
    }


def _laguna_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    taps = len(config["dflash_config"]["target_layer_ids"])
    norms = {f"aux_hidden_norms.{tap}.weight": (hidden,) for tap in range(taps)}
    return norms | _layers(config, {"self_attn.g_proj.weight": (heads, hidden)})


def fuse_qkv(tensors: Tensors) -> Tensors:
    """q, k and v of every layer as one qkv_proj."""
    fused = {
        name: tensor for name, tensor in tensors.items() if name.split(".")[-2] not in ("q_proj", "k_proj", "v_proj")
    }
    for name in tensors:
        if name.endswith(".q_proj.weight"):
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            fused[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
    return fused


def suffix_codebooks(tensors: Tensors) -> Tensors:
    """The codebooks as some trainers call them."""
    return {f"{name}.weight" if name.endswith("codebook") else name: tensor for name, tensor in tensors.items()}


def _muse_names(tensors: Tensors) -> Tensors:
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    return {renamed.get(name, name): tensor for name, tensor in tensors.items()}


def _speculators_config(config: dict[str, Any]) -> dict[str, Any]:
    outside = {"architectures", "block_size", "draft_vocab_size", "speculators_model_type", "num_target_layers",
               "sliding_window_non_causal", "conv_group_size", "conv_kernel_size", "selector_rank",
               "selector_top_k"}  # fmt: skip
    config = {**config, **config["dflash_config"]}
    taps = {key: config.pop(key) for key in config.pop("dflash_config") if key in TAPS}
    layer = {key: value for key, value in config.items() if key not in outside}
    return {
        **{key: config[key] for key in outside if key in config},
        "aux_hidden_state_layer_ids": taps["target_layer_ids"],
        "mask_token_id": taps["mask_token_id"],
        "transformer_layer_config": layer,
    }


_DFLASH2 = {"block_size": 4, "conv_group_size": 16, "conv_kernel_size": 2, "selector_rank": 8, "selector_top_k": 6}
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}  # fmt: skip

FAMILY: dict[str, Member] = {
    "dflash2": Member(
        {
            "architectures": ["DFlash2DraftModel"],
            "block_size": None,
            "dflash_config": {**TAPS, **_DFLASH2},
            "is_causal": False,
            "layer_types": [SLIDING, FULL],
            "sliding_window": 6,
        },
        _dflash2_shapes,
    ),
    "dflash2 scaled": Member(
        {
            "architectures": ["DFlash2DraftModel"],
            "dflash_config": {
                **TAPS, **_DFLASH2, "conv_kernel_size": 3, "conv_group_size": 8, "input_embedding_scale": 2.0,
                "output_multiplier": 0.25, "final_logit_softcapping": 5.0,
            },
        },
        _dflash2_shapes,
        store=suffix_codebooks,
    ),
    "gpt-oss": Member({"attention_bias": True, "rope_theta": None, "rope_scaling": None, "rope_parameters": YARN}),
    "gemma": Member(
        {"layer_types": [SLIDING, FULL], "sliding_window": 5, "final_logit_softcapping": 30.0, "head_dim": 16}
    ),
    "mimo": Member(
        {
            "dflash_config": {
                **TAPS, "block_size": 4, "use_swa": True, "swa_window_size": 5, "attention_value_scale": 0.612,
                "attention_sink_bias": True,
            },
            "layer_types": None,
            "partial_rotary_factor": 0.5,
            "v_head_dim": 8,
        },
        lambda config: _layers(config, {"self_attn.attention_sink_bias": (config["num_attention_heads"],)}),
        optional=("mask_embedding",),
    ),
    "laguna": Member(
        {
            "architectures": ["DFlashLagunaForCausalLM"],
            "block_size": None,
            "dflash_config": {**TAPS, "block_size": 4},
            "gating": "per-head",
            "layer_types": [SLIDING, SLIDING],
            "sliding_window": 5,
            "draft_vocab_size": 288,
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        },
        _laguna_shapes,
        store=fuse_qkv,
    ),
    "muse-glimmer": Member(
        {"architectures": ["MuseGlimmerAssistantModel"], "dflash_config": None, "vocab_size": None,
         "layer_types": [SLIDING, FULL], "sliding_window": 5, **TAPS},
        store=_muse_names,
    ),
    "nemotron": Member(
        {"dflash_config": {**TAPS, "causal": False, "use_swa": False}, **TAPS, "has_embed_tokens": True,
         "has_lm_head": False, "attention_sink_bias": False, "block_size": 4, "rope_theta": 10000,
         "rope_parameters": {**YARN, "rope_theta": 10000}},
        optional=("embed_tokens.weight",),
    ),
    "speculators": Member(
        {"architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash",
         "draft_vocab_size": DRAFT_VOCABULARY, "layer_types": [SLIDING, FULL], "sliding_window": 5},
        optional=("embed_tokens.weight",),
        nested=_speculators_config,
    ),
    "speculators dflash2": Member(
        {"architectures": ["DFlash2DraftModel"], "speculators_model_type": "dflash2", "draft_vocab_size": 288,
         "layer_types": [SLIDING, FULL], "sliding_window": 5, "sliding_window_non_causal": True,
         "dflash_config": {**TAPS, **_DFLASH2}},
        _dflash2_shapes,
        nested=_speculators_config,
    ),
    "causal head": Member({"dflash_config": {**TAPS, "causal_head": True}}),
    "fused": Member({}, store=fuse_qkv),
}  # fmt: skip


def flat_config(name: str, **overrides: Any) -> dict[str, Any]:
    """All keys of a member at the top level (taps and mask aside), as references read them."""
    config = copy.deepcopy(tiny_config(**{**FAMILY[name].config, **overrides}))
    if {**FAMILY[name].config, **overrides}.get("layer_types", ()) is None:
        config.pop("layer_types", None)
    return config


def family_config(name: str, **overrides: Any) -> dict[str, Any]:
    """config.json of a member."""
    return FAMILY[name].nested(flat_config(name, **overrides))


def family_tensors(name: str, dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> Tensors:
    """Random tensors of a member under canonical names."""
    member, config = FAMILY[name], flat_config(name, **overrides)
    tensors = tiny_tensors(config, optional=member.optional, dtype=dtype)
    generator = torch.Generator().manual_seed(11)
    for extra, shape in member.extra(config).items():
        noise = torch.randn(shape, generator=generator)
        if extra.startswith("aux_hidden_norms"):
            noise = 1 + 0.2 * noise
        elif extra.endswith(("projection.weight", "g_proj.weight")):
            noise = noise * shape[-1] ** -0.5
        tensors[extra] = noise.to(dtype)
    if name == "speculators":
        ids = torch.randperm(config["vocab_size"], generator=generator)[: config["draft_vocab_size"]].sort().values
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.isin(torch.arange(config["vocab_size"]), ids)
        head = torch.randn(len(ids), config["hidden_size"], generator=generator) * config["hidden_size"] ** -0.5
        tensors["lm_head.weight"] = head.to(dtype)
    return tensors


def make_family_drafter(directory: Path, name: str, dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> Path:
    """Write a member of FAMILY; returns `directory`."""
    tensors = FAMILY[name].store(family_tensors(name, dtype, **overrides))
    contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
    return write_drafter(directory, family_config(name, **overrides), contiguous)

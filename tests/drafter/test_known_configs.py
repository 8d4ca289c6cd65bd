"""Published drafters: what their config.json says, in their own keys, and the facts that must be read from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from exl3_dflash.drafter.config import DrafterConfig
from exl3_dflash.drafter.dialects import DFLASH, DFLASH2, LAGUNA, MUSE_GLIMMER, SPECULATORS
from exl3_dflash.drafter.rope import RopeSettings
from exl3_dflash.errors import Exl3DflashError

S, F = "sliding_attention", "full_attention"
NEMOTRON_YARN = {"factor": 128.0, "original_max_position_embeddings": 8192, "rope_theta": 10000, "rope_type": "yarn"}


def qwen3(
    shape: tuple[int, ...], eps: float, *, mask: int, taps: list[int], targets: int, **more: Any
) -> dict[str, Any]:
    """A config of the SpecForge layout. shape: H, L, nh, nkv, hd, I, V."""
    hidden, layers, heads, kv_heads, head_dim, middle, vocabulary = shape
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 16,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": taps},
        "dtype": "bfloat16",
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": middle,
        "layer_types": [F] * layers,
        "max_window_layers": layers,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "num_target_layers": targets,
        "rms_norm_eps": eps,
        "rope_scaling": None,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": vocabulary,
        **more,
    }


NEMOTRON: dict[str, Any] = {
    **qwen3((2688, 6, 32, 2, 128, 6144, 131072), 1e-6, mask=990, taps=[1, 5, 19, 29, 41, 51], targets=0),
    "attention_sink_bias": False,
    "dflash_config": {"attention_sink_bias": False, "causal": False, "mask_token_id": 990,
                      "target_layer_ids": [1, 5, 19, 29, 41, 51], "use_swa": False, "sample_from_anchor": False},
    "dflash_query_causal": False,
    "draft_vocab_size": None,
    "dspark_fixup_head_type": None,
    "dspark_markov_rank": None,
    "eagle_aux_hidden_state_layer_ids": [2, 6, 20, 30, 42, 52],
    "has_embed_tokens": True,
    "has_lm_head": False,
    "mask_token_id": 990,
    "num_aux_layers": 6,
    "num_target_layers": None,
    "pard_token": 990,
    "rope_parameters": NEMOTRON_YARN,
    "rope_theta": 10000,
    "sample_from_anchor": False,
    "target_layer_ids": [1, 5, 19, 29, 41, 51],
    "train_embed_tokens": False,
}  # fmt: skip
NEMOTRON.pop("block_size")

GLIMMER_DFLASH2: dict[str, Any] = {
    **qwen3((6656, 5, 32, 8, 128, 19968, 202048), 1e-5, mask=0, taps=[0], targets=52),
    "architectures": ["DFlash2DraftModel"],
    "block_size": None,
    "is_causal": False,
    "dflash_config": {"block_size": 16, "conv_group_size": 16, "conv_kernel_size": 2, "final_logit_softcapping": 20.0,
                      "mask_token_id": 201818, "output_multiplier": 0.19611613513818404, "selector_rank": 256,
                      "selector_top_k": 16, "target_layer_ids": [1, 13, 25, 37, 49]},
    "layer_types": [S] * 5,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "sliding_window": 2048,
    "use_sliding_window": True,
}  # fmt: skip

GPT_OSS: dict[str, Any] = {
    **qwen3((2880, 8, 64, 8, 64, 7680, 201088), 1e-5, mask=200000, taps=[1, 6, 11, 16, 21], targets=24, block_size=8),
    "attention_bias": True,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                        "original_max_position_embeddings": 4096, "truncate": False},
}  # fmt: skip

MIMO: dict[str, Any] = {
    **qwen3((4096, 5, 64, 8, 128, 16384, 152064), 1e-5, mask=0, taps=[0], targets=48, block_size=8, rope_theta=10000),
    "dflash_config": {"target_layer_ids": [0, 11, 23, 35, 47], "mask_token_id": 151669, "block_size": 8,
                      "use_swa": True, "swa_window_size": 1024, "attention_value_scale": 0.612,
                      "attention_sink_bias": True},
    "partial_rotary_factor": 0.5,
    "sliding_window": 1024,
    "v_head_dim": 128,
}  # fmt: skip
MIMO.pop("layer_types")

LAGUNA_XS: dict[str, Any] = {
    **qwen3((2048, 6, 72, 8, 128, 8192, 100352), 1e-6, mask=0, taps=[0], targets=40, rope_theta=500000.0),
    "architectures": ["DFlashLagunaForCausalLM"],
    "block_size": None,
    "dflash_config": {"block_size": 16, "mask_token_id": 20, "target_layer_ids": [1, 10, 19, 28, 37]},
    "draft_vocab_size": 100352,
    "eagle_aux_hidden_state_layer_ids": [2, 11, 20, 29, 38],
    "gating": "per-head",
    "layer_types": [S] * 6,
    "sliding_window": 512,
}

GLIMMER_ASSISTANT: dict[str, Any] = {
    **qwen3((6656, 5, 32, 8, 128, 19968, 202048), 1e-5, mask=0, taps=[0], targets=52, rope_theta=5e5),
    "architectures": ["MuseGlimmerAssistantModel"],
    "dflash_config": None,
    "layer_types": [S] * 5,
    "mask_token_id": 201818,
    "sliding_window": 2048,
    "target_layer_ids": [1, 13, 25, 37, 49],
    "vocab_size": None,
}

_LAYER = qwen3((4096, 5, 32, 8, 128, 12288, 151936), 1e-6, mask=0, taps=[0], targets=0, rope_theta=1e6)
REDHAT_QWEN3: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "aux_hidden_state_layer_ids": [1, 9, 17, 25, 33],
    "block_size": 8,
    "draft_vocab_size": 32000,
    "mask_token_id": 151669,
    "sliding_window_non_causal": False,
    "projector_type": "dflash",
    "shift_label": False,
    "transformer_layer_config": {
        key: value
        for key, value in _LAYER.items()
        if key not in ("architectures", "auto_map", "block_size", "dflash_config", "num_target_layers")
    },
}

# name -> config.json, (H, L, nh, nkv, hd, I, V), block, mask, taps, target layers, layer types, window, theta
CONFIGS: dict[str, tuple[dict[str, Any], tuple[int | None, ...], tuple[Any, ...]]] = {
    "LFM2.5 1.2B": (
        qwen3((2048, 8, 32, 8, 64, 6144, 65536), 1e-5, mask=16, taps=[1, 4, 7, 10, 13], targets=16, rope_theta=1e6),
        (2048, 8, 32, 8, 64, 6144, 65536),
        (16, 16, (1, 4, 7, 10, 13), 16, "F" * 8, None, 1e6),
    ),
    "Qwen3 8B": (
        qwen3((4096, 5, 32, 8, 128, 12288, 151936), 1e-6, mask=151669, taps=[1, 9, 17, 25, 33], targets=36,
              rope_theta=1000000),
        (4096, 5, 32, 8, 128, 12288, 151936),
        (16, 151669, (1, 9, 17, 25, 33), 36, "F" * 5, None, 1e6),
    ),
    "Qwen3.5 35B-A3B": (
        qwen3((2048, 8, 32, 4, 128, 6144, 248320), 1e-6, mask=248070, taps=[1, 10, 19, 28, 37], targets=40,
              rope_theta=10000000),
        (2048, 8, 32, 4, 128, 6144, 248320),
        (16, 248070, (1, 10, 19, 28, 37), 40, "F" * 8, None, 1e7),
    ),
    "Qwen3.6 27B": (
        qwen3((5120, 5, 32, 8, 128, 17408, 248320), 1e-6, mask=248070, taps=[1, 16, 31, 46, 61], targets=64,
              rope_theta=10000000, layer_types=[S, S, S, S, F], sliding_window=2048, use_sliding_window=True,
              bos_token_id=None),
        (5120, 5, 32, 8, 128, 17408, 248320),
        (16, 248070, (1, 16, 31, 46, 61), 64, "SSSSF", 2048, 1e7),
    ),
    "Nemotron": (
        NEMOTRON,
        (2688, 6, 32, 2, 128, 6144, 131072),
        (None, 990, (1, 5, 19, 29, 41, 51), None, "F" * 6, None, 1e4),
    ),
    "Muse-Glimmer, DFlash 2": (
        GLIMMER_DFLASH2,
        (6656, 5, 32, 8, 128, 19968, 202048),
        (16, 201818, (1, 13, 25, 37, 49), 52, "S" * 5, 2048, 5e5),
    ),
    "gpt-oss 20B": (
        GPT_OSS,
        (2880, 8, 64, 8, 64, 7680, 201088),
        (8, 200000, (1, 6, 11, 16, 21), 24, "F" * 8, None, 1.5e5),
    ),
    "MiMo": (
        MIMO,
        (4096, 5, 64, 8, 128, 16384, 152064),
        (8, 151669, (0, 11, 23, 35, 47), 48, "S" * 5, 1024, 1e4),
    ),
    "Laguna": (
        LAGUNA_XS,
        (2048, 6, 72, 8, 128, 8192, 100352),
        (16, 20, (1, 10, 19, 28, 37), 40, "S" * 6, 512, 5e5),
    ),
    "Muse-Glimmer assistant": (
        GLIMMER_ASSISTANT,
        (6656, 5, 32, 8, 128, 19968, None),
        (16, 201818, (1, 13, 25, 37, 49), 52, "S" * 5, 2048, 5e5),
    ),
    "speculators": (
        REDHAT_QWEN3,
        (4096, 5, 32, 8, 128, 12288, 151936),
        (8, 151669, (1, 9, 17, 25, 33), None, "F" * 5, None, 1e6),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_dimensions_block_taps_and_layers(name: str) -> None:
    raw, dimensions, facts = CONFIGS[name]
    config = DrafterConfig.from_dict(raw)
    assert dimensions == (
        config.hidden_size,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.intermediate_size,
        config.vocab_size,
    )
    types = "".join(kind[0].upper() for kind in config.layer_types)
    assert facts == (
        config.stated_block_size,
        config.mask_token_id,
        config.target_layer_ids,
        config.num_target_layers,
        types,
        config.sliding_window,
        config.rope.theta,
    )
    assert config.tap_shift is None


def read(name: str) -> DrafterConfig:
    return DrafterConfig.from_dict(CONFIGS[name][0])


def test_a_config_without_block_size_asks_for_it() -> None:
    """Engines that read this one take the number of mask rows from their command line; no tensor shows it."""
    config = read("Nemotron")
    with pytest.raises(Exl3DflashError, match=r"no 'block_size'.*--block-size N"):
        _ = config.block_size
    told = config.with_block_size(8)
    assert (told.block_size, told.raw["block_size"]) == (8, 8)
    assert replace(told, stated_block_size=None, raw=config.raw) == config
    with pytest.raises(Exl3DflashError, match="whole number of at least 2"):
        config.with_block_size(1)
    with pytest.raises(Exl3DflashError, match=r"--block-size 8, but config\.json of the drafter says 16"):
        read("Qwen3 8B").with_block_size(8)
    assert read("Qwen3 8B").with_block_size(16).block_size == 16


def test_a_vocabulary_may_go_unnamed_only_where_the_drafter_has_none() -> None:
    with pytest.raises(Exl3DflashError, match="no 'vocab_size'"):
        DrafterConfig.from_dict({**CONFIGS["Qwen3 8B"][0], "vocab_size": None})


def test_causality_of_each() -> None:
    causal = {name: [read(name).layer_is_causal(i) for i in range(read(name).num_layers)] for name in CONFIGS}
    assert causal["Qwen3 8B"] == [False] * 5
    assert causal["Qwen3.6 27B"] == [True] * 4 + [False]
    assert causal["Nemotron"] == [False] * 6
    assert causal["Muse-Glimmer, DFlash 2"] == [False] * 5
    assert causal["MiMo"] == [False] * 5  # use_swa without layer_types
    filled_in = DrafterConfig.from_dict({**MIMO, "layer_types": [F] * 5})
    assert replace(filled_in, raw=read("MiMo").raw) == read("MiMo")
    assert causal["Laguna"] == [True] * 6
    assert causal["Muse-Glimmer assistant"] == [False] * 5


def test_rope_of_each() -> None:
    assert read("Qwen3 8B").rope == RopeSettings(theta=1e6)
    assert read("MiMo").rope == RopeSettings(theta=1e4, partial_rotary_factor=0.5)
    assert read("Nemotron").rope == RopeSettings(
        theta=1e4, type="yarn", factor=128.0, original_max_position_embeddings=8192
    )
    assert read("gpt-oss 20B").rope == RopeSettings(
        theta=1.5e5, type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False
    )


def test_what_only_some_have() -> None:
    glimmer = read("Muse-Glimmer, DFlash 2")
    assert glimmer.convolutions is not None
    assert vars(glimmer.convolutions) == {
        "kernel_size": 2,
        "group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    }
    assert (glimmer.output_multiplier, glimmer.final_logit_softcap) == (0.19611613513818404, 20.0)
    mimo = read("MiMo")
    assert (mimo.attention_value_scale, mimo.attention_sinks) == (0.612, (True,) * 5)
    assert read("gpt-oss 20B").attention_bias
    assert read("Nemotron").attention_sinks == (False,) * 6
    assert read("Qwen3 8B").attention_sinks is None
    assert (read("speculators").draft_vocab_size, read("speculators").vocab_size) == (32000, 151936)
    assert read("Laguna").draft_vocab_size == 100352


def test_dialects() -> None:
    expected = {
        "Muse-Glimmer, DFlash 2": DFLASH2,
        "Laguna": LAGUNA,
        "Muse-Glimmer assistant": MUSE_GLIMMER,
        "speculators": SPECULATORS,
    }
    assert {name: read(name).dialect for name in CONFIGS} == {name: expected.get(name, DFLASH) for name in CONFIGS}


def test_speculators_layers_that_slide() -> None:
    for non_causal, expected in ((False, [True, False]), (True, [False, False])):
        raw = {**REDHAT_QWEN3, "sliding_window_non_causal": non_causal}
        raw["transformer_layer_config"] = {
            **REDHAT_QWEN3["transformer_layer_config"], "num_hidden_layers": 2, "layer_types": [S, F],
            "sliding_window": 64,
        }  # fmt: skip
        config = DrafterConfig.from_dict(raw)
        assert [config.layer_is_causal(i) for i in range(2)] == expected
        assert config.layer_window(0) == 64


@pytest.mark.parametrize(
    ("keys", "causal"),
    [
        ({"causal_head": True}, True),
        ({"causal_head": False}, False),
        ({"causal_head": True, "is_causal": True}, True),
    ],
)
def test_causal_head_is_causality_of_all_layers(keys: dict[str, bool], causal: bool) -> None:
    raw = {**CONFIGS["Qwen3 8B"][0]}
    raw["dflash_config"] = {**raw["dflash_config"], **keys}
    config = DrafterConfig.from_dict(raw)
    assert [config.layer_is_causal(i) for i in range(5)] == [causal] * 5
    raw["dflash_config"] |= {"causal_head": True, "is_causal": False}
    with pytest.raises(Exl3DflashError, match="causal_head but is_causal = False"):
        DrafterConfig.from_dict(raw)

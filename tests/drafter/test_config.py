"""Config dialects: the same facts in every layout, and one clear error for everything that has no right answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl3_dflash.drafter.config import DrafterConfig
from exl3_dflash.drafter.rope import RopeSettings
from exl3_dflash.errors import Exl3DflashError
from tests.tiny_models import tiny_config

NESTED_KEYS = ("block_size", "mask_token_id", "target_layer_ids", "is_causal", "tap_shift")
FACTS: dict[str, Any] = {
    "block_size": 8,
    "mask_token_id": 99,
    "target_layer_ids": [3, 1],
    "is_causal": True,
    "tap_shift": 0,
}


def read(**overrides: Any) -> DrafterConfig:
    return DrafterConfig.from_dict(tiny_config(**overrides))


def facts(config: DrafterConfig) -> dict[str, Any]:
    return {key: value for key, value in vars(config).items() if key != "raw"}


def test_plain_facts() -> None:
    config = read()
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (32, 2, 4, 2)
    assert (config.head_dim, config.intermediate_size, config.vocab_size, config.block_size) == (8, 48, 288, 4)
    assert (config.mask_token_id, config.target_layer_ids, config.num_target_layers) == (260, (0, 2, 3), 4)
    assert config.layer_types == ("full_attention",) * 2
    assert (config.sliding_window, config.is_causal, config.tap_shift, config.attention_bias) == (
        None,
        None,
        None,
        False,
    )
    assert config.rope == RopeSettings(theta=10000.0)
    assert config.raw == tiny_config()


@given(st.lists(st.sampled_from(["nested", "top", "both", "nested and null", "null and top"]), min_size=5, max_size=5))
def test_dflash_config_and_top_level_mean_the_same(places: list[str]) -> None:
    nested: dict[str, Any] = {}
    raw = tiny_config(block_size=None, dflash_config=nested)
    for key, place in zip(NESTED_KEYS, places, strict=True):
        if place != "top":
            nested[key] = None if place == "null and top" else FACTS[key]
        if place != "nested":
            raw[key] = None if place == "nested and null" else FACTS[key]
    raw["dflash_config"] = nested
    config = DrafterConfig.from_dict(raw)
    assert {key: getattr(config, key) for key in NESTED_KEYS} == {**FACTS, "target_layer_ids": (3, 1)}


@pytest.mark.parametrize("key", NESTED_KEYS)
def test_two_places_that_disagree_are_refused(key: str) -> None:
    other = {"block_size": 16, "mask_token_id": 1, "target_layer_ids": [1, 3], "is_causal": False, "tap_shift": 1}
    with pytest.raises(Exl3DflashError, match=rf"dflash_config\.{key} = .* but {key} = .*remove the wrong one"):
        read(dflash_config=FACTS, **{"block_size": None, key: other[key]})


@pytest.mark.parametrize("key", ["mask_token_id", "target_layer_ids"])
def test_keys_without_a_right_default_must_be_there(key: str) -> None:
    nested = {name: value for name, value in FACTS.items() if name != key}
    with pytest.raises(Exl3DflashError, match=f"has no '{key}'.*no default is right"):
        read(block_size=None, dflash_config=nested)
    with pytest.raises(Exl3DflashError, match=f"has no '{key}'"):
        DrafterConfig.from_dict({**tiny_config(block_size=None, dflash_config=nested), key: None})


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 500000, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 5e5, "type": "default"}, "rope_theta": 500000},
        {"rope_scaling": {"type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 5e5, "mrope_section": [1, 1, 2], "mrope_interleaved": True}},
    ],
)
def test_every_layout_of_theta(rope: dict[str, Any]) -> None:
    assert read(**{"rope_theta": None, **rope}).rope == RopeSettings(theta=5e5)


def test_yarn_in_both_layouts() -> None:
    scaling = {
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "truncate": False,
    }
    expected = RopeSettings(
        theta=150000.0, type="yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False
    )
    for kind in ("type", "rope_type"):
        old = read(rope_theta=150000, rope_scaling={kind: "yarn", **scaling})
        new = read(rope_theta=None, rope_parameters={kind: "yarn", "rope_theta": 150000, **scaling})
        assert old.rope == new.rope == expected


@pytest.mark.parametrize(
    "rope",
    [
        {"partial_rotary_factor": 0.5, "rope_theta": 1e4},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ],
)
def test_partial_rotary(rope: dict[str, Any]) -> None:
    assert read(**rope).rope == RopeSettings(theta=1e4, partial_rotary_factor=0.5)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({}, "no 'rope_theta', neither at the top level nor in rope_parameters"),
        ({"rope_parameters": {"rope_type": "default"}}, "no 'rope_theta'"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "1000000.0 but rope_theta = 10000.0"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "longrope"}}, "rope_type 'longrope'.*not supported"),
        ({"rope_theta": 1e4, "rope_scaling": {"factor": 4.0}}, "a factor but no rope_type"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "no 'original_max_position"),
        (
            {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 8}},
            "no 'factor'",
        ),
        ({"rope_theta": 1e4, "rope_parameters": {"rotary_base": 1e6}}, r"unknown keys \['rotary_base'\]"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "a RoPE per layer type"),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "yarn"}, "rope_parameters": {"type": "default"}},
            "type = 'yarn'",
        ),
        ({"rope_theta": "10000"}, "'10000'"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.4}, "an even rotated width"),
        ({"rope_theta": 1e4, "rotary_dim": 4}, "rotary_dim 4"),
        ({"rope_theta": 1e4, "rope_scaling": [1]}, r"rope_scaling in config.json is \[1\]"),
    ],
)
def test_rope_without_a_right_answer(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(Exl3DflashError, match=message):
        read(**{"rope_theta": None, **rope})


@pytest.mark.parametrize(
    ("keys", "types", "window"),
    [
        ({"layer_types": None}, "FF", None),
        ({"layer_types": None, "sliding_window": 64}, "FF", None),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}, "SF", 64),
        ({"layer_types": None, "use_swa": True, "swa_window_size": 32}, "SS", 32),
        ({"layer_types": None, "dflash_config": {"use_swa": True, "swa_window_size": 32}}, "SS", 32),
        ({"layer_types": ["sliding_attention"] * 2, "use_swa": True, "swa_window_size": 32}, "SS", 32),
        ({"layer_types": ["full_attention"] * 2, "use_swa": False}, "FF", None),
        ({"layer_types": ["full_attention"] * 2, "use_swa": True, "swa_window_size": 32}, "SS", 32),
        ({"layer_types": ["sliding_attention", "full_attention"], "use_swa": False, "sliding_window": 8}, "SF", 8),
    ],
)
def test_windows(keys: dict[str, Any], types: str, window: int | None) -> None:
    nested = {"mask_token_id": 260, "target_layer_ids": [0, 2, 3], **keys.get("dflash_config", {})}
    raw = tiny_config(**{**keys, "layer_types": keys["layer_types"] or ["full_attention"] * 2, "dflash_config": nested})
    if keys["layer_types"] is None:
        del raw["layer_types"]
    config = DrafterConfig.from_dict(raw)
    assert "".join(kind[0].upper() for kind in config.layer_types) == types
    assert config.sliding_window == window
    assert [config.layer_window(i) for i in range(2)] == [window if kind == "S" else None for kind in types]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 2}, "no 'sliding_window'"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 0}, "sliding_window in config.json is 0"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "swa_window_size": 9}, "swa_window_size = 9"),
        ({"layer_types": ["full_attention"]}, "2 times 'full_attention' or 'sliding_attention'"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "'layer_types' in config.json is"),
    ],
)
def test_windows_without_a_right_answer(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(Exl3DflashError, match=message):
        read(**keys)


@pytest.mark.parametrize("key", ["is_causal", "causal", "dflash_query_causal"])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("value", [None, True, False])
def test_causality(value: bool | None, nested: bool, key: str) -> None:
    """Where the config does not say, or says null, sliding layers are causal and full layers are not."""
    raw = tiny_config(layer_types=["sliding_attention", "full_attention"], sliding_window=8)
    (raw["dflash_config"] if nested else raw)[key] = value
    config = DrafterConfig.from_dict(raw)
    assert config.is_causal is value
    expected = [True, False] if value is None else [value, value]
    assert [config.layer_is_causal(i) for i in range(2)] == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"target_layer_ids": [0, 2, 2]}, r"\[0, 2, 2\] in config.json names layer 2 twice"),
        ({"target_layer_ids": [0, -1]}, "names layer -1; expected layers 0 to 3"),
        ({"target_layer_ids": [0, 4]}, "names layer 4; expected layers 0 to 3"),
        ({"target_layer_ids": [0, 3], "tap_shift": 1}, "names layer 3 and tap_shift is 1; expected layers 0 to 3"),
        ({"target_layer_ids": []}, "is empty"),
        ({"target_layer_ids": [0, 1.5]}, "a list of whole numbers"),
        ({"target_layer_ids": [0, True]}, "a list of whole numbers"),
        ({"target_layer_ids": 3}, "a list of whole numbers"),
        (
            {"target_layer_ids": [0, 2], "eagle_aux_hidden_state_layer_ids": [0, 2]},
            r"aux_hidden_state_layer_ids \[0, 2\]",
        ),
        ({"target_layer_ids": [0, 2], "num_aux_layers": 3}, "num_aux_layers is 3"),
        ({"target_layer_ids": [0, 2], "mask_token_id": -1}, "mask_token_id in config.json is -1"),
        ({"target_layer_ids": [0, 2], "block_size": 1}, "a whole number of at least 2"),
        ({"target_layer_ids": [0, 2], "is_causal": "yes"}, "true, false or null"),
    ],
)
def test_taps_and_block_without_a_right_answer(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(Exl3DflashError, match=message):
        read(block_size=None, dflash_config={"mask_token_id": 1, "block_size": 4, **keys})


def test_taps_keep_their_order_and_agree_with_the_aux_ids() -> None:
    config = read(
        dflash_config={"mask_token_id": 1, "target_layer_ids": [3, 0]}, eagle_aux_hidden_state_layer_ids=[4, 1]
    )
    assert config.target_layer_ids == (3, 0)
    unlimited = read(dflash_config={"mask_token_id": 1, "target_layer_ids": [90]}, num_target_layers=None)
    assert unlimited.target_layer_ids == (90,)


def test_a_model_with_own_embeddings_and_yarn() -> None:
    """Facts of one published drafter that spreads them over both places, with a block size added."""
    raw = tiny_config(
        block_size=16, num_hidden_layers=6, hidden_size=2688, intermediate_size=6144, head_dim=128,
        num_attention_heads=32, num_key_value_heads=2, vocab_size=131072, mask_token_id=990, num_target_layers=None,
        dflash_config={"causal": False, "mask_token_id": 990, "target_layer_ids": [1, 5, 19, 29, 41, 51],
                       "use_swa": False, "sample_from_anchor": False, "attention_sink_bias": False},
        target_layer_ids=[1, 5, 19, 29, 41, 51], eagle_aux_hidden_state_layer_ids=[2, 6, 20, 30, 42, 52],
        dflash_query_causal=False, num_aux_layers=6, rope_theta=10000, has_embed_tokens=True,
        rope_parameters={"factor": 128.0, "original_max_position_embeddings": 8192, "rope_theta": 10000,
                         "rope_type": "yarn"},
    )  # fmt: skip
    raw |= {"draft_vocab_size": None, "dspark_markov_rank": None, "dspark_fixup_head_type": None, "rope_scaling": None}
    config = DrafterConfig.from_dict(raw)
    assert config.target_layer_ids == (1, 5, 19, 29, 41, 51)
    assert (config.is_causal, config.mask_token_id, config.block_size) == (False, 990, 16)
    assert config.rope == RopeSettings(theta=10000.0, type="yarn", factor=128.0, original_max_position_embeddings=8192)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architectures": ["Qwen3DSparkModel"]}, "DSpark: Markov and confidence heads"),
        ({"architectures": ["DominoDraftModel"]}, "Domino: a recurrent head corrects the logits"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM is not a DFlash drafter.*not the target's"),
        ({"architectures": None}, "'architectures' in config.json is None"),
        ({"architectures": ["DFlashDraftModel", "X"]}, "'architectures' in config.json is"),
        ({"architectures": None, "speculators_model_type": "eagle3"}, "a speculators drafter of type 'eagle3'"),
        ({"transformer_layer_config": {"hidden_size": 4}}, "a speculators drafter of type 'None'"),
        ({"speculators_model_type": "dspark"}, "of type 'dspark' .DSpark"),
        ({"speculators_model_type": "dflash", "projector_type": "domino"}, "projector_type = 'domino' .Domino"),
        ({"speculators_model_type": "dflash", "shift_label": True}, r"shift_label = True \(labels .*Domino, DSpark"),
        ({"dflash_config": {"projector_type": "dspark"}}, r"projector_type = 'dspark' \(DSpark"),
        ({"dflash_config": {"use_confidence_head": True}}, "a confidence head"),
        ({"dflash_config": {"linear_context": {"variant": "gdn"}}}, "a recurrent memory of the context"),
        ({"dflash_config": {"use_aux_hidden_state": False}}, "without the target's features"),
        ({"gating": "per-head"}, "gates on attention heads"),
        ({"selector_rank": 8}, "a candidate selector"),
        ({"v_head_dim": 4}, "v_head_dim 4"),
        ({"attention_value_scale": -0.612}, "attention_value_scale in config.json is -0.612"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act = 'gelu_pytorch_tanh'"),
        ({"draft_vocab_size": 289}, "draft_vocab_size in config.json is 289; expected at most vocab_size 288"),
        ({"dspark_markov_rank": 512}, "Markov head"),
        ({"sample_from_anchor": True}, "anchor's row"),
        ({"is_neox_style": False}, "interleaved RoPE"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar 256"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config of type 'fp8'"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"head_dim": None, "hidden_size": 33}, "no 'head_dim'"),
        ({"hidden_size": float("inf")}, "hidden_size in config.json is inf"),
        ({"dflash_config": [1]}, r"dflash_config in config.json is \[1\]"),
    ],
)
def test_what_is_not_supported_is_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(Exl3DflashError, match=message):
        read(**keys)


def test_all_unsupported_settings_come_in_one_error() -> None:
    with pytest.raises(Exl3DflashError, match=r"biases in the MLP.*interleaved RoPE"):
        read(mlp_bias=True, is_neox_style=False)


@pytest.mark.parametrize(
    "keys",
    [{"attention_value_scale": 1.0}, {"draft_vocab_size": 288}, {"is_neox_style": True}, {"query_pre_attn_scalar": 8},
     {"quantization_config": {"quant_method": "exl3"}}, {"dspark_markov_rank": 0}],
)  # fmt: skip
def test_neutral_settings_change_nothing(keys: dict[str, Any]) -> None:
    assert facts(read(**keys)) == facts(read())


def test_files_that_hold_no_config(tmp_path: Path) -> None:
    with pytest.raises(Exl3DflashError, match=r"config\.json does not exist"):
        DrafterConfig.from_directory(tmp_path)
    for text, message in (("{", "cannot be read"), ("[]", "holds a list"), ("{}", "'architectures'.*is None")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(Exl3DflashError, match=message):
            DrafterConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    assert DrafterConfig.from_directory(tmp_path) == read()

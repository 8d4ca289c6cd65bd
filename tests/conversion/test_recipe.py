"""Recipes: written and read back, in ExLlamaV3's form, and refused with one clear error where they do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from exl3_dflash.conversion.recipe import Recipe, RecipeTensor, read_recipe, resolve_recipe
from exl3_dflash.errors import Exl3DflashError
from quantize.trellis import SUPPORTED_BITS

NAMES = [
    "fc",
    *(f"layers.0.self_attn.{kind}_proj" for kind in "qkvo"),
    "layers.0.mlp.gate_proj",
    "layers.0.mlp.up_proj",
]
TENSORS = [RecipeTensor(name) for name in NAMES]
rates = st.sampled_from((*SUPPORTED_BITS, 16))


@given(
    recipe=st.builds(
        Recipe,
        tensors=st.dictionaries(st.sampled_from(NAMES), rates.map(float), min_size=1),
        target_bpw=st.none() | st.floats(1, 8),
        achieved_bpw=st.none() | st.floats(1, 8),
        head_bits=st.none() | st.sampled_from(SUPPORTED_BITS),
    )
)
def test_round_trip(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "recipe.yaml"
    file.write_text(recipe.to_yaml())
    read = read_recipe(file)
    assert read == recipe
    assert list(read.tensors) == list(recipe.tensors), "order decides between patterns"


def test_whole_rates_are_written_as_whole_numbers() -> None:
    text = Recipe({"fc": 3.0, "x": 2.5}, target_bpw=3.0, head_bits=8.0).to_yaml()
    assert text.splitlines() == ["target_bpw: 3", "head_bits: 8", "tensors:", "  fc: 3", "  x: 2.5"]


def test_the_last_matching_entry_decides() -> None:
    recipe = Recipe({"*": 2, "layers.*.self_attn.*": 4, "layers.0.self_attn.o_proj": 3, "layers.0.mlp.*": 2.5})
    bits = resolve_recipe(recipe, TENSORS, "mul1")
    assert bits["fc"] == 2
    assert bits["layers.0.self_attn.q_proj"] == bits["layers.0.self_attn.v_proj"] == 4
    assert bits["layers.0.self_attn.o_proj"] == 3
    assert bits["layers.0.mlp.up_proj"] == 2.5


def test_q_may_differ_from_k_and_v_and_16_leaves_a_tensor_alone() -> None:
    recipe = Recipe({"*": 3, "layers.0.self_attn.q_proj": 2, "fc": 16, "layers.0.mlp.gate_proj": 16})
    bits = resolve_recipe(recipe, TENSORS, "mul1")
    assert (bits["layers.0.self_attn.q_proj"], bits["fc"], bits["layers.0.mlp.gate_proj"]) == (2, 16, 16)


def test_what_must_stay_unquantized_stays_so() -> None:
    tensors = [RecipeTensor("fc", "it is not padded"), *TENSORS[1:]]
    assert resolve_recipe(Recipe({"*": 3}), tensors, "mul1")["fc"] == 16
    with pytest.raises(Exl3DflashError, match="it is not padded"):
        resolve_recipe(Recipe({"*": 3, "fc": 3}), tensors, "mul1")


@pytest.mark.parametrize(
    ("entries", "codebook", "said"),
    [
        ({"*": 3, "layers.1.*": 2}, "mul1", "layers.1.* matches no tensor"),
        ({"*": 3, "lm_head": 2}, "mul1", "lm_head matches no tensor"),
        (dict.fromkeys(NAMES[1:], 3), "mul1", "says nothing about fc"),
        ({"*": 3, "layers.0.self_attn.k_proj": 2}, "mul1", "k_proj 2 bits and layers.0.self_attn.v_proj 3"),
        ({"*": 3, "layers.0.mlp.up_proj": 4}, "mul1", "gate_proj 3 bits and layers.0.mlp.up_proj 4"),
        ({"*": 2.5}, "mcg", "with --codebook mcg"),
    ],
)
def test_recipes_that_do_not_fit(entries: dict[str, float], codebook: str, said: str) -> None:
    with pytest.raises(Exl3DflashError) as error:
        resolve_recipe(Recipe(entries), TENSORS, codebook)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tensors: {*: 3}", "no YAML"),
        ("- fc", "no bits"),
        ("tensors: {}", "no bits"),
        ("target_bpw: 3", "no bits"),
        ("tensors: {fc: 3}\nlayers: 2", "unknown key layers"),
        ("tensors: {fc: 3.2}", "3.2"),
        ("tensors: {fc: true}", "True"),
        ("tensors: {fc: three}", "three"),
        ("tensors: {fc: 9}", "9"),
        ("tensors: {fc: 3}\nhead_bits: 16", "head_bits"),
        ("tensors: {fc: 3}\ntarget_bpw: much", "target_bpw"),
        ("tensors: {fc: 3}\ntarget_bpw: .nan", "target_bpw"),
        ("tensors: {fc: 2001-99-99}", "no YAML"),
    ],
)
def test_files_that_are_no_recipes(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(Exl3DflashError) as error:
        read_recipe(file)
    assert said in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(Exl3DflashError, match=r"nowhere\.yaml"):
        read_recipe(tmp_path / "nowhere.yaml")


def test_it_is_what_exllamav3s_documentation_shows() -> None:
    """target_bpw, achieved_bpw, head_bits, tensors, in this order."""
    text = Recipe({"model.layers.0.self_attn.q_proj": 2}, 3.14, 3.1398, 4).to_yaml()
    assert list(yaml.safe_load(text)) == ["target_bpw", "achieved_bpw", "head_bits", "tensors"]

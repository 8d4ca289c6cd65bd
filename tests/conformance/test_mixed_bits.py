"""Mixed bits in ExLlamaV3's own hands: its loader reads every rate, and its converter takes our recipes."""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest
import torch
import yaml

from exl3_dflash.conversion.job import quantize_drafter
from exl3_dflash.conversion.recipe import Recipe
from exl3_dflash.conversion.settings import JobSettings

from .test_drafter import CONTEXT_ROWS, TOLERANCE, our_hidden, their_hidden
from .tiny_drafter import Sizes, save_source

pytestmark = pytest.mark.conformance
CPU = torch.device("cpu")
SIZES = Sizes(layers=2, taps=1)
BITS = {
    "fc": 3.5,
    "layers.0.self_attn.*": 2.5,
    "layers.0.self_attn.q_proj": 5,
    "layers.0.self_attn.o_proj": 16,
    "layers.1.self_attn.*": 4,
    "layers.*.mlp.*": 6,
    "layers.1.mlp.down_proj": 1.5,
    "layers.0.mlp.down_proj": 8,
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job with a rate of every kind, uncalibrated."""
    folder = tmp_path_factory.mktemp("mixed")
    source = save_source(folder / "source", SIZES, SIZES.tensors())
    settings = JobSettings(str(source), None, folder / "out", recipe=Recipe(BITS), calibration="none", threads=1)
    quantize_drafter(settings)
    return folder / "out"


def test_it_loads_every_rate_and_computes_the_same(
    exllama: types.ModuleType, mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = exllama.Model.from_config(exllama.Config.from_directory(str(mixed)))
    for module in model.modules:
        module.load(CPU)
    wanted = yaml.safe_load((mixed / "recipe.yaml").read_text())["tensors"]
    linears = {part.key: part for part in model if part.key in wanted}
    assert linears.keys() == wanted.keys()
    found = {key: part.inner.K if part.quant_type == "exl3" else 16 for key, part in linears.items()}
    assert found == wanted
    random = torch.Generator().manual_seed(5)
    taps = torch.randn(CONTEXT_ROWS, SIZES.hidden, generator=random)
    block = torch.randn(4, SIZES.hidden, generator=random)
    ours, theirs = our_hidden(mixed, taps, block), their_hidden(model, taps, block, monkeypatch)
    assert float((ours - theirs).norm() / ours.norm()) < TOLERANCE


def test_its_converter_takes_our_recipe_for_the_same_bits(exllama: types.ModuleType, mixed: Path) -> None:
    from exllamav3.conversion.allocation import create_q_strategy_from_recipe

    recipe = yaml.safe_load((mixed / "recipe.yaml").read_text())
    source = exllama.Config.from_directory(str(mixed.parent / "source"))
    model = exllama.Model.from_config(source)
    strategy, mean = create_q_strategy_from_recipe(model, None, source, recipe["tensors"], 8, 8)
    assert strategy == recipe["tensors"]
    assert mean == pytest.approx(recipe["achieved_bpw"], abs=1e-4)


def test_storage_and_mean_bits_are_described_as_it_does(exllama: types.ModuleType, mixed: Path) -> None:
    from exllamav3.conversion.quant_config import create_quantization_config_json

    ours = json.loads((mixed / "quantization_config.json").read_text())
    create_quantization_config_json(str(mixed))
    assert json.loads((mixed / "quantization_config.json").read_text()) == ours
    recipe = yaml.safe_load((mixed / "recipe.yaml").read_text())
    assert json.loads((mixed / "config.json").read_text())["quantization_config"]["bits"] == round(
        recipe["achieved_bpw"], 2
    )

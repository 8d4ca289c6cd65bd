"""Pairs loaded for ExLlamaV3's engine: by name, other members of the family, cache settings, and what is refused."""

from __future__ import annotations

import json
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.runtime import exllama_model, load
from exl3_dflash.runtime.engine import StopSettings
from exl3_dflash.runtime.exllama import ExllamaEngine
from exl3_dflash.runtime.exllama_model import ExllamaSettings, drafter_view, load_models, require_features
from exl3_dflash.runtime.load import EngineChoice, load_pair
from tests.demo_pair import demo_directories, edited_drafter
from tests.family_models import make_family_drafter

from .exllama_pair import GREEDY, aligned_steps, load_reference, load_theirs, prompts_of, tokens_of
from .test_config_keys import SIZES, make_dflash2
from .test_directories import CPU

pytestmark = pytest.mark.conformance


def test_a_pair_by_name(generator_library: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a GPU, whose place the CPU takes."""
    monkeypatch.setattr(load, "choose_device", lambda _: torch.device("cuda"))
    for name in ("check_exllamav3", "require_exllamav3"):
        monkeypatch.setattr(load, name, lambda _: generator_library)
    monkeypatch.setattr(load, "load_models", lambda *given: load_models(*given[:3], CPU, given[4]))
    choice = EngineChoice(exllama=ExllamaSettings(cache_tokens=500), dynamic_draft=True)
    pair = load_pair("demo", "demo", threads=torch.get_num_threads(), engine=choice)
    engine = pair.engine(3)
    assert isinstance(engine, ExllamaEngine)
    assert (engine.draft_tokens, engine.context_limit) == (3, 512 - 8)
    facts = pair.describe()
    assert (facts["engine"], facts["dtype"]) == ("exllamav3", "float16")
    assert facts["drafter_sha256"] == DrafterCheckpoint.open(demo_directories()[1]).sha256
    assert len(tokens_of(list(engine.generate([5, 6], GREEDY, StopSettings(4))))) == 4
    with pytest.raises(Exl3DflashError, match="draft tokens: 8; expected 0 to 7"):
        load_pair("demo", "demo", draft_tokens=8)


@pytest.mark.parametrize("causal", [False, True])
def test_sliding_windows_slide_through_the_whole_generator(
    generator_library: types.ModuleType, tmp_path: Path, causal: bool
) -> None:
    """Its sliding layers keep a ring per request beside the pages."""
    target, drafter = demo_directories()
    keys = {"layer_types": ["sliding_attention"], "sliding_window": 10, "is_causal": causal}
    edited = edited_drafter(drafter, tmp_path / "drafter", **keys)
    reference, engine = load_reference(target, edited), load_theirs(generator_library, target, edited).engine()
    for prompt in prompts_of(engine)[:2]:
        ours, given = aligned_steps(reference, engine, prompt, StopSettings(50))
        assert [step.token_ids for step in given] == [step.token_ids for step in ours]


def test_dflash2_generates_the_targets_text(generator_library: types.ModuleType, tmp_path: Path) -> None:
    target = demo_directories()[0]
    engine = load_theirs(generator_library, target, make_dflash2(tmp_path / "two")).engine()
    plain = load_theirs(generator_library, target, None).engine()
    prompt = prompts_of(engine)[2]
    assert engine.max_draft_tokens == 3
    drafted = list(engine.generate(prompt, GREEDY, StopSettings(30)))
    assert tokens_of(drafted) == tokens_of(list(plain.generate(prompt, GREEDY, StopSettings(30))))
    assert {step.proposed for step in drafted[1:]} == {3}


@pytest.mark.parametrize("name", ["laguna", "muse-glimmer", "nemotron", "mimo"])
def test_other_members_generate_the_targets_text(
    generator_library: types.ModuleType, tmp_path: Path, name: str
) -> None:
    sizes = {**SIZES, "vocab_size": 272, **({"v_head_dim": 32} if name == "mimo" else {})}
    sizes |= {"draft_vocab_size": 272} if name == "laguna" else {}
    target = demo_directories()[0]
    drafter = make_family_drafter(tmp_path / name, name, **sizes)
    engine = load_theirs(generator_library, target, drafter).engine()
    prompt = prompts_of(engine)[1]
    drafted = tokens_of(list(engine.generate(prompt, GREEDY, StopSettings(12))))
    plain = load_theirs(generator_library, target, None).engine()
    assert tokens_of(list(plain.generate(prompt, GREEDY, StopSettings(12)))) == drafted


def test_the_view_of_a_drafter_pins_what_its_config_leaves_open(tmp_path: Path) -> None:
    drafter = demo_directories()[1]
    with drafter_view(DrafterCheckpoint.open(drafter)) as view:
        written = json.loads((view / "config.json").read_text())
        assert written["tap_shift"] == 0
        assert (view / "model.safetensors").resolve() == (drafter / "model.safetensors").resolve()
    assert not view.exists()
    scaled = edited_drafter(drafter, tmp_path / "scaled", attention_value_scale=0.5)
    with drafter_view(DrafterCheckpoint.open(scaled)) as view:
        assert json.loads((view / "config.json").read_text())["attention_value_scale"] == 0.5


def test_an_older_reader_is_refused_for_what_it_would_ignore(tmp_path: Path) -> None:
    old = SimpleNamespace(target_layer_ids=[1, 2, 3])
    drafter = demo_directories()[1]
    require_features(old, DrafterCheckpoint.open(drafter))
    taps = {"mask_token_id": 261, "target_layer_ids": [2, 0, 1]}
    keys = {"layer_types": ["sliding_attention"], "sliding_window": 10, "dflash_config": taps}
    edited = DrafterCheckpoint.open(edited_drafter(drafter, tmp_path / "edited", **keys))
    with pytest.raises(Exl3DflashError, match="does not heed is_causal, sliding_window, unsorted target_layer_ids of"):
        require_features(old, edited)
    nested = {"mask_token_id": 260, "target_layer_ids": [0, 2, 3], "block_size": 4, "causal": False}
    laguna = DrafterCheckpoint.open(make_family_drafter(tmp_path / "laguna", "laguna", dflash_config=nested))
    with pytest.raises(Exl3DflashError, match="does not heed causal of"):
        require_features(SimpleNamespace(), laguna)


def test_cache_bits_and_gpu_split_reach_the_library(
    generator_library: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, object]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    model = SimpleNamespace(load=lambda **options: given.append(options))
    for device, settings in (
        ("cuda", ExllamaSettings()),
        ("cuda:1", ExllamaSettings()),
        ("cuda", ExllamaSettings(gpu_split=(3.0, 5.0), max_batch_size=2)),
    ):
        exllama_model._load(Path(), model, torch.device(device), settings, {"draft_model": 1})
    assert given == [
        {"max_chunk_size": 2048, "max_batch_size": 4, "draft_model": 1},
        {"max_chunk_size": 2048, "device": torch.device("cuda:1")},
        {"max_chunk_size": 2048, "use_per_device": [3.0, 5.0], "max_batch_size": 2, "draft_model": 1},
    ]
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda gpu: (1 << 30, 6 << 30)[gpu])  # the drafter is there
    exllama_model._load(Path(), model, torch.device("cuda"), ExllamaSettings(gpu_split=(3.0, 5.0)), {})
    assert given[-1]["use_per_device"] == [2.0, 0.0]
    theirs = load_theirs(generator_library, *demo_directories(), ExllamaSettings(cache_bits=4))
    layers = theirs.target.loaded.cache.layers.values()
    assert {(layer.k_bits, layer.v_bits) for layer in layers} == {(4, 4)}
    assert theirs.drafter is not None
    assert theirs.drafter.loaded.cache.layer_type.__name__ == "CacheLayer_fp16"
    assert theirs.drafter.loaded.cache_tokens == theirs.target.loaded.cache_tokens

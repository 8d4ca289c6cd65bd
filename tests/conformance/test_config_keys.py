"""Every key that ExLlamaV3 reads of a drafter's config.json: what we write makes it draft what our torch drafter does.

Both draft for the same prefixes, here with the embedded target: ExLlamaV3 through its whole generator (state export,
projection, cache, block, head), we through the torch model. A variant changes what a key says; the drafts must change
with it, and stay equal. The table of keys in docs/exllamav3.md lists what the config classes read, no more and no less.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.drafter.taps import tap_layer_indices
from exl3_dflash.runtime.engine import SamplingSettings, StopSettings
from exl3_dflash.runtime.exllama_model import ExllamaSettings, drafter_view
from exl3_dflash.target.base import Target
from exl3_dflash.target.load import load_target
from tests.demo_pair import demo_directories, edited_drafter
from tests.family_models import make_family_drafter

from .exllama_pair import load_theirs

pytestmark = pytest.mark.conformance

DOCUMENT = Path(__file__).parents[2] / "docs" / "exllamav3.md"
TAPS = {"mask_token_id": 261, "target_layer_ids": [0, 1, 2]}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0}  # fmt: skip
SLIDING, FULL = ["sliding_attention"], ["full_attention"]
A_PAGE_FOR_EACH = ExllamaSettings(cache_tokens=6 * 256 - 8, max_batch_size=6)
CLOSE = 6e-3  # relative error of hidden states, FP16 against FP32
EQUAL = 0.9  # share of drafted ids; FP16 logits nearly tie here and there
CHANGED = 0.8


@dataclass(frozen=True)
class Variant:
    """A change of the embedded drafter's config.json, and tensors that it adds."""

    config: dict[str, Any]
    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)


VARIANTS = {
    "tap_shift": Variant({"dflash_config": {**TAPS, "tap_shift": 1}}),
    "target_layer_ids": Variant({"dflash_config": {**TAPS, "target_layer_ids": [2, 0, 1]}}),
    "mask_token_id": Variant({"dflash_config": {**TAPS, "mask_token_id": 40}}),
    "block_size": Variant({"block_size": 5}),
    "is_causal": Variant({"is_causal": True}),
    "layer_types": Variant({"layer_types": SLIDING, "sliding_window": 6, "is_causal": False}),
    "sliding_window": Variant({"layer_types": SLIDING, "sliding_window": 4, "is_causal": False}),
    "is_causal of a sliding layer": Variant({"layer_types": SLIDING, "sliding_window": 64}),
    "rms_norm_eps": Variant({"rms_norm_eps": 0.5}),
    "rope_theta": Variant({"rope_theta": 30.0}),
    "partial_rotary_factor": Variant({"partial_rotary_factor": 0.25}),
    "rope_parameters yarn": Variant({"rope_theta": None, "rope_parameters": {**YARN, "rope_theta": 100.0}}),
    "rope_scaling llama3": Variant({"rope_scaling": LLAMA3}),
    "attention_value_scale": Variant({"attention_value_scale": 0.3}),
    "attention_sink_bias": Variant({"attention_sink_bias": True}, {"layers.0.self_attn.attention_sink_bias": (8,)}),
    "mask_embedding": Variant({}, {"mask_embedding": (128,)}),
}
DFLASH2 = {"block_size": 4, "conv_group_size": 16, "conv_kernel_size": 2, "selector_rank": 8, "selector_top_k": 6,
           **TAPS}  # fmt: skip
DFLASH2_VARIANTS = {
    "conv_kernel_size": {"conv_kernel_size": 3},
    "conv_group_size": {"conv_group_size": 8},
    "selector_rank": {"selector_rank": 12},
    "selector_top_k": {"selector_top_k": 40},
    "input_embedding_scale": {"input_embedding_scale": 0.5},
    "output_multiplier": {"output_multiplier": 4.0},
    "final_logit_softcapping": {"final_logit_softcapping": 0.5},
}
LAGUNA = {"layer_types": FULL * 2, "draft_vocab_size": 272, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 272,
         "intermediate_size": 128, "num_target_layers": 4, "target_hidden_size": 128}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(demo_directories()[0], device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def prefixes(target: Target) -> list[list[int]]:
    """Text of several lengths, longer than the windows above."""
    text = target.tokenizer.encode("The old owl asks what the capital of the land is. ") * 2
    return [text[start : start + 20 + 3 * start] for start in range(6)]


@dataclass(frozen=True)
class Drafted:
    """Final hidden states (N, B, H) of the blocks behind N prefixes, and the drafted ids (N, B - 1)."""

    hidden: torch.Tensor
    ids: torch.Tensor


def their_drafts(library: types.ModuleType, drafter: Path, prefixes: Sequence[Sequence[int]]) -> Drafted:
    """What ExLlamaV3's generator drafts after each prefix, all of them at once."""
    loaded = load_theirs(library, demo_directories()[0], drafter, A_PAGE_FOR_EACH)
    assert loaded.drafter is not None
    model, states = loaded.drafter.loaded.model, []
    choose = model.sample_from_state
    model.sample_from_state = lambda state, params: (states.append(state.float()), choose(state, params))[1]
    engine = loaded.engine()
    requests = [engine.submit(prefix, SamplingSettings(), StopSettings(1)) for prefix in prefixes]
    while not all(request.finished for request in requests):
        engine.step()
    assert [len(state) for state in states] == [len(prefixes)]
    return Drafted(states[0], engine._generator.draft_ids_pinned[: len(prefixes), : engine.max_draft_tokens].clone())


def our_drafts(target: Target, drafter: Path, prefixes: Sequence[Sequence[int]]) -> Drafted:
    """What our torch drafter drafts after each prefix."""
    model = DrafterModel.from_checkpoint(DrafterCheckpoint.open(drafter))
    hidden = []
    for prefix in prefixes:
        cache = model.new_cache()
        taps = target.tap_rows(torch.tensor(prefix[:-1]), tap_layer_indices(model.config)).taps
        model.extend_context(cache, taps)
        block = model.block_embeddings(target, torch.tensor(prefix[-1:]))[0]
        hidden.append(model.draft(cache, block, cache.length))
    return Drafted(torch.stack(hidden), choices(target, drafter, torch.stack(hidden), prefixes))


def choices(target: Target, drafter: Path, hidden: torch.Tensor, prefixes: Sequence[Sequence[int]]) -> torch.Tensor:
    """The ids that our drafter chooses for hidden states (N, B, H)."""
    model = DrafterModel.from_checkpoint(DrafterCheckpoint.open(drafter))
    anchors = torch.tensor([prefix[-1] for prefix in prefixes])
    return model.propose(target, anchors, hidden[:, 1:]).ids


def check_equal(library: types.ModuleType, target: Target, drafter: Path, prefixes: Sequence[Sequence[int]]) -> Drafted:
    """Hold both against each other; returns ours.

    Ids are compared for one hidden state: where logits nearly tie, FP16 hidden states may choose another.
    """
    ours, theirs = our_drafts(target, drafter, prefixes), their_drafts(library, drafter, prefixes)
    assert theirs.hidden.shape == ours.hidden.shape
    assert float((theirs.hidden - ours.hidden).norm() / ours.hidden.norm()) < CLOSE
    assert share(theirs.ids, choices(target, drafter, theirs.hidden, prefixes)) > EQUAL
    return ours


def check_changed(ours: Drafted, before: Drafted) -> None:
    """Something else is drafted than before."""
    same_shape = ours.hidden.shape == before.hidden.shape
    moved = not same_shape or float((ours.hidden - before.hidden).norm() / before.hidden.norm()) > 10 * CLOSE
    assert moved or share(ours.ids, before.ids) < CHANGED


def share(first: torch.Tensor, second: torch.Tensor) -> float:
    width = min(first.shape[1], second.shape[1])
    return float((first[:, :width] == second[:, :width]).float().mean())


def make_variant(directory: Path, variant: Variant) -> Path:
    path = edited_drafter(demo_directories()[1], directory, **variant.config)
    tensors = load_file(path / "model.safetensors")
    for name, shape in variant.tensors.items():
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(5))
        tensors[name] = (noise if name == "mask_embedding" else 25 + 3 * noise).bfloat16()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def unchanged(target: Target, prefixes: list[list[int]]) -> Drafted:
    return our_drafts(target, demo_directories()[1], prefixes)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_key_means_the_same_to_both(
    name: str,
    generator_library: types.ModuleType,
    tmp_path: Path,
    target: Target,
    prefixes: list[list[int]],
    unchanged: Drafted,
) -> None:
    drafter = make_variant(tmp_path / "drafter", VARIANTS[name])
    check_changed(check_equal(generator_library, target, drafter, prefixes), unchanged)


def make_dflash2(directory: Path, **nested: Any) -> Path:
    return make_family_drafter(directory, "dflash2", **SIZES, dflash_config={**DFLASH2, **nested})


@pytest.mark.parametrize("name", DFLASH2_VARIANTS)
def test_a_key_of_dflash2_means_the_same_to_both(
    name: str, generator_library: types.ModuleType, tmp_path: Path, target: Target, prefixes: list[list[int]]
) -> None:
    drafter = make_dflash2(tmp_path / "drafter", **DFLASH2_VARIANTS[name])
    before = our_drafts(target, make_dflash2(tmp_path / "plain"), prefixes)
    check_changed(check_equal(generator_library, target, drafter, prefixes), before)


@pytest.mark.parametrize("causal", [True, False])
def test_causal_means_the_same_to_both_in_laguna(
    causal: bool, generator_library: types.ModuleType, tmp_path: Path, target: Target, prefixes: list[list[int]]
) -> None:
    def make(directory: Path, value: bool) -> Path:
        nested = {**TAPS, "block_size": 4, "causal": value}
        return make_family_drafter(directory, "laguna", **SIZES, **LAGUNA, dflash_config=nested)

    drafter = make(tmp_path / "drafter", causal)
    other = our_drafts(target, make(tmp_path / "other", not causal), prefixes)
    check_changed(check_equal(generator_library, target, drafter, prefixes), other)


class RecordedKeys(dict[str, Any]):
    """A dictionary that keeps which keys are looked up."""

    def __init__(self, contents: dict[str, Any], kept: set[str]) -> None:
        super().__init__(contents)
        self._kept = kept

    def get(self, key: str, default: Any = None) -> Any:
        self._kept.add(key)
        return super().get(key, default)


def keys_read(library: types.ModuleType, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The last names of all keys that its config class and RoPE look up for a drafter."""
    from exllamav3.model import config as config_module
    from exllamav3.util.rope import RoPE

    kept: set[str] = set()
    read = config_module.read_dict

    def recorded(values: Any, kind: Any, keys: str | list[str], *rest: Any, **options: Any) -> Any:
        kept.update(key.rpartition(">")[2] for key in ([keys] if isinstance(keys, str) else keys))
        return read(values, kind, keys, *rest, **options)

    with monkeypatch.context() as patched, drafter_view(DrafterCheckpoint.open(drafter)) as view:
        patched.setattr(config_module, "read_dict", recorded)
        rope = library.Config.from_directory(str(view)).rope_settings
        rope.rope_scaling = rope.rope_scaling and RecordedKeys(rope.rope_scaling, kept)
        RoPE("cpu", rope)
    return kept


def documented() -> Iterator[tuple[list[str], list[str]]]:
    """Rows of the table of keys: the keys, and the names of their checks."""
    table = DOCUMENT.read_text().partition("## Keys")[2]
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0].startswith("`"):
            yield re.findall(r"`(\w+)`", cells[0]), [check.strip() for check in cells[3].split(", ")]


def test_the_table_has_every_key_that_is_read_and_no_other(
    generator_library: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [make_variant(tmp_path / name.replace(" ", "-"), variant) for name, variant in VARIANTS.items()]
    made += [make_family_drafter(tmp_path / name, name) for name in ("laguna", "muse-glimmer", "dflash2", "nemotron")]
    read = set().union(*(keys_read(generator_library, drafter, monkeypatch) for drafter in made))
    listed = [key for keys, _ in documented() for key in keys]
    assert len(listed) == len(set(listed))
    assert set(listed) == read


def test_the_checks_that_the_table_names_exist() -> None:
    variants = {*VARIANTS, *DFLASH2_VARIANTS, "causal"}
    tests = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    named = [check for _, checks in documented() for check in checks]
    assert len(named) > 30
    for check in named:
        kind, _, name = check.partition(" ")
        assert name in variants if kind == "variant" else f"def {check}(" in tests

"""Every member of the family that ExLlamaV3 has a class for: it reads all of our files and computes as we do."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from exl3_dflash.conversion import job
from exl3_dflash.conversion.executor import LinearTask
from exl3_dflash.conversion.plan import copy_reason
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.drafter.taps import tap_layer_indices
from quantize.checkpoint import TensorDirectory
from quantize.linear import QuantizedLinear, decode_linear
from tests.family_models import FAMILY, SLIDING, make_family_drafter
from tests.tiny_models import FakeTarget

from .test_directories import CPU, record_reads
from .test_drafter import CONTEXT_ROWS, TOLERANCE, ContextCache
from .tiny_drafter import random_layers

pytestmark = pytest.mark.conformance

MEMBERS = [name for name in FAMILY if not name.startswith("speculators")]  # it has no class for that format
HIDDEN = 128
SIZES = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
         "intermediate_size": 128}  # fmt: skip


def overrides(name: str) -> dict[str, Any]:
    """Sizes that need no padding; a window for Laguna that is longer than its context (see the test of windows)."""
    chosen: dict[str, Any] = dict(SIZES)
    if name == "mimo":
        chosen["v_head_dim"] = SIZES["head_dim"]
    if name == "laguna":
        chosen["sliding_window"] = 64
    if name == "dflash2 scaled":
        nested = {**FAMILY[name].config["dflash_config"], "conv_group_size": 16}
        chosen |= {"dflash_config": nested, "hidden_size": HIDDEN}
    return chosen


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Runs the whole conversion of a member, with layers of random content in place of searched ones."""

    def fake(task: LinearTask) -> QuantizedLinear:
        bias = {} if task.bias is None else {f"{task.name}.bias": task.bias}
        layer: QuantizedLinear = random_layers(bias, {task.name: tuple(task.weight.shape)})[task.name]
        error = float((decode_linear(layer) - task.weight).square().sum() / task.weight.square().sum())
        return replace(layer, weight_error=error, fallback="a test", bits=8)

    monkeypatch.setattr(LinearTask, "run", fake)

    def convert(name: str) -> Path:
        source = make_family_drafter(tmp_path / "source", name, **overrides(name))
        out = tmp_path / "out"
        job.quantize_drafter(
            JobSettings(source=str(source), target=None, out_dir=out, bits=8, calibration="none", threads=1)
        )
        return out

    return convert


def load(exllama: types.ModuleType, path: Path) -> Any:
    config = exllama.Config.from_directory(str(path))
    laguna = config.architecture == "DFlashLagunaForCausalLM"
    model = exllama.Model.from_config(config, **({} if laguna else {"swa_full": True}))
    for module in model.modules:
        module.load(CPU)
    return model


def their_hidden(model: Any, taps: torch.Tensor, block: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Final hidden states (B, H) behind the context `taps`, with a plain attention that does what its arguments say."""
    from exllamav3.modules.attention_fn import dispatch

    cache, rows = ContextCache(), len(block)
    params = {"cache_seqlens": torch.zeros(1, dtype=torch.int32), "block_table": torch.zeros(1, 1, dtype=torch.int32)}
    features = [part[None].half() for part in taps.split(HIDDEN, dim=1)]
    order = sorted(range(len(features)), key=lambda tap: model.config.target_layer_ids[tap])
    model.update_kv_from_target([features[tap] for tap in order], cache, params)
    context = iter(cache.layers.values())

    def attend(args: Any) -> torch.Tensor:
        k, v = (torch.cat(pair, dim=1) for pair in zip(next(context), (args.k, args.v), strict=True))
        query, key, value = (tensor.transpose(1, 2).float() for tensor in (args.q, k, v))
        scores = query @ key.transpose(2, 3) * args.sm_scale
        ahead = torch.arange(k.shape[1])[None] - torch.arange(k.shape[1] - rows, k.shape[1])[:, None]
        hidden = ahead > 0 if args.causal else torch.zeros_like(ahead, dtype=torch.bool)
        if args.window_size is not None and args.window_size >= 0:
            hidden |= (-ahead > args.window_size) | (ahead > args.window_right)
        scores = scores.masked_fill(hidden, float("-inf"))
        if args.sinks is not None:
            scores = torch.cat([scores, args.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        weights = scores.softmax(-1)[..., : k.shape[1]]
        return (weights @ value).transpose(1, 2).half()

    monkeypatch.setattr(dispatch, "attn_fns", [attend])
    x, causal = block[None].clone(), getattr(model.config, "dflash_causal", model.config.__dict__.get("is_causal"))
    for module in model.modules[1:]:
        x = module.forward(x, {"causal": causal is True, "position": len(taps)})
    return x[0]


@pytest.mark.parametrize("name", MEMBERS)
def test_it_reads_every_tensor_and_computes_the_same(
    name: str, exllama: types.ModuleType, written: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = written(name)
    checkpoint = DrafterCheckpoint.open(out)
    config = exllama.Config.from_directory(str(out))
    assert tuple(config.target_layer_ids) == tap_layer_indices(checkpoint.config)
    assert (config.block_size, config.mask_token_id) == (checkpoint.config.block_size, checkpoint.config.mask_token_id)

    model = exllama.Model.from_config(config)  # as it is loaded by default, sliding layers with their own cache
    asked = record_reads(config.stc, monkeypatch)
    for module in model.modules:
        module.load(CPU)
    own_tables = {"embed_tokens.weight"} if name == "nemotron" else set()  # it uses the target's
    assert asked == set(TensorDirectory.open(out).names()) - own_tables
    kinds = {m.key: m.quant_type for m in model if hasattr(m, "quant_type")}
    expected = {}
    for spec in checkpoint.linears:
        copied = bool(copy_reason(spec, HIDDEN))
        expected[checkpoint.output_name(spec.name)] = "fp16" if copied else "exl3"
    assert kinds == expected
    assert all("g_proj" in key for key, kind in kinds.items() if kind == "fp16")
    assert model.get_layout_tree(4)

    random = torch.Generator().manual_seed(5)
    taps = torch.randn(CONTEXT_ROWS, 3 * HIDDEN, generator=random)
    block = torch.randn(4, HIDDEN, generator=random)
    ours_model = DrafterModel.from_checkpoint(checkpoint)
    cache = ours_model.new_cache()
    ours_model.extend_context(cache, taps)
    ours = ours_model.draft(cache, block, CONTEXT_ROWS)
    theirs = their_hidden(load(exllama, out), taps, block, monkeypatch)
    moved = ours_model.forward_anchors(-taps, block[None], torch.tensor([CONTEXT_ROWS]))[0]
    difference = float((ours - theirs).norm() / ours.norm())
    assert difference < TOLERANCE
    assert difference < float((ours - moved).norm() / ours.norm()) / 15  # another context is another result


def test_its_selector_chooses_the_same_tokens(exllama: types.ModuleType, written: Callable[[str], Path]) -> None:
    out = written("dflash2 scaled")
    model, target = DrafterModel.from_checkpoint(DrafterCheckpoint.open(out)), FakeTarget(HIDDEN)
    target.output_matrix = target.head  # type: ignore[attr-defined]
    hidden, anchors = torch.randn(6, 3, HIDDEN).half().float(), torch.tensor([1, 2, 3, 200, 287, 0])
    ids, logits, _ = model.propose(target, anchors, hidden)  # type: ignore[arg-type]
    selector = load(exllama, out).selector
    path, _ = selector.walk_block(
        hidden, target.head(hidden), anchors, scale=model.config.output_multiplier,
        softcap=model.config.final_logit_softcap,
    )  # fmt: skip
    assert torch.equal(path[:, 1:], ids)
    assert not torch.equal(ids, logits.argmax(-1))


@pytest.mark.parametrize("hidden", [128, 192])
def test_projections_of_dflash2_need_no_multiple_of_128(
    exllama: types.ModuleType, written: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, hidden: int
) -> None:
    """kernel_projection has 2 * 2 * H / 16 outputs and hidden_projection the selector's rank: padded and trimmed."""
    monkeypatch.setitem(SIZES, "hidden_size", hidden)
    out = written("dflash2")
    model, checkpoint = load(exllama, out), DrafterCheckpoint.open(out)
    x = torch.randn(1, 5, hidden).half()
    for module in model:
        if module.key.endswith("_projection"):
            assert module.quant_type == "exl3"
            weight = checkpoint.load(f"{module.key}.weight").double()
            given, wanted = module.forward(x, {})[0], x[0].double() @ weight.T
            assert given.shape == wanted.shape
            assert float((given - wanted).norm() / wanted.norm()) < TOLERANCE


def test_windows_of_laguna_are_one_key_wider_there(exllama: types.ModuleType, written: Callable[[str], Path]) -> None:
    """It takes one key off the window of every other class; nothing in a config could say so, hence nothing is done."""
    out = written("laguna")
    laguna = load(exllama, out)
    window = json.loads((out / "config.json").read_text())["sliding_window"]
    assert {layer.sliding_window for layer in laguna.attn_modules} == {window}
    assert FAMILY["laguna"].config["layer_types"][0] == SLIDING

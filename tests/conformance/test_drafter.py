"""Whole drafters: ExLlamaV3's modules compute from our files what our own drafter computes, context cache included.

Also the reason behind the conversion plan's rule for sizes that are not multiples of 128, shown by running ExLlamaV3.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch

from exl3_dflash.conversion.plan import copy_reason
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from quantize.audit import audit_directory
from quantize.linear import QuantSettings

from .tiny_drafter import Sizes, quantize_tensors, random_layers, save_source, write_quantized

pytestmark = pytest.mark.conformance
CPU = torch.device("cpu")
CONTEXT_ROWS = 11
TOLERANCE = 5e-3  # ExLlamaV3 keeps activations in fp16


class ContextCache:
    """Takes the context's keys and values as ExLlamaV3's paged cache would: (1, rows, heads, head_dim) by layer."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update_layer_direct(
        self, layer: int, lengths: Any, table: Any, k: torch.Tensor, v: torch.Tensor, rows: int, offset: int
    ) -> None:
        self.layers[layer] = (k, v)


def plan_and_write(tmp_path: Path, sizes: Sizes) -> Path:
    """A random drafter, quantized where the conversion plan quantizes it."""
    tensors = sizes.tensors()
    source = DrafterCheckpoint.open(save_source(tmp_path / "source", sizes, tensors))
    names = [linear.name for linear in source.linears if not copy_reason(linear, sizes.hidden)]
    layers = random_layers(tensors, {name: sizes.linears()[name] for name in names})
    return write_quantized(tmp_path / "out", sizes, tensors, layers)


def load(exllama: types.ModuleType, path: Path) -> Any:
    model = exllama.Model.from_config(exllama.Config.from_directory(str(path)))
    for module in model.modules:
        module.load(CPU)
    return model


def their_hidden(model: Any, taps: torch.Tensor, block: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The final hidden state (B, H) of a block behind the context `taps` (S, K * H), all in ExLlamaV3's modules."""
    from exllamav3.architecture.dflash import dflash_update_kv_from_target
    from exllamav3.modules.attention_fn import dispatch

    cache = ContextCache()
    params = {"cache_seqlens": torch.zeros(1, dtype=torch.int32), "block_table": torch.zeros(1, 1, dtype=torch.int32)}
    features = [part[None].half() for part in taps.split(block.shape[1], dim=1)]
    dflash_update_kv_from_target(model, features, cache, params)
    context = iter(cache.layers.values())

    def attend(args: Any) -> torch.Tensor:
        """The keys and values of the context before those of the block, and no mask."""
        k, v = (torch.cat(pair, dim=1) for pair in zip(next(context), (args.k, args.v), strict=True))
        query, key, value = (tensor.transpose(1, 2) for tensor in (args.q, k, v))
        attended = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, scale=args.sm_scale, enable_gqa=True
        )
        return attended.transpose(1, 2)

    monkeypatch.setattr(dispatch, "attn_fns", [attend])
    x = block[None].clone()
    for module in model.modules[1:]:
        x = module.forward(x, {"causal": False, "position": taps.shape[0]})
    return x[0]


def our_hidden(path: Path, taps: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    model = DrafterModel.from_checkpoint(DrafterCheckpoint.open(path))
    cache = model.new_cache()
    model.extend_context(cache, taps)
    return model.draft(cache, block, taps.shape[0])


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(layers=2),
        Sizes(heads=4, kv_heads=2, intermediate=200, taps=3),
        Sizes(heads=3, kv_heads=1, bias=True),
        Sizes(hidden=192, heads=3, kv_heads=1),
    ],
    ids=["plain", "odd MLP", "odd heads, biases", "hidden 192"],
)
def test_hidden_states_agree(
    exllama: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: Sizes
) -> None:
    random = torch.Generator().manual_seed(5)
    taps = torch.randn(CONTEXT_ROWS, sizes.taps * sizes.hidden, generator=random)
    block = torch.randn(4, sizes.hidden, generator=random)
    out = plan_and_write(tmp_path, sizes)
    ours = our_hidden(out, taps, block)
    model = load(exllama, out)
    if sizes.hidden % 128:
        with pytest.raises(RuntimeError):  # see `loader_note` of the plan; once this passes, the note can go
            their_hidden(model, taps, block, monkeypatch)
        return
    theirs = their_hidden(model, taps, block, monkeypatch)
    assert theirs.shape == ours.shape == (4, sizes.hidden)
    assert float((ours - theirs).norm() / ours.norm()) < TOLERANCE
    moved = our_hidden(out, taps.roll(1, dims=0), block)
    assert float((ours - moved).norm() / ours.norm()) > 10 * TOLERANCE  # the context matters


def test_a_quantized_drafter_runs_there_as_its_source(
    exllama: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = Sizes(taps=1)
    tensors = sizes.tensors()
    source = save_source(tmp_path / "source", sizes, tensors)
    layers = quantize_tensors(tensors, sizes.linears(), QuantSettings(bits=6))
    out = write_quantized(tmp_path / "out", sizes, tensors, layers)
    audit_directory(out, tensors, lambda name: tensors[f"{name}.weight"].T)
    taps, block = torch.randn(CONTEXT_ROWS, sizes.hidden), torch.randn(4, sizes.hidden)
    theirs = their_hidden(load(exllama, out), taps, block, monkeypatch)
    exact = our_hidden(source, taps, block)
    assert float((theirs - exact).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize("rows", [3, 200])
def test_fc_that_needs_padding_must_stay_unquantized(exllama: types.ModuleType, tmp_path: Path, rows: int) -> None:
    sizes = Sizes(hidden=192, heads=3, kv_heads=1)
    tensors = sizes.tensors()
    layers = random_layers(tensors, {"fc": sizes.linears()["fc"]})
    x = torch.randn(1, rows, 2 * 192).half()

    padded = load(exllama, write_quantized(tmp_path / "padded", sizes, tensors, layers))
    with pytest.raises(RuntimeError, match=r"incompatible shapes|divisible by 128"):
        padded.input_layer.proj.forward(x, {}, out_dtype=torch.half)

    plain = load(exllama, plan_and_write(tmp_path, sizes))
    given = plain.input_layer.proj.forward(x, {}, out_dtype=torch.half)
    wanted = x.double() @ tensors["fc.weight"].double().T
    assert float((given - wanted).norm() / wanted.norm()) < 2e-3


def test_converting_such_an_fc_fails_there_too(exllama: types.ModuleType, tmp_path: Path) -> None:
    sizes = Sizes(hidden=192, heads=3, kv_heads=1)
    model = load(exllama, save_source(tmp_path / "source", sizes, sizes.tensors()))
    fc = model.input_layer.proj
    with pytest.raises(AssertionError):
        fc.convert_exl3(
            fc.init_H_data(False), {"K": 4, "seed": 0, "devices": [CPU], "apply_out_scales": None, "mul1": True}
        )

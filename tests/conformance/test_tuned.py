"""Drafters with tuned scales and norms: ExLlamaV3's classes load and run them as any other file."""

from __future__ import annotations

import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from exl3_dflash.conversion.tunable import TunableDrafter
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint

from .test_drafter import CONTEXT_ROWS, TOLERANCE, load, our_hidden, their_hidden
from .tiny_drafter import Sizes, random_layers, save_source, write_quantized

pytestmark = pytest.mark.conformance


def test_tuned_scales_and_norms_are_what_exllama_computes_with(
    exllama: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = Sizes(intermediate=200, bias=True)
    tensors = sizes.tensors()
    source = DrafterCheckpoint.open(save_source(tmp_path / "source", sizes, tensors))
    layers = random_layers(tensors, sizes.linears())
    tunable = TunableDrafter(source, layers, "cpu")
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for factor in tunable.factors.values():
            factor.copy_(0.3 * torch.randn(factor.shape, generator=random))
    tuned = tunable.rounded()

    changed = {name: replace(layer, suh=tuned.suh[name], svh=tuned.svh[name]) for name, layer in layers.items()}
    out = write_quantized(tmp_path / "tuned", sizes, tensors | tuned.norms, changed)
    plain = write_quantized(tmp_path / "plain", sizes, tensors, layers)
    taps = torch.randn(CONTEXT_ROWS, sizes.taps * sizes.hidden, generator=random)
    block = torch.randn(4, sizes.hidden, generator=random)
    ours = our_hidden(out, taps, block)
    theirs = their_hidden(load(exllama, out), taps, block, monkeypatch)
    assert float((ours - theirs).norm() / ours.norm()) < TOLERANCE
    assert float((ours - our_hidden(plain, taps, block)).norm() / ours.norm()) > 10 * TOLERANCE
    expected = tunable.model  # holds the rounded values
    cache = expected.new_cache()
    expected.extend_context(cache, taps)
    assert torch.allclose(expected.draft(cache, block, CONTEXT_ROWS), ours, rtol=1e-3, atol=1e-4)

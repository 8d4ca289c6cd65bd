"""(c) A DFlash drafter in ExLlamaV3 against our torch drafter, on the same features: hidden states and logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.drafter.taps import tap_layer_indices
from exl3_dflash.runtime.engine import SamplingSettings, StopSettings
from exl3_dflash.runtime.exllama import ExllamaEngine
from exl3_dflash.target.exllama import ExllamaTarget

from .outcome import Findings

TEXT = "The old owl asks what the capital of the land is. "
CLOSE = 0.02  # relative; ExLlamaV3 keeps activations in FP16
SAME_CHOICES = 0.97


def prefixes_of(engine: ExllamaEngine, count: int = 8) -> list[list[int]]:
    """Token rows of several lengths."""
    tokens = engine.tokenizer.encode(TEXT) * 4
    return [tokens[start : start + 20 + 5 * start] for start in range(count)]


def compare_drafts(engine: ExllamaEngine, drafter: Path) -> Findings:
    """What both draft after some prefixes, from the features that ExLlamaV3's target exports.

    Args:
        engine: a loaded pair.
        drafter: the directory of its drafter.
    """
    target = engine._target
    prefixes = prefixes_of(engine)
    theirs = their_hidden(engine, prefixes)  # (N, B, H)
    ours = our_hidden(target, drafter, prefixes)
    logits = [target.head(hidden[:, 1:].to(target.dtype)).float() for hidden in (theirs, ours)]  # (N, B - 1, V)
    figures: dict[str, Any] = {
        "blocks": len(prefixes),
        "hidden_difference": _relative(theirs, ours),
        "logits_difference": _relative(*logits),
        "same_choices": float((logits[0].argmax(-1) == logits[1].argmax(-1)).float().mean()),
    }
    passed = figures["logits_difference"] < CLOSE and figures["same_choices"] >= SAME_CHOICES
    return passed, figures


def their_hidden(engine: ExllamaEngine, prefixes: Sequence[Sequence[int]]) -> torch.Tensor:
    """Final hidden states (N, B, H) of the blocks that ExLlamaV3 drafts after each prefix, float32."""
    assert engine._drafter is not None
    model, states = engine._drafter.loaded.model, []
    choose = model.sample_from_state

    def keep(state: torch.Tensor, *rest: Any, **options: Any) -> Any:
        states.append(state.float().clone())
        return choose(state, *rest, **options)

    model.sample_from_state = keep
    try:
        for prefix in prefixes:
            engine.reset()
            list(engine.generate(prefix, SamplingSettings(), StopSettings(1)))
    finally:
        del model.sample_from_state
    return torch.cat([state[:1] for state in states])


def our_hidden(target: ExllamaTarget, drafter: Path, prefixes: Sequence[Sequence[int]]) -> torch.Tensor:
    """The same by our torch drafter, float32, on the target's device."""
    checkpoint = DrafterCheckpoint.open(drafter)
    model = DrafterModel.from_checkpoint(checkpoint, dtype=torch.float32, device=target.device)
    hidden = []
    for prefix in prefixes:
        cache = model.new_cache()
        taps = target.tap_rows(torch.tensor(prefix[:-1]), tap_layer_indices(model.config)).taps
        model.extend_context(cache, taps.float())
        block = model.block_embeddings(target, torch.tensor(prefix[-1:], device=target.device))[0]
        hidden.append(model.draft(cache, block.float(), cache.length))
    return torch.stack(hidden)


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())

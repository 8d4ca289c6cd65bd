"""Tiny real pairs: targets from transformers and a DFlash drafter whose proposals can be guided to be often right.

A random drafter is never right, so that nothing would ever be accepted. `GuidedDrafter` runs the real drafter and its
cache, then replaces what it proposes by a known continuation, except for a share of positions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from exl3_dflash.drafter.cache import DrafterCache
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.drafter.selector import Proposal
from exl3_dflash.target.base import Target
from exl3_dflash.target.load import load_target
from tests.tiny_models import make_tiny_drafter
from tests.tiny_targets import MASK_ID, make_tiny_llama, make_tiny_qwen3_next

NEAR_TIE = 1e-3
LAYERS = 2  # fewer than the makers' own: the tests here run tens of thousands of forwards
TAPS = {"mask_token_id": MASK_ID, "target_layer_ids": [1, 0]}
MAKERS = {
    "llama": partial(make_tiny_llama, num_hidden_layers=LAYERS),
    "hybrid": partial(
        make_tiny_qwen3_next, num_hidden_layers=LAYERS, layer_types=["linear_attention", "full_attention"]
    ),
}


@dataclass(frozen=True)
class TinyPair:
    """A target, the transformers model of the same files, and a drafter."""

    target: Target
    model: Any
    drafter: GuidedDrafter

    def gap(self, ids: Sequence[int], first: int, second: int) -> float:
        """Distance of two tokens' logits after `ids`, from one forward without a cache."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([list(ids)])).logits[0, -1]
        return abs(float(logits[first] - logits[second]))

    def transformers_greedy(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """What transformers' own generate answers to prompts of one length."""
        ids = torch.tensor(prompts)
        options = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count, "eos_token_id": None}
        return self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, ids.shape[1] :].tolist()


class GuidedDrafter:
    """A `DrafterModel` that proposes `guide`, a whole sequence, but its own tokens at a share `noise` of places."""

    def __init__(self, model: DrafterModel, noise: float = 0.15) -> None:
        self.model = model
        self.config = model.config
        self.guide: Sequence[int] = ()
        self.noise = noise
        self._random = random.Random(0)
        self._start = 0

    def new_cache(self) -> DrafterCache:
        return self.model.new_cache()

    def extend_context(self, cache: DrafterCache, taps: torch.Tensor) -> None:
        self.model.extend_context(cache, taps)

    def block_embeddings(self, target: Target, anchors: torch.Tensor, rows: int | None = None) -> torch.Tensor:
        return self.model.block_embeddings(target, anchors, rows)

    def draft(self, cache: DrafterCache, embeddings: torch.Tensor, start: int) -> torch.Tensor:
        self._start = start
        return self.model.draft(cache, embeddings, start)

    def propose(self, target: Target, anchors: torch.Tensor, hidden: torch.Tensor) -> Proposal:
        proposal = self.model.propose(target, anchors, hidden)
        ids = proposal.ids.clone()  # (1, R)
        for row, token in enumerate(self.guide[self._start + 1 : self._start + 1 + ids.shape[1]]):
            if self._random.random() >= self.noise:
                ids[0, row] = token
        return Proposal(ids, proposal.logits)


def make_pair(directory: Path, family: str, **drafter: Any) -> TinyPair:
    """A pair of `family`, one of MAKERS, in FP32 on the CPU; `drafter` overrides its config's keys."""
    from transformers import AutoModelForCausalLM

    path = MAKERS[family](directory / family)
    drafter = {"dflash_config": TAPS, "num_target_layers": LAYERS, **drafter}
    checkpoint = DrafterCheckpoint.open(make_tiny_drafter(directory / f"{family}-drafter", **drafter))
    return TinyPair(
        target=load_target(path, device="cpu", dtype=torch.float32),
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(),
        drafter=GuidedDrafter(DrafterModel.from_checkpoint(checkpoint)),
    )


def random_prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(256) for _ in range(length)] for _ in range(count)]

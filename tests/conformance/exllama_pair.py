"""Pairs as ExLlamaV3 loads them and as our reference engine does, for tests that hold one against the other."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.runtime.engine import Engine, SamplingSettings, Step, StopSettings
from exl3_dflash.runtime.exllama import ExllamaEngine
from exl3_dflash.runtime.exllama_model import ExllamaDrafter, ExllamaSettings, load_models
from exl3_dflash.runtime.reference import ReferenceEngine
from exl3_dflash.target.exllama import ExllamaTarget
from exl3_dflash.target.load import load_target

GREEDY = SamplingSettings()
QUESTIONS = ("What is the capital?", "hello", "Tell me a story about the owl")


@dataclass(frozen=True)
class Theirs:
    """A pair in ExLlamaV3, on the CPU."""

    target: ExllamaTarget
    drafter: ExllamaDrafter | None

    def engine(self, draft_tokens: int | None = None, dynamic_draft: bool = False) -> ExllamaEngine:
        return ExllamaEngine(self.target, self.drafter, draft_tokens, dynamic_draft)


def load_theirs(
    library: types.ModuleType, target: Path, drafter: Path | None, settings: ExllamaSettings | None = None
) -> Theirs:
    """The pair in `library` (exllamav3 on the CPU); taps in FP32, so that nothing but ExLlamaV3 rounds them."""
    checkpoint = None if drafter is None else DrafterCheckpoint.open(drafter)
    model, loaded = load_models(library, target, checkpoint, torch.device("cpu"), settings or ExllamaSettings())
    return Theirs(ExllamaTarget(model, target, "demo", dtype=torch.float32), loaded)


def load_reference(target: Path, drafter: Path) -> ReferenceEngine:
    """The same pair in torch, FP32."""
    loaded = load_target(target, device="cpu", dtype=torch.float32)
    return ReferenceEngine(loaded, DrafterModel.from_checkpoint(DrafterCheckpoint.open(drafter)))


def prompts_of(engine: Engine, questions: Sequence[str] = QUESTIONS) -> list[list[int]]:
    """Questions in the target's chat template."""
    return [engine.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in questions]


def tokens_of(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.token_ids]


def aligned_steps(
    reference: Engine, theirs: Engine, prompt: Sequence[int], stops: StopSettings
) -> tuple[list[Step], list[Step]]:
    """The verify steps of both engines for one greedy answer, aligned.

    The reference draws its first token in the prefill and drafts from there; ExLlamaV3 drafts from the prompt's last
    token. With that first token moved to the end of its prompt, it has the same blocks to draft.
    """
    ours = list(reference.generate(prompt, GREEDY, stops))
    first = ours[0].token_ids
    rest = StopSettings(stops.max_new_tokens - 1, stops.token_ids, stops.strings)
    return ours[1:], list(theirs.generate([*prompt, *first], GREEDY, rest))[1:]

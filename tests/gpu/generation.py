"""(d) Greedy generation with a pair in ExLlamaV3: plain decoding's text, and the reference engine's acceptance."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from exl3_dflash.runtime.engine import Engine, SamplingSettings, StopSettings
from exl3_dflash.runtime.exllama import ExllamaEngine

from .outcome import Findings

QUESTIONS = ("What is the capital?", "hello", "Tell me a story about the owl", "Count from one to five.")
SAME_TEXT = 0.95  # share of tokens before the first difference; FP16 sums differ between one row and a block of them
ACCEPTANCE = 0.05  # relative difference to the reference engine


def prompts_of(engine: Engine) -> list[list[int]]:
    """Questions in the target's chat template."""
    return [engine.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in QUESTIONS]


def compare_generation(engine: ExllamaEngine, reference: Engine, new_tokens: int = 96) -> Findings:
    """Drafted against plain decoding in ExLlamaV3, and acceptance against the reference engine in FP32."""
    prompts = prompts_of(engine)
    drafted, lengths = _generate(engine, prompts, new_tokens)
    engine.draft_tokens = 0
    try:
        plain, _ = _generate(engine, prompts, new_tokens)
    finally:
        engine.draft_tokens = engine.max_draft_tokens
    expected, reference_lengths = _generate(reference, prompts, new_tokens)
    accept_length, wanted = statistics.fmean(lengths), statistics.fmean(reference_lengths)
    figures: dict[str, Any] = {
        "prompts": len(prompts),
        "same_as_plain": _common_share(drafted, plain),
        "same_as_reference": _common_share(drafted, expected),
        "accept_length": {"exllamav3": accept_length, "reference": wanted},
    }
    passed = figures["same_as_plain"] >= SAME_TEXT and abs(accept_length / wanted - 1.0) <= ACCEPTANCE
    return passed, figures


def _generate(engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[list[list[int]], list[float]]:
    """The tokens of every answer, and its accept length where there was one."""
    answers, lengths = [], []
    stops = StopSettings(new_tokens, frozenset(engine.tokenizer.eos_token_ids))
    for prompt in prompts:
        steps = list(engine.generate(prompt, SamplingSettings(), stops))
        answers.append([token for step in steps for token in step.token_ids])
        if engine.stats.accept_length is not None:
            lengths.append(engine.stats.accept_length)
    return answers, lengths


def _common_share(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> float:
    """Share of the tokens of `second` up to where `first` differs."""
    same = 0
    for ours, theirs in zip(first, second, strict=True):
        equal = [a == b for a, b in zip(ours, theirs, strict=False)]
        same += equal.index(False) if False in equal else len(equal)
    return same / sum(map(len, second))

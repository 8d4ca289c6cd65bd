"""Our sampling settings as ExLlamaV3's steps, in the order that `runtime.sampling` defines.

    repetition penalty -> temperature -> top-k -> top-p -> min-p -> draw        greedy: penalty -> most likely token

All three filters keep a head of the same ranking, so min-p may come first as long as no top-p measures the mass behind
it: ExLlamaV3 has one fused kernel for [temperature, min-p, top-k, top-p, draw] and runs other orders step by step. Ties
at a cut-off are kept there and cut here. Its random numbers are its own: a seed repeats an answer, not ours.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from exl3_dflash.runtime.engine import SamplingSettings


def make_sampler(library: ModuleType, settings: SamplingSettings) -> Any:
    """A new sampler of `library` (exllamav3) for one job."""
    steps = library.generator.sampler
    chain: list[Any] = []
    if settings.repetition_penalty != 1:
        chain.append(steps.SS_RepP(settings.repetition_penalty))
    if settings.greedy:
        return steps.CustomSampler([*chain, steps.SS_Argmax()])
    min_p = [steps.SS_MinP(settings.min_p)] if settings.min_p else []
    top_k = [steps.SS_TopK(settings.top_k)] if settings.top_k else []
    top_p = [steps.SS_TopP(settings.top_p)] if settings.top_p < 1 else []
    filters = [*top_k, *top_p, *min_p] if top_p and min_p else [*min_p, *top_k, *top_p]
    return steps.CustomSampler([*chain, steps.SS_Temperature(settings.temperature), *filters, steps.SS_Sample()])

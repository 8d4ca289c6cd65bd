"""Sampling settings in ExLlamaV3's own steps give the distribution that the reference engine draws from."""

from __future__ import annotations

import types
from typing import Any
from unittest import mock

import pytest
import torch

from exl3_dflash.runtime.engine import SamplingSettings
from exl3_dflash.runtime.exllama_sampling import make_sampler
from exl3_dflash.runtime.sampling import filtered_probabilities, penalized

pytestmark = pytest.mark.conformance

VOCABULARY = 40
SETTINGS = [
    SamplingSettings(1.0),
    SamplingSettings(0.6, top_k=5),
    SamplingSettings(1.4, top_p=0.7),
    SamplingSettings(0.8, min_p=0.1),
    SamplingSettings(0.7, top_k=12, top_p=0.8),
    SamplingSettings(1.2, top_k=20, min_p=0.05),
    SamplingSettings(1.5, top_p=0.85, min_p=0.08),
    SamplingSettings(1.5, top_k=25, top_p=0.9, min_p=0.06, repetition_penalty=1.4),
]


def their_probabilities(library: types.ModuleType, settings: SamplingSettings, logits: torch.Tensor, past: Any) -> Any:
    """What the last of its steps would draw from: probabilities (V,), by its step-by-step code."""
    from exllamav3.generator.sampler import custom

    with mock.patch.object(custom, "fused_sampler_enable", False):
        sampler = make_sampler(library, settings)
    state = custom.SamplingState(rand_u32=1, bsz=1, dim=VOCABULARY, in_logits=logits[None], past_ids=past)
    for step in sampler.steps[:-1]:
        step.run(state)
    assert type(sampler.steps[-1]).__name__ == "SS_Sample"
    scores = state.in_logits if state.logits is None else state.logits
    weights = scores.softmax(-1) if state.probs is None else state.probs / state.probs.sum()
    ordered = torch.zeros(VOCABULARY)
    return ordered.scatter(0, state.indices[0], weights[0]) if state.indices is not None else weights[0]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_its_steps_give_our_distribution(generator_library: types.ModuleType, settings: SamplingSettings) -> None:
    past = torch.tensor([[3, 7, 7, 20]])
    seen = torch.zeros(VOCABULARY, dtype=torch.bool)
    seen[past[0]] = True
    for seed in range(5):
        logits = 2 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))
        ours = filtered_probabilities(penalized(logits, seen, settings.repetition_penalty), settings)
        theirs = their_probabilities(generator_library, settings, logits, past)
        torch.testing.assert_close(theirs.double(), ours, atol=1e-5, rtol=1e-4)
        assert torch.equal(theirs > 0, ours > 0)


def test_one_kernel_draws_unless_min_p_must_follow_top_p(generator_library: types.ModuleType) -> None:
    for settings in SETTINGS:
        sampler = make_sampler(generator_library, settings)
        kinds = [type(step).__name__ for step in sampler.steps]
        assert (kinds[-1] == "SS_Fused") == (not (settings.top_p < 1 and settings.min_p > 0))
        assert sampler.reqs_past_ids == (settings.repetition_penalty != 1)


def test_greedy_takes_the_most_likely_token(generator_library: types.ModuleType) -> None:
    logits = torch.randn(1, 1, VOCABULARY, generator=torch.Generator().manual_seed(1))
    sampler = make_sampler(generator_library, SamplingSettings(top_k=3, top_p=0.5, seed=4))
    assert sampler.forward(logits.clone(), None, 7).item() == logits.argmax()
    penalty = make_sampler(generator_library, SamplingSettings(repetition_penalty=50.0))
    best = int(logits.argmax())
    assert penalty.forward(logits.clone(), torch.tensor([[best]]), 7).item() != best

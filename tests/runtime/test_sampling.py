"""Filters against brute force, settings, and the distribution of drafted against plain sampling."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.runtime.engine import SamplingSettings, StopSettings
from exl3_dflash.runtime.reference import ReferenceEngine
from exl3_dflash.runtime.sampling import Sampler, filtered_probabilities
from tests.runtime.chi_square import chi_square_p
from tests.runtime.fakes import NoisyDrafter, TableTarget

SAMPLES = 20_000
FILTERS = {
    "temperature": SamplingSettings(temperature=1, seed=1),
    "top_p_and_top_k": SamplingSettings(temperature=1, top_k=5, top_p=0.8, seed=2),
    "all": SamplingSettings(temperature=0.8, top_k=6, top_p=0.9, min_p=0.05, seed=4),
}


def brute_force_probabilities(logits: list[float], settings: SamplingSettings) -> list[float]:
    """The filters of the module docstring, one token at a time."""
    weights = [math.exp(logit / settings.temperature) for logit in logits]
    kept = {token: weight / sum(weights) for token, weight in enumerate(weights)}
    ranked = sorted(kept, key=lambda token: -kept[token])
    if settings.top_k:
        ranked = ranked[: settings.top_k]
    total, before, nucleus = sum(kept[token] for token in ranked), 0.0, []
    for token in ranked:
        if before < settings.top_p * total:
            nucleus.append(token)
        before += kept[token]
    strong = [token for token in nucleus if kept[token] >= settings.min_p * kept[ranked[0]]]
    total = sum(kept[token] for token in strong)
    return [kept[token] / total if token in strong else 0.0 for token in range(len(logits))]


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.integers(-40, 40).map(lambda step: step * 0.1173), min_size=2, max_size=12, unique=True),
    settings_=st.builds(
        SamplingSettings,
        temperature=st.sampled_from([0.3, 1.0, 2.5]),
        top_k=st.integers(0, 13),
        top_p=st.sampled_from([0.01, 0.333, 0.77, 1.0]),
        min_p=st.sampled_from([0.0, 0.0371, 0.51, 1.0]),
    ),
)
def test_filters_equal_brute_force(logits: list[float], settings_: SamplingSettings) -> None:
    actual = filtered_probabilities(torch.tensor(logits, dtype=torch.float64), settings_)
    assert actual.tolist() == pytest.approx(brute_force_probabilities(logits, settings_), abs=1e-12)


@pytest.mark.parametrize(("name", "drafted"), [*((name, True) for name in FILTERS), ("all", False)])
def test_chain_follows_the_exact_distribution(name: str, drafted: bool) -> None:
    """Every transition of 20,000 drawn tokens against the table's own filtered probabilities."""
    size, chosen = 8, FILTERS[name]
    target = TableTarget(size, seed=5)
    target.table[:] = target.table[0]  # the last token alone decides
    engine = ReferenceEngine(target, NoisyDrafter(target, noise=0.2) if drafted else None)
    tokens = [0] + [token for step in engine.generate([0], chosen, StopSettings(SAMPLES)) for token in step.token_ids]
    transitions = Counter(itertools.pairwise(tokens))
    assert engine.stats.new_tokens == SAMPLES
    if drafted:
        assert engine.stats.accepted > SAMPLES / 5
    values = []
    for state in range(size):
        counts = torch.tensor([transitions[state, token] for token in range(size)])
        if counts.sum():
            values.append(chi_square_p(counts, filtered_probabilities(target.table[0, state], chosen)))
    assert min(values) > 1e-3 / len(values)


def test_chi_square_sees_a_wrong_distribution() -> None:
    """The power of the test above: equality with a sampled draft's argmax kept too often would be found."""
    right = torch.tensor([0.5, 0.3, 0.2])
    generator = torch.Generator().manual_seed(0)
    draws = torch.multinomial(torch.tensor([0.54, 0.28, 0.18]), SAMPLES, replacement=True, generator=generator)
    assert chi_square_p(torch.bincount(draws), right) < 1e-6
    draws = torch.multinomial(right, SAMPLES, replacement=True, generator=generator)
    assert 1e-3 < chi_square_p(torch.bincount(draws), right) <= 1
    assert chi_square_p(torch.tensor([1, 1]), torch.tensor([1.0, 0.0])) == 0


def test_repetition_penalty_counts_the_prompt_and_accepted_drafts() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0], [2.0, 1.9, -1.0], [2.0, 1.9, -1.0]])
    sampler = Sampler(SamplingSettings(repetition_penalty=1.5), prompt=[0])
    assert sampler.verify(logits, [1, 0]) == [1, 0, 0]
    assert Sampler(SamplingSettings(), prompt=[0]).verify(logits, [1, 0]) == [0]
    assert (
        Sampler(SamplingSettings(repetition_penalty=4.0), prompt=[0, 1]).sample(torch.tensor([-1.0, -2.0, -3.5])) == 2
    )


def test_seed_repeats_a_request_and_none_does_not() -> None:
    target = TableTarget(9, sharpness=0.1)
    engine = ReferenceEngine(target, NoisyDrafter(target))

    def draw(seed: int | None) -> list[int]:
        steps = engine.generate([1], SamplingSettings(temperature=1, seed=seed), StopSettings(40))
        return [token for step in steps for token in step.token_ids]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert draw(None) != draw(None)


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((5,), -torch.inf)
    logits[2] = 0.0
    sampler = Sampler(SamplingSettings(temperature=1, seed=0), prompt=[0])
    assert {sampler.sample(logits) for _ in range(50)} == {2}


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_logits_are_refused(greedy: bool, value: float) -> None:
    sampler = Sampler(SamplingSettings(temperature=0.0 if greedy else 1.0), prompt=[0])
    with pytest.raises(Exl3DflashError, match="non-finite logits"):
        sampler.verify(torch.tensor([[0.0, value], [0.0, 1.0]]), [1])


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("seed", -1),
    ],
)
def test_settings_out_of_range_name_the_setting(setting: str, value: float) -> None:
    with pytest.raises(Exl3DflashError, match=f"{setting} is .*expected .*fix"):
        SamplingSettings(**{setting: value})


def test_stop_settings_are_checked() -> None:
    for wrong in ({"max_new_tokens": 0}, {"token_ids": frozenset({-1})}, {"strings": ("",)}):
        with pytest.raises(Exl3DflashError):
            StopSettings(**wrong)

"""Greedy drafted text equals plain text, with real tiny targets (attention and hybrid recurrent) and a real drafter.

Plain text comes from transformers' own generate and, for some prompts, from the engine without a drafter. Where a
drafted text differs, the two tokens' logits at the first difference must be a numerical near-tie in a forward of its
own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from exl3_dflash.drafter.taps import tap_layer_indices
from exl3_dflash.runtime.engine import SamplingSettings, StopSettings
from exl3_dflash.runtime.reference import ReferenceEngine
from tests.runtime.tiny_pairs import MAKERS, NEAR_TIE, TinyPair, make_pair, random_prompts

PROMPTS, PROMPT_LENGTH, NEW_TOKENS = 50, 12, 128


@pytest.fixture(scope="module", params=MAKERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyPair]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make_pair(tmp_path_factory.mktemp("pair"), request.param, block_size=8)
    torch.set_num_threads(threads)


def generate(engine: ReferenceEngine, ids: Sequence[int], count: int) -> list[int]:
    steps = engine.generate(ids, SamplingSettings(), StopSettings(count))
    return [token for step in steps for token in step.token_ids]


def drafted(pair: TinyPair, engine: ReferenceEngine, ids: Sequence[int], guide: Sequence[int], count: int) -> list[int]:
    pair.drafter.guide = [*ids, *guide]
    return generate(engine, ids, count)


def assert_same_text(pair: TinyPair, ids: Sequence[int], first: Sequence[int], second: Sequence[int]) -> None:
    """Equal, or different from a near-tie on."""
    assert len(first) == len(second)
    for at, (one, other) in enumerate(zip(first, second, strict=True)):
        if one != other:
            assert pair.gap([*ids, *first[:at]], one, other) < NEAR_TIE
            return


def test_fifty_prompts_equal_transformers(pair: TinyPair) -> None:
    engine = ReferenceEngine(pair.target, pair.drafter)
    prompts = random_prompts(PROMPTS, PROMPT_LENGTH)
    plain = pair.transformers_greedy(prompts, NEW_TOKENS)
    lengths = []
    for ids, expected in zip(prompts, plain, strict=True):
        assert_same_text(pair, ids, drafted(pair, engine, ids, expected, NEW_TOKENS), expected)
        lengths.append(engine.stats.accept_length)
    assert 3 < sum(lengths) / len(lengths) < 7


def test_plain_engine_equals_transformers(pair: TinyPair) -> None:
    prompts = random_prompts(4, PROMPT_LENGTH)
    engine = ReferenceEngine(pair.target)
    for ids, expected in zip(prompts, pair.transformers_greedy(prompts, 60), strict=True):
        assert_same_text(pair, ids, generate(engine, ids, 60), expected)


def check_context(pair: TinyPair, engine: ReferenceEngine) -> None:
    """The drafter's cached context equals one made at once from a forward without a cache."""
    ids = engine._session.ids
    fresh = pair.drafter.new_cache()
    with torch.inference_mode():
        taps = pair.target.tap_rows(torch.tensor(ids), tap_layer_indices(pair.drafter.config)).taps
        pair.drafter.extend_context(fresh, taps)
    assert engine._cache.length == len(ids)
    for layer in range(pair.drafter.config.num_layers):
        for ours, right in zip(engine._cache.rows(layer, 0, len(ids)), fresh.rows(layer, 0, len(ids)), strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-3, atol=1e-3)


def test_requests_of_one_session_equal_fresh_ones(pair: TinyPair) -> None:
    """Second turn, the same prompt twice, a shorter prompt, another prompt, and drafting switched off between."""
    engine = ReferenceEngine(pair.target, pair.drafter)
    first, other = random_prompts(2, 20, seed=1)
    answer = pair.transformers_greedy([first], 24)[0]
    turns = [
        (first, 5, 0),
        ([*first, *answer, 7, 8, 9], 5, 20 + 23),
        ([*first, *answer, 7, 8, 9], 5, 20 + 24 + 2),
        (first[:9], 3, 8),
        ([*first[:9], *other], 0, 9),
        ([*first[:9], *other, 3], 5, 9),
        (other, 5, 0),
    ]
    for ids, draft_tokens, reused in turns:
        engine.draft_tokens = draft_tokens
        expected = pair.transformers_greedy([ids], 24)[0]
        assert_same_text(pair, ids, drafted(pair, engine, ids, expected, 24), expected)
        assert engine.stats.reused_tokens == reused
        if draft_tokens:
            check_context(pair, engine)


def test_unguided_drafter_changes_nothing_either(pair: TinyPair) -> None:
    ids = random_prompts(1, PROMPT_LENGTH, seed=2)[0]
    expected = pair.transformers_greedy([ids], 30)[0]
    assert_same_text(pair, ids, drafted(pair, ReferenceEngine(pair.target, pair.drafter), ids, (), 30), expected)

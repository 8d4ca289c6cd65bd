"""Derived numbers and the detection of repeated text."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl3_dflash.runtime.stats import LOOPING_TOKENS, GenerationStats, longest_repeated_run


def brute_force_run(ids: list[int]) -> int:
    """Longest slice that is a unit repeated at least three times, the last repetition possibly cut."""
    best = 0
    for start in range(len(ids)):
        for period in range(1, (len(ids) - start) // 3 + 1):
            end = start + period
            while end < len(ids) and ids[end] == ids[end - period]:
                end += 1
            if end - start >= 3 * period:
                best = max(best, end - start)
    return best


@given(st.lists(st.integers(0, 2), max_size=40))
def test_repeated_run_equals_brute_force(ids: list[int]) -> None:
    assert longest_repeated_run(ids) == brute_force_run(ids)


@pytest.mark.parametrize(
    ("ids", "run"),
    [([], 0), ([1, 2, 3], 0), ([5, 5, 5], 3), ([1, 2, 1, 2, 1, 2, 1], 7), ([9, 1, 2, 1, 2], 0), ([4] * 50, 50)],
)
def test_repeated_run_examples(ids: list[int], run: int) -> None:
    assert longest_repeated_run(ids) == run


def test_looping_text_is_flagged_and_prose_is_not() -> None:
    generator = random.Random(0)
    prose = [generator.randrange(500) for _ in range(2000)]
    assert not GenerationStats(repeated_run=longest_repeated_run(prose)).looping
    looping = prose[:50] + [1, 2, 3, 4, 5] * (LOOPING_TOKENS // 5 + 1)
    assert GenerationStats(repeated_run=longest_repeated_run(looping)).looping


def test_numbers_without_steps_are_none() -> None:
    stats = GenerationStats(new_tokens=1)
    assert (stats.accept_length, stats.accept_rate, stats.tokens_per_second) == (None, None, None)


def test_prefill_token_is_in_no_ratio() -> None:
    stats = GenerationStats(new_tokens=13, verify_steps=4, proposed=20, accepted=8, prefill_seconds=9, decode_seconds=3)
    assert stats.accept_length == 3
    assert stats.accept_rate == 0.4
    assert stats.tokens_per_second == 4
    assert stats.time_to_first_token == 9

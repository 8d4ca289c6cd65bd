"""Real runs compared: the baseline never drafts, ratio and length are apart, looping is seen, break-even is shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from exl3_dflash.measure.generation import compare_engines
from exl3_dflash.runtime.engine import GenerationStats, SamplingSettings, Step, StopSettings

STOPS = StopSettings(max_new_tokens=40)
NORMAL = [token * 7 % 101 for token in range(40)]


class ScriptedEngine:
    """Emits fixed tokens in steps of a fixed size that take a fixed time; counts as the real engines do."""

    tokenizer = None

    def __init__(self, tokens: list[int], step: int, seconds: float, proposed: int) -> None:
        self.tokens, self.step, self.seconds, self.proposed = tokens, step, seconds, proposed
        self.stats = GenerationStats()
        self.resets = 0
        self.seen: list[SamplingSettings] = []

    def reset(self) -> None:
        self.resets += 1

    def generate(self, ids: Sequence[int], sampling: SamplingSettings, stops: StopSettings) -> Iterator[Step]:
        self.seen.append(sampling)
        self.stats = GenerationStats(prompt_tokens=len(ids))
        tokens = self.tokens[: stops.max_new_tokens]
        self.stats.new_tokens = 1
        yield Step((tokens[0],), 0, 0, 0.01, "prefill")
        for start in range(1, len(tokens), self.step):
            part = tuple(tokens[start : start + self.step])
            self.stats.new_tokens += len(part)
            self.stats.decode_seconds += self.seconds
            if self.proposed:
                self.stats.verify_steps += 1
                self.stats.proposed += self.proposed
                self.stats.accepted += len(part) - 1
            yield Step(part, self.proposed, len(part) - 1, self.seconds, "verify" if self.proposed else "decode")
        from exl3_dflash.runtime.stats import longest_repeated_run

        self.stats.repeated_run = longest_repeated_run(tokens)


def compare(drafted: ScriptedEngine, baseline: ScriptedEngine | None = None, sampling: SamplingSettings | None = None):
    engines = {"plain": baseline or ScriptedEngine(NORMAL, 1, 0.010, 0), "drafted": drafted}
    return compare_engines(engines, [[1, 2], [3, 4, 5]], sampling or SamplingSettings(), STOPS)  # type: ignore[arg-type]


def test_length_and_rate_are_different_numbers_and_the_baseline_has_neither() -> None:
    """FIELD_REPORTS 22: ratio and length mixed up; a baseline that still ran the drafter."""
    plain, drafted = compare(ScriptedEngine(NORMAL, 3, 0.015, 7))
    assert (plain.accept_length, plain.accept_rate, plain.speedup) == (None, None, 1.0)
    assert drafted.accept_length == pytest.approx(39 / 13)
    assert drafted.accept_rate == pytest.approx(26 / 91)
    assert drafted.speedup == pytest.approx(39 / (13 * 0.015) / 100)
    assert drafted.identical == 2


def test_a_drafter_that_accepts_well_and_is_slow_shows_its_break_even() -> None:
    """FIELD_REPORTS 23: accept length 3, and slower than without: a step costs four plain tokens."""
    plain, drafted = compare(ScriptedEngine(NORMAL, 3, 0.040, 7))
    assert drafted.accept_length == pytest.approx(3)
    assert drafted.speedup < 1
    assert drafted.break_even_accept_length == pytest.approx(4)
    assert drafted.accept_length / drafted.break_even_accept_length == pytest.approx(drafted.speedup)
    assert plain.break_even_accept_length is None


def test_looping_output_is_counted() -> None:
    """FIELD_REPORTS 22: headline speed from looping text."""
    plain, drafted = compare(ScriptedEngine([5, 6] * 20, 3, 0.01, 7))
    assert (plain.looping, drafted.looping) == (0, 2)
    assert drafted.identical == 0


def test_every_engine_gets_the_same_sampling_and_an_empty_cache() -> None:
    """FIELD_REPORTS 22: temperature ignored; FIELD_REPORTS 10: caches of an earlier request."""
    baseline, drafted = ScriptedEngine(NORMAL, 1, 0.01, 0), ScriptedEngine(NORMAL, 3, 0.01, 7)
    warm = SamplingSettings(temperature=0.7, seed=3)
    compare(drafted, baseline, warm)
    for engine in (baseline, drafted):
        assert engine.resets == len(engine.seen) == 3  # a warm-up and two prompts
        assert set(map(id, engine.seen)) == {id(warm)}

"""The draft-verify-accept loop against plain decoding, on table targets: text, counters, stops and cache reuse."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exl3_dflash.drafter.selector import Proposal
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.runtime import reference
from exl3_dflash.runtime.engine import SamplingSettings, Step, StopSettings
from exl3_dflash.runtime.reference import ReferenceEngine
from tests.runtime.fakes import NoisyDrafter, TableTarget

GREEDY = SamplingSettings()


def tokens_of(steps: Sequence[Step]) -> list[int]:
    return [token for step in steps for token in step.token_ids]


def generate(
    engine: ReferenceEngine,
    ids: Sequence[int],
    count: int = 40,
    sampling: SamplingSettings = GREEDY,
    stop_ids: Sequence[int] = (),
    stop_strings: Sequence[str] = (),
) -> list[int]:
    return tokens_of(
        list(engine.generate(ids, sampling, StopSettings(count, frozenset(stop_ids), tuple(stop_strings))))
    )


def pair(size: int = 7, noise: float = 0.3, **target: object) -> tuple[TableTarget, ReferenceEngine]:
    model = TableTarget(size, **target)
    return model, ReferenceEngine(model, NoisyDrafter(model, noise=noise))


samplings = st.builds(
    SamplingSettings,
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 1, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    seed=st.integers(0, 1000),
)


@settings(max_examples=120, deadline=None)
@given(
    table=st.integers(0, 10**6),
    noise=st.sampled_from([0.0, 0.2, 0.6, 1.0]),
    block=st.integers(2, 7),
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    count=st.integers(1, 40),
    stop_ids=st.sets(st.integers(0, 4), max_size=1),
    stop_strings=st.lists(st.text("abcde", min_size=1, max_size=3), max_size=2),
    sampling=samplings,
)
def test_any_drafter_gives_the_plain_text(
    table: int,
    noise: float,
    block: int,
    prompt: list[int],
    count: int,
    stop_ids: set[int],
    stop_strings: list[str],
    sampling: SamplingSettings,
) -> None:
    target = TableTarget(5, seed=table)
    plain = generate(ReferenceEngine(target), prompt, count, sampling, stop_ids, stop_strings)
    drafted = ReferenceEngine(target, NoisyDrafter(target, block, noise))
    for _ in range(2):
        assert generate(drafted, prompt, count, sampling, stop_ids, stop_strings) == plain
    stats = drafted.stats
    assert stats.new_tokens == len(plain) <= count
    assert 0 <= stats.accepted <= stats.proposed
    assert stats.decoded_tokens == len(plain) - 1 <= stats.accepted + stats.verify_steps
    if stats.stop_reason == "length":
        assert len(plain) == count
    if stats.stop_reason == "token":
        assert plain[-1] in stop_ids
    assert not set(plain[:-1]) & stop_ids


def test_perfect_drafter_has_the_full_accept_length() -> None:
    target, engine = pair(noise=0.0)
    steps = list(engine.generate([2, 3], GREEDY, StopSettings(21)))
    assert tokens_of(steps) == target.greedy([2, 3], 21)
    assert [step.phase for step in steps] == ["prefill"] + ["verify"] * 4
    assert [len(step.token_ids) for step in steps] == [1, 5, 5, 5, 5]
    assert [(step.proposed, step.accepted) for step in steps[1:]] == [(4, 4)] * 4
    assert engine.stats.accept_length == 5
    assert engine.stats.accept_rate == 1


def test_drafts_fewer_tokens_near_the_limit() -> None:
    _, engine = pair(noise=0.0)
    steps = list(engine.generate([2, 3], GREEDY, StopSettings(9)))
    assert [(len(step.token_ids), step.proposed) for step in steps] == [(1, 0), (5, 4), (3, 2)]
    steps = list(engine.generate([2, 3], GREEDY, StopSettings(7)))
    assert [(len(step.token_ids), step.proposed) for step in steps] == [(1, 0), (5, 4), (1, 0)]
    assert engine.stats.accept_length == 6 / 2


def test_counters_follow_the_definitions() -> None:
    target, engine = pair(noise=0.5)
    steps = list(engine.generate([1, 2, 3], GREEDY, StopSettings(60)))
    stats, verify = engine.stats, steps[1:]
    assert stats.prompt_tokens == 3
    assert stats.verify_steps == len(verify) == len(target.session.forwards) - 1
    assert stats.accept_length == pytest.approx(59 / len(verify))
    assert stats.accept_rate == pytest.approx(sum(s.accepted for s in verify) / sum(s.proposed for s in verify))
    assert stats.prefill_seconds == stats.time_to_first_token == steps[0].seconds
    assert stats.decode_seconds == pytest.approx(sum(step.seconds for step in verify))
    assert stats.tokens_per_second == pytest.approx(59 / stats.decode_seconds)
    assert all(step.accepted == len(step.token_ids) - 1 for step in verify)


def test_accepted_tokens_behind_a_stop_do_not_count() -> None:
    target, engine = pair(size=40, noise=0.0)
    plain = target.greedy([2, 3], 30)
    stop = next(at for at in range(2, 5) if plain[at] not in plain[:at])
    steps = list(engine.generate([2, 3], GREEDY, StopSettings(30, frozenset({plain[stop]}))))
    assert tokens_of(steps) == plain[: stop + 1]
    assert (steps[-1].proposed, steps[-1].accepted) == (4, stop)
    assert engine.stats.accept_length == stop
    assert engine.stats.stop_reason == "token"
    assert target.session.ids == [2, 3, *plain[:stop]]


def test_first_token_may_stop_the_answer() -> None:
    target, engine = pair()
    first = target.greedy([2, 3], 1)
    assert generate(engine, [2, 3], 30, stop_ids=first) == first
    assert (engine.stats.verify_steps, engine.stats.accept_length, engine.stats.accept_rate) == (0, None, None)
    assert generate(engine, [2, 3], 1) == first
    assert engine.stats.stop_reason == "length"


def test_stop_string_ends_the_answer_at_its_last_token() -> None:
    target, engine = pair(noise=0.0)
    plain = target.greedy([2, 3], 30)
    text = target.tokenizer.decode(plain)
    stop = text[2:5]
    end = text.index(stop) + len(stop)
    assert generate(engine, [2, 3], 30, stop_strings=[stop]) == plain[:end]
    assert engine.stats.stop_reason == "string"


@pytest.mark.parametrize("causal", [True, False])
def test_only_a_causal_block_is_shortened(causal: bool) -> None:
    target = TableTarget(7)
    drafter = NoisyDrafter(target, block_size=6, noise=0.2, causal=causal)
    engine = ReferenceEngine(target, drafter, draft_tokens=2)
    assert generate(engine, [1, 2], 20) == target.greedy([1, 2], 20)
    assert max(target.session.forwards) == 3
    assert set(drafter.block_rows[:-1]) == ({3} if causal else {6})


def test_plain_decoding_never_runs_the_drafter() -> None:
    target = TableTarget(7)
    drafter = NoisyDrafter(target)
    engine = ReferenceEngine(target, drafter, draft_tokens=0)
    calls = drafter.calls
    steps = list(engine.generate([1, 2], GREEDY, StopSettings(20)))
    assert drafter.calls == calls
    assert target.session.tap_requests == [False] * 20
    assert {step.phase for step in steps[1:]} == {"decode"}
    stats = engine.stats
    assert (stats.verify_steps, stats.decode_steps, stats.proposed, stats.accept_length) == (0, 19, 0, None)


class TestPrefixReuse:
    """Several requests on one engine: caches hold what the tokens say, and only what is new is run."""

    def test_second_turn(self) -> None:
        target, engine = pair()
        first = generate(engine, [1, 2, 3], 20)
        second = [1, 2, 3, *first, 4, 5]
        assert generate(engine, second, 20) == target.greedy(second, 20)
        assert engine.stats.reused_tokens == 3 + 19

    def test_same_prompt_twice(self) -> None:
        target, engine = pair()
        prompt = [3, 1, 4, 1, 5]
        assert generate(engine, prompt) == generate(engine, prompt) == target.greedy(prompt, 40)
        assert engine.stats.reused_tokens == 4

    def test_shorter_second_prompt(self) -> None:
        target, engine = pair()
        generate(engine, [3, 1, 4, 1, 5, 6])
        assert generate(engine, [3, 1, 4]) == target.greedy([3, 1, 4], 40)
        assert engine.stats.reused_tokens == 2
        assert generate(engine, [6]) == target.greedy([6], 40)
        assert engine.stats.reused_tokens == 0

    def test_drafting_on_and_off_between_requests(self) -> None:
        target, engine = pair()
        prompt = [1, 2, 3, 4]
        for draft_tokens in (4, 0, 2, 0, 0, 4):
            engine.draft_tokens = draft_tokens
            answer = generate(engine, prompt, 12)
            assert answer == target.greedy(prompt, 12)
            prompt = [*prompt, *answer, draft_tokens]

    def test_long_prompt_is_run_in_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reference, "PREFILL_ROWS", 8)
        target, engine = pair()
        prompt = [at % 7 for at in range(19)]
        assert generate(engine, prompt, 8) == target.greedy(prompt, 8)
        assert target.session.forwards[:3] == [8, 8, 3]

    def test_reset_forgets(self) -> None:
        _, engine = pair()
        generate(engine, [1, 2, 3])
        engine.reset()
        generate(engine, [1, 2, 3])
        assert engine.stats.reused_tokens == 0

    def test_interrupted_answer(self) -> None:
        target, engine = pair()
        steps = engine.generate([1, 2, 3], GREEDY, StopSettings(50))
        shown = tokens_of(list(itertools.islice(steps, 4)))
        steps.close()
        assert engine.stats.stop_reason == "interrupted"
        assert shown == target.greedy([1, 2, 3], len(shown))
        assert generate(engine, [1, 2, 3, *shown, 5], 9) == target.greedy([1, 2, 3, *shown, 5], 9)

    def test_failure_inside_a_forward_drops_the_caches(self) -> None:
        target, engine = pair()
        steps = engine.generate([1, 2, 3], GREEDY, StopSettings(50))
        next(steps)

        def interrupt() -> None:
            raise KeyboardInterrupt

        target.before_forward = interrupt
        with pytest.raises(KeyboardInterrupt):
            next(steps)
        target.before_forward = lambda: None
        assert generate(engine, [1, 2, 3]) == target.greedy([1, 2, 3], 40)
        assert engine.stats.reused_tokens == 0


def test_context_limit_ends_the_answer() -> None:
    target, engine = pair(context=16)
    assert generate(engine, [1, 2, 3], 100) == target.greedy([1, 2, 3], 13)
    assert engine.stats.stop_reason == "context"
    assert engine.context_limit == 16
    with pytest.raises(Exl3DflashError, match="context is full: the prompt has 16 tokens"):
        engine.generate([1] * 16, GREEDY, StopSettings())


def test_wrong_prompts_and_settings() -> None:
    target, engine = pair()
    for ids, message in (([], "no tokens"), ([1, 7], "token id 7; expected ids 0 to 6"), ([-1], "token id -1")):
        with pytest.raises(Exl3DflashError, match=message):
            engine.generate(ids, GREEDY, StopSettings())
    with pytest.raises(Exl3DflashError, match="draft tokens: 5; expected 0 to 4"):
        engine.draft_tokens = 5
    with pytest.raises(Exl3DflashError, match="no drafter is loaded"):
        ReferenceEngine(target, None, draft_tokens=1)
    engine._drafter.propose = lambda _target, _anchors, hidden: Proposal(hidden.argmax(-1), hidden * torch.nan)
    with pytest.raises(Exl3DflashError, match="the drafter produced non-finite logits"):
        generate(engine, [1, 2])
    target.table[:] = torch.nan
    with pytest.raises(Exl3DflashError, match="the target produced non-finite logits"):
        generate(engine, [1, 2])

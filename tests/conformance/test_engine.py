"""ExLlamaV3's own generator, on a CPU with stand-ins for its kernels, behind our engine, and the reference engine."""

from __future__ import annotations

import types
from collections import Counter
from contextlib import closing

import pytest
import torch

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.runtime.engine import SamplingSettings, Step, StopSettings
from exl3_dflash.runtime.exllama import ExllamaEngine, GenerationRequest
from exl3_dflash.runtime.exllama_model import ExllamaSettings
from exl3_dflash.runtime.reference import ReferenceEngine
from tests.demo_pair import demo_directories

from .exllama_pair import GREEDY, Theirs, aligned_steps, load_reference, load_theirs, prompts_of, tokens_of

pytestmark = pytest.mark.conformance

COUNT = 32


@pytest.fixture(scope="module")
def theirs(generator_library: types.ModuleType) -> Theirs:
    return load_theirs(generator_library, *demo_directories())


@pytest.fixture(scope="module")
def reference() -> ReferenceEngine:
    return load_reference(*demo_directories())


@pytest.fixture
def engine(theirs: Theirs) -> ExllamaEngine:
    return theirs.engine()


def stops_of(engine: ExllamaEngine, count: int = COUNT) -> StopSettings:
    return StopSettings(count, frozenset(engine.tokenizer.eos_token_ids))


def facts(steps: list[Step]) -> list[tuple[tuple[int, ...], int, int, str]]:
    return [(step.token_ids, step.proposed, step.accepted, step.phase) for step in steps]


def test_every_step_is_the_reference_engines(engine: ExllamaEngine, reference: ReferenceEngine) -> None:
    """Tokens and accepted drafts, step by step; the last steps before a limit may propose more there, not emit more."""
    lengths = []
    for prompt in prompts_of(engine):
        ours, given = aligned_steps(reference, engine, prompt, stops_of(engine))
        assert [step.token_ids for step in given] == [step.token_ids for step in ours]
        free = [k for k, step in enumerate(ours) if step.proposed == reference.max_draft_tokens]
        assert facts([given[k] for k in free]) == facts([ours[k] for k in free])
        assert all(step.proposed == engine.max_draft_tokens for step in given)
        assert engine.stats.verify_steps == len(given) == reference.stats.verify_steps
        assert engine.stats.accept_length == pytest.approx(engine.stats.new_tokens / len(given))
        lengths.append(engine.stats.accept_length)
    assert max(length or 0 for length in lengths) > 2


def test_a_drafted_stop_token_counts_as_accepted(engine: ExllamaEngine, reference: ReferenceEngine) -> None:
    found = 0
    for prompt in prompts_of(engine):
        ours, _ = aligned_steps(reference, engine, prompt, stops_of(engine))
        for step in ours:
            if step.accepted < 1 or found == 2:
                continue
            stops = StopSettings(COUNT, frozenset([step.token_ids[step.accepted - 1]]))
            expected, given = aligned_steps(reference, engine, prompt, stops)
            if not expected or expected[-1].proposed < engine.max_draft_tokens:
                continue
            assert facts(given) == facts(expected)
            assert engine.stats.stop_reason == reference.stats.stop_reason == "token"
            for name in ("proposed", "accepted"):
                assert getattr(engine.stats, name) == getattr(reference.stats, name)
            found += expected[-1].accepted == len(expected[-1].token_ids)
    assert found


def test_counts_agree_with_what_the_generator_counts(engine: ExllamaEngine) -> None:
    request = engine.submit(prompts_of(engine)[0], GREEDY, StopSettings(COUNT))
    while not request.finished:
        engine.step()
    job = request.job
    assert request.stats.proposed == job.accepted_draft_tokens + job.rejected_draft_tokens
    assert request.stats.accepted - job.accepted_draft_tokens in (0, 1)  # the last token, if it was drafted
    assert request.stats.verify_steps == len(job.draft_stats)


def test_the_prefill_is_a_step_without_a_token(engine: ExllamaEngine) -> None:
    steps = list(engine.generate(prompts_of(engine)[0], GREEDY, StopSettings(8)))
    assert (steps[0].phase, steps[0].token_ids, steps[0].proposed) == ("prefill", (), 0)
    stats = engine.stats
    assert stats.decoded_tokens == stats.new_tokens == 8
    assert stats.time_to_first_token == pytest.approx(steps[0].seconds + steps[1].seconds)
    assert stats.decode_seconds == pytest.approx(sum(step.seconds for step in steps[1:]))


def test_plain_decoding_gives_the_same_text_and_never_runs_the_drafter(
    theirs: Theirs, engine: ExllamaEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompts_of(engine)[2]
    drafted = tokens_of(list(engine.generate(prompt, GREEDY, stops_of(engine))))
    assert theirs.drafter is not None
    for name in ("forward", "update_kv_from_target", "sample_from_state"):
        monkeypatch.setattr(theirs.drafter.loaded.model, name, lambda *_, **__: pytest.fail("the drafter ran"))
    engine.draft_tokens = 0
    steps = list(engine.generate(prompt, GREEDY, stops_of(engine)))
    assert tokens_of(steps) == drafted
    assert {step.phase for step in steps[1:]} == {"decode"}
    assert (engine.stats.verify_steps, engine.stats.proposed, engine.stats.accept_length) == (0, 0, None)
    assert engine.stats.decode_steps == len(drafted)


def test_fewer_draft_tokens_per_step(engine: ExllamaEngine, reference: ReferenceEngine) -> None:
    prompt = prompts_of(engine)[2]
    engine.draft_tokens = reference.draft_tokens = 3
    try:
        ours, given = aligned_steps(reference, engine, prompt, stops_of(engine))
    finally:
        reference.draft_tokens = reference.max_draft_tokens
    assert [step.token_ids for step in given] == [step.token_ids for step in ours]
    assert {step.proposed for step in given} == {3}
    with pytest.raises(Exl3DflashError, match="draft tokens: 8; expected 0 to 7"):
        engine.draft_tokens = 8


def test_requests_at_once_are_answered_as_alone(engine: ExllamaEngine) -> None:
    prompts, stops = prompts_of(engine), stops_of(engine)
    alone, counted = [], []
    for prompt in prompts:
        engine.reset()
        alone.append(facts(list(engine.generate(prompt, GREEDY, stops))))
        counted.append(engine.stats)
    engine.reset()
    together: list[list[Step]] = [[] for _ in prompts]
    order = []
    for index, step in engine.generate_many([GenerationRequest(prompt, GREEDY, stops) for prompt in prompts]):
        together[index].append(step)
        order.append(index)
    assert [facts(steps) for steps in together] == alone
    for given, wanted in zip(engine.many_stats, counted, strict=True):
        for name in ("accepted", "proposed", "verify_steps", "stop_reason"):
            assert getattr(given, name) == getattr(wanted, name)
    assert order != sorted(order)  # they went on together


def test_more_requests_than_fit_wait_for_their_turn(generator_library: types.ModuleType) -> None:
    target, _ = demo_directories()
    engine = load_theirs(generator_library, target, None, ExllamaSettings(cache_tokens=300, max_batch_size=1)).engine()
    prompts, stops = prompts_of(engine), StopSettings(6)
    alone = [tokens_of(list(engine.generate(prompt, GREEDY, stops))) for prompt in prompts]
    requests = [GenerationRequest(prompt, GREEDY, stops) for prompt in prompts]
    together: list[list[int]] = [[] for _ in prompts]
    for index, step in engine.generate_many(requests):
        together[index] += step.token_ids
    assert together == alone


def test_iterators_that_run_in_turn_lose_no_steps(engine: ExllamaEngine) -> None:
    prompts, stops = prompts_of(engine)[1:], StopSettings(16)
    alone = [facts(list(engine.generate(prompt, GREEDY, stops))) for prompt in prompts]
    engine.reset()
    first, second = (engine.generate(prompt, GREEDY, stops) for prompt in prompts)
    begun = [next(first)]
    assert facts(list(second)) == alone[1]
    assert facts(begun + list(first)) == alone[0]


def test_a_short_draft_leaves_the_drafters_first_rows_alone(theirs: Theirs) -> None:
    """The drafter writes its whole block, also past the last page that an answer's drafted tokens need."""
    engine = theirs.engine(draft_tokens=1)
    prompt = (prompts_of(engine)[2] * 20)[:240]
    request = engine.submit(prompt, GREEDY, StopSettings(14))  # 256 with the tokens drafted after the last one
    engine.step()
    assert theirs.drafter is not None
    keys = [layer.k for layer in theirs.drafter.loaded.cache.layers.values()]  # (pages, 256, heads, head dim)
    page = request.job.sequences[0].allocated_pages[0].page_index
    before = [key[page, :200].clone() for key in keys]
    while not request.finished:
        engine.step()
    assert len(request.emitted) == 14
    for key, rows in zip(keys, before, strict=True):
        assert torch.equal(key[page, :200], rows)


def test_stops(engine: ExllamaEngine) -> None:
    prompt = prompts_of(engine)[2]
    full = tokens_of(list(engine.generate(prompt, GREEDY, StopSettings(COUNT))))
    assert len(full) == COUNT
    assert engine.stats.stop_reason == "length"
    string = engine.tokenizer.decode(full[6:9])
    cut = tokens_of(list(engine.generate(prompt, GREEDY, StopSettings(COUNT, strings=(string,)))))
    assert engine.stats.stop_reason == "string"
    assert cut == full[: len(cut)]
    assert len(cut) <= 9
    assert string in engine.tokenizer.decode(cut)
    again = tokens_of(list(engine.generate(prompt, GREEDY, StopSettings(COUNT))))
    assert again == full  # the cut request left nothing behind


def test_closing_the_iterator_ends_the_request_and_leaves_the_engine_usable(engine: ExllamaEngine) -> None:
    prompt = prompts_of(engine)[2]
    full = tokens_of(list(engine.generate(prompt, GREEDY, StopSettings(COUNT))))
    with closing(engine.generate(prompt, GREEDY, StopSettings(COUNT))) as steps:
        next(steps)
        begun = next(steps).token_ids
    assert engine.stats.stop_reason == "interrupted"
    assert list(begun) == full[: len(begun)]
    assert engine.step() == []
    assert tokens_of(list(engine.generate(prompt, GREEDY, StopSettings(COUNT)))) == full
    with closing(engine.generate_many([GenerationRequest(prompt, GREEDY, StopSettings(COUNT))] * 2)) as many:
        next(many)
    assert [stats.stop_reason for stats in engine.many_stats] == ["interrupted"] * 2


def test_cached_pages_are_reused_until_reset(engine: ExllamaEngine) -> None:
    prompt = (prompts_of(engine)[2] * 20)[:600]
    first = facts(list(engine.generate(prompt, GREEDY, StopSettings(12))))
    assert engine.stats.reused_tokens == 0
    again = facts(list(engine.generate(prompt, GREEDY, StopSettings(12))))
    assert engine.stats.reused_tokens >= 512
    assert again == first
    engine.reset()
    assert facts(list(engine.generate(prompt, GREEDY, StopSettings(12)))) == first
    assert engine.stats.reused_tokens == 0


def test_a_session_of_the_target_takes_the_cache_and_the_engine_notices(theirs: Theirs) -> None:
    engine = theirs.engine()
    prompt = (prompts_of(engine)[2] * 20)[:600]
    first = tokens_of(list(engine.generate(prompt, GREEDY, StopSettings(12))))
    generator = engine._ready_generator()
    theirs.target.new_session().forward(torch.tensor(prompt[::-1]), (0,), 1)
    assert generator.draft_ids_pinned is None  # closed: its buffers and checkpoints are free
    assert tokens_of(list(engine.generate(prompt, GREEDY, StopSettings(12)))) == first
    assert engine.stats.reused_tokens == 0


def test_drafting_does_not_change_sampled_text(engine: ExllamaEngine) -> None:
    """Its generator draws one number per emitted token, so a seed gives the same text with and without a drafter."""
    sampling = SamplingSettings(temperature=0.8, top_k=40, top_p=0.95, seed=11)
    for prompt in prompts_of(engine)[:2]:
        engine.draft_tokens = engine.max_draft_tokens
        drafted = tokens_of(list(engine.generate(prompt, sampling, StopSettings(24))))
        engine.draft_tokens = 0
        assert tokens_of(list(engine.generate(prompt, sampling, StopSettings(24)))) == drafted
    other = SamplingSettings(temperature=0.8, seed=12)
    texts = Counter(tuple(tokens_of(list(engine.generate(prompt, s, StopSettings(24))))) for s in (sampling, other))
    assert len(texts) == 2


def test_a_repetition_penalty_changes_greedy_text_as_ours_does(
    engine: ExllamaEngine, reference: ReferenceEngine
) -> None:
    penalty = SamplingSettings(repetition_penalty=1.3)
    for prompt in prompts_of(engine)[:2]:
        ours = tokens_of(list(reference.generate(prompt, penalty, StopSettings(20))))
        assert tokens_of(list(engine.generate(prompt, penalty, StopSettings(20)))) == ours


def test_dynamic_draft_proposes_less_and_keeps_the_text(theirs: Theirs, engine: ExllamaEngine) -> None:
    prompt = prompts_of(engine)[1]
    stops = StopSettings(80)
    fixed = tokens_of(list(engine.generate(prompt, GREEDY, stops)))
    proposed = engine.stats.proposed
    dynamic = theirs.engine(dynamic_draft=True)
    steps = list(dynamic.generate(prompt, GREEDY, stops))
    assert tokens_of(steps) == fixed
    assert 0 < dynamic.stats.proposed < proposed
    assert dynamic.stats.verify_steps == len(steps) - 1 == dynamic.stats.decode_steps

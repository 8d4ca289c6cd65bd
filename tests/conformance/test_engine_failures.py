"""What goes wrong in ExLlamaV3's engine: said in one error, the engine usable afterwards, and no endless loop."""

from __future__ import annotations

import types

import pytest

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.runtime.engine import StopSettings
from exl3_dflash.runtime.exllama import ExllamaEngine, GenerationRequest
from exl3_dflash.runtime.exllama_model import ExllamaSettings
from tests.demo_pair import demo_directories

from .exllama_pair import GREEDY, Theirs, load_theirs, prompts_of, tokens_of

pytestmark = pytest.mark.conformance


@pytest.fixture(scope="module")
def theirs(generator_library: types.ModuleType) -> Theirs:
    return load_theirs(generator_library, *demo_directories())


@pytest.fixture
def engine(theirs: Theirs) -> ExllamaEngine:
    return theirs.engine()


def test_what_a_user_can_do_wrong(engine: ExllamaEngine) -> None:
    with pytest.raises(Exl3DflashError, match="no tokens"):
        engine.generate([], GREEDY, StopSettings())
    with pytest.raises(Exl3DflashError, match="token id 272; expected ids 0 to 271 of demo"):
        engine.generate([272], GREEDY, StopSettings())
    assert engine.context_limit == 1024
    with pytest.raises(Exl3DflashError, match="context is full: the prompt has 1024 tokens"):
        engine.generate([5] * 1024, GREEDY, StopSettings())
    steps = list(engine.generate([5] * 1000, GREEDY, StopSettings(400)))
    assert len(tokens_of(steps)) == 24
    assert engine.stats.stop_reason == "context"


def test_a_small_cache_is_the_limit_of_the_context(generator_library: types.ModuleType) -> None:
    theirs = load_theirs(generator_library, *demo_directories(), ExllamaSettings(cache_tokens=200))
    engine = theirs.engine()
    assert engine.context_limit == 248  # one page of 256 less a block of 8
    with pytest.raises(Exl3DflashError, match=r"cache is too small for the prompt, which has 250 tokens; .* 248"):
        engine.generate([5] * 250, GREEDY, StopSettings())
    steps = list(engine.generate([5] * 240, GREEDY, StopSettings(100)))
    assert len(tokens_of(steps)) == 8
    assert engine.stats.stop_reason == "context"


def test_a_generator_that_fails_ends_its_requests_with_one_error(
    theirs: Theirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = theirs.engine()
    prompt = prompts_of(engine)[0]
    with monkeypatch.context() as broken:
        broken.setattr(theirs.target.loaded.model, "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(Exl3DflashError, match="generator failed: division by zero"):
            list(engine.generate(prompt, GREEDY, StopSettings(8)))
    assert engine.stats.stop_reason == "interrupted"
    assert len(tokens_of(list(engine.generate(prompt, GREEDY, StopSettings(8))))) == 8


def test_a_request_that_is_refused_ends_those_before_it(engine: ExllamaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, queued = engine._ready_generator(), []
    enqueue = generator.enqueue
    monkeypatch.setattr(generator, "enqueue", lambda job: (queued.append(job), enqueue(job), 1 / (2 - len(queued))))
    with pytest.raises(Exl3DflashError, match="generator failed"):
        list(engine.generate_many([GenerationRequest([5, 6], GREEDY, StopSettings(4))] * 2))
    assert engine._running == []


def test_a_request_that_fails_alone_leaves_the_others_running(engine: ExllamaEngine) -> None:
    prompt = prompts_of(engine)[0]
    alone = tokens_of(list(engine.generate(prompt, GREEDY, StopSettings(6))))
    bad, good = (engine.submit(prompt, GREEDY, StopSettings(6)) for _ in range(2))
    bad.job.prefill = lambda *_: 1 / 0
    while not good.finished:
        engine.step()
    assert (bad.stats.stop_reason, good.emitted) == ("interrupted", alone)
    with pytest.raises(Exl3DflashError, match="generator failed: division by zero"):
        bad.check()


def test_an_answer_that_the_generator_ends_too_early_is_an_error_and_no_endless_loop(engine: ExllamaEngine) -> None:
    request = engine.submit(prompts_of(engine)[0], GREEDY, StopSettings(20))
    request.job.max_new_tokens = 3
    while len(request.emitted) < 3:
        engine.step()
    with pytest.raises(Exl3DflashError, match="ended an answer before its limit"):
        engine.step()


def test_another_version_of_the_generator_is_refused(
    theirs: Theirs, generator_library: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = generator_library.Job

    def job(*arguments: object, **options: object) -> object:
        made = real(*arguments, **options)
        del made.draft_stats
        return made

    monkeypatch.setattr(generator_library, "Job", job)
    with pytest.raises(Exl3DflashError, match="Job has no draft_stats"):
        list(theirs.engine().generate([5], GREEDY, StopSettings(2)))

"""Targets on ExLlamaV3 against the same weights on transformers: taps, logits, head and its gradient, sessions."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from exl3_dflash.calibration.capture import Calibration, calibrate
from exl3_dflash.calibration.fisher import FisherSettings
from exl3_dflash.calibration.onpolicy import AnswerRequest, generate_answers
from exl3_dflash.calibration.rowset import TokenRow
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.progress import Reporter
from exl3_dflash.runtime.engine import SamplingSettings, StopSettings
from exl3_dflash.runtime.exllama import ExllamaEngine
from exl3_dflash.runtime.exllama_model import ExllamaSettings
from exl3_dflash.runtime.reference import ReferenceEngine
from exl3_dflash.target.base import Target
from exl3_dflash.target.exllama import ExllamaTarget
from exl3_dflash.target.load import load_target
from exl3_dflash.target.transformers_target import TransformersTarget
from tests.demo_pair import demo_directories

from .exllama_pair import load_theirs, tokens_of

pytestmark = pytest.mark.conformance

CLOSE = 3e-3  # relative; FP16 activations against FP32 ones
CHUNK = 256


@pytest.fixture(scope="module")
def theirs(generator_library: types.ModuleType) -> ExllamaTarget:
    settings = ExllamaSettings(chunk_tokens=CHUNK)
    return load_theirs(generator_library, demo_directories()[0], None, settings).target


@pytest.fixture(scope="module")
def ours() -> TransformersTarget:
    target = load_target(demo_directories()[0], device="cpu", dtype=torch.float32)
    assert isinstance(target, TransformersTarget)
    return target


def random_ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed))


def error(given: torch.Tensor, wanted: torch.Tensor) -> float:
    assert given.shape == wanted.shape
    given, wanted = given.detach().float(), wanted.detach().float()
    return float((given - wanted).norm() / wanted.norm())


def test_it_is_a_target(theirs: ExllamaTarget, ours: TransformersTarget) -> None:
    assert isinstance(theirs, Target)
    different = {"name", "architecture"}
    given, wanted = vars(theirs.facts), vars(ours.facts)
    assert {k: v for k, v in given.items() if k not in different} == {
        k: v for k, v in wanted.items() if k not in different
    }


@pytest.mark.parametrize("tap_ids", [(0, 1, 2), (3, 0), (2, 2, 1)])
def test_taps_are_the_layers_outputs_in_the_listed_order(
    theirs: ExllamaTarget, ours: TransformersTarget, tap_ids: tuple[int, ...]
) -> None:
    ids = random_ids(70)
    given, wanted = (target.tap_rows(ids, tap_ids, want_logits=True) for target in (theirs, ours))
    assert error(given.taps, wanted.taps) < CLOSE
    assert given.logits is not None
    assert wanted.logits is not None
    assert given.logits.dtype == torch.float32
    assert error(given.logits, wanted.logits) < CLOSE
    assert torch.equal(theirs.tap_rows(ids, tap_ids).taps, given.taps)
    moved = theirs.tap_rows(ids, tuple(reversed(tap_ids))).taps
    assert error(moved, wanted.taps) > 10 * CLOSE


def test_rows_longer_than_a_chunk_run_through_the_cache(theirs: ExllamaTarget, ours: TransformersTarget) -> None:
    ids = random_ids(2 * CHUNK + 37)
    given, wanted = (target.tap_rows(ids, (2, 0), want_logits=True) for target in (theirs, ours))
    assert given.logits is not None
    assert wanted.logits is not None
    assert error(given.taps, wanted.taps) < CLOSE
    assert error(given.logits, wanted.logits) < CLOSE
    assert theirs.tap_rows(ids, (1,)).logits is None


def test_embedding_and_head(theirs: ExllamaTarget, ours: TransformersTarget) -> None:
    ids = random_ids(12).reshape(3, 4)
    torch.testing.assert_close(theirs.embed(ids), ours.embed(ids))
    hidden = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(1))
    for name in ("head", "output_matrix"):
        given, wanted = (getattr(target, name)(hidden) for target in (theirs, ours))
        assert given.shape == (2, 5, 272)
        assert error(given, wanted) < CLOSE


def test_the_heads_gradient(theirs: ExllamaTarget, ours: TransformersTarget) -> None:
    """What Fisher calibration differentiates: log-likelihoods through the head into hidden states."""
    labels, gradients = random_ids(6), []
    for target in (theirs, ours):
        hidden = torch.randn(6, 128, generator=torch.Generator().manual_seed(2)).requires_grad_()
        torch.nn.functional.cross_entropy(target.head(hidden), labels).backward()
        assert hidden.grad is not None
        gradients.append(hidden.grad)
    assert error(*gradients) < CLOSE


def test_scales_and_softcap_of_a_head_are_applied_in_its_order(
    theirs: ExllamaTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = theirs.loaded.model.modules[theirs.loaded.model.logit_layer_idx]
    hidden = torch.randn(1, 4, 128, generator=torch.Generator().manual_seed(3))
    plain = theirs.head(hidden)
    for name, value in {"pre_scale": 0.5, "softcap": 3.0, "post_scale": 4.0}.items():
        monkeypatch.setattr(module, name, value)
    own = theirs.cropped(module.forward(hidden.half(), {}))
    assert error(theirs.head(hidden)[0], own) < CLOSE
    assert torch.equal(theirs.output_matrix(hidden), plain)
    assert error(plain[0], own) > 0.1


def test_calibration_and_fisher_see_what_they_see_on_transformers(
    theirs: ExllamaTarget, ours: TransformersTarget
) -> None:
    checkpoint = DrafterCheckpoint.open(demo_directories()[1])
    drafter = DrafterModel.from_checkpoint(checkpoint)
    row = TokenRow(random_ids(60, seed=4), 0, "text")

    def run(target: Target) -> Calibration:
        return calibrate(
            drafter, checkpoint.linears, target, [row], accept_length=2.0, anchors_per_row=6,
            fisher=FisherSettings(), seed=1,
        )  # fmt: skip

    given, wanted = run(theirs), run(ours)
    for linear in checkpoint.linears:
        assert error(given.hessians[linear.group].matrix, wanted.hessians[linear.group].matrix) < 10 * CLOSE
    assert set(given.output_hessians) == set(wanted.output_hessians)


def test_a_session_rolls_back_exactly(theirs: ExllamaTarget) -> None:
    ids = random_ids(2 * CHUNK + 40, seed=5)
    session = theirs.new_session()
    first = session.forward(ids[:-30], (1, 0), 3)
    assert first.logits is not None
    assert first.logits.shape == (3, 272)
    assert first.taps.shape == (len(ids) - 30, 256)
    rejected = session.forward(random_ids(8, seed=6), (1, 0))
    assert rejected.logits is not None
    assert rejected.logits.shape == (8, 272)
    session.rollback(len(ids) - 30)
    last = session.forward(ids[-30:], (1, 0))
    assert session.ids == ids.tolist()
    whole = theirs.new_session().forward(ids, (1, 0), 30)
    assert error(last.taps, whole.taps[-30:]) < CLOSE
    assert last.logits is not None
    assert whole.logits is not None
    assert error(last.logits, whole.logits) < CLOSE
    again = session.forward(ids[:1], None, 1)  # the other session wrote the cache in between
    alone = theirs.new_session().forward(torch.cat([ids, ids[:1]]), None, 1)
    assert again.taps.shape == (1, 0)
    torch.testing.assert_close(again.logits, alone.logits)
    with pytest.raises(Exl3DflashError, match="rollback to"):
        session.rollback(len(ids) + 2)
    with pytest.raises(Exl3DflashError, match="do not fit into the target's cache"):
        session.forward(random_ids(2000))


class CountedState:
    """Stands for a recurrent state: it knows its position and cannot go back."""

    made: ClassVar[list[CountedState]] = []

    def __init__(self) -> None:
        self.position, self.last_history, self.slot, self.freed = 0, 0, 0, False
        self.made.append(self)

    def post_advance(self) -> None:
        """Called after every forward."""

    def free(self) -> None:
        self.freed = True


def test_a_recurrent_state_starts_over_where_tokens_are_taken_back(
    theirs: ExllamaTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(theirs, "facts", replace(theirs.facts, recurrent=True))
    monkeypatch.setattr(theirs.loaded.cache, "get_new_state", CountedState)
    ids = random_ids(30, seed=9)
    session = theirs.new_session()
    session.forward(ids)
    assert [(state.position, state.freed) for state in CountedState.made] == [(30, False)]
    session.rollback(20)
    rows = session.forward(ids[20:24], None, 1)
    assert [(state.position, state.freed) for state in CountedState.made] == [(30, True), (24, False)]
    torch.testing.assert_close(rows.logits, theirs.new_session().forward(ids[:24], None, 1).logits)


def test_every_recurrent_state_is_given_back_once(theirs: ExllamaTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are as many as requests may run at once: rows after rows, sessions in turn, a generator between them."""
    held: list[int] = []

    class OneOfMany(CountedState):
        def __init__(self) -> None:
            super().__init__()
            held.append(id(self))

        def free(self) -> None:
            held.remove(id(self))  # raises where it was given back already

    monkeypatch.setattr(theirs, "facts", replace(theirs.facts, recurrent=True))
    monkeypatch.setattr(theirs.loaded.cache, "get_new_state", OneOfMany)
    for _ in range(3):
        theirs.tap_rows(random_ids(CHUNK + 9), (1,))
        assert len(held) == 1
    first, second = theirs.new_session(), theirs.new_session()
    for session in (first, second, first):
        session.forward(random_ids(5))
        assert len(held) == 1
    list(ExllamaEngine(theirs).generate([5], SamplingSettings(), StopSettings(2)))
    assert held == []
    first.forward(random_ids(5))
    first.rollback(2)
    assert held == []


def test_an_interrupted_forward_leaves_the_session_as_it_was(
    theirs: ExllamaTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = random_ids(40, seed=7)
    session = theirs.new_session()
    session.forward(ids[:20])
    for owner, name in ((theirs.loaded.model, "forward"), (theirs, "exported")):
        with monkeypatch.context() as broken:
            broken.setattr(owner, name, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                session.forward(ids[20:])
        assert session.length == 20
    rows = session.forward(ids[20:], None, 1)
    torch.testing.assert_close(rows.logits, theirs.new_session().forward(ids, None, 1).logits)


def test_the_reference_engine_runs_on_it(theirs: ExllamaTarget, ours: TransformersTarget) -> None:
    drafter = DrafterModel.from_checkpoint(DrafterCheckpoint.open(demo_directories()[1]))
    prompt, stops = ours.tokenizer.encode("hello"), StopSettings(16)
    steps = [list(ReferenceEngine(t, drafter).generate(prompt, SamplingSettings(), stops)) for t in (theirs, ours)]
    assert [(s.token_ids, s.accepted) for s in steps[0]] == [(s.token_ids, s.accepted) for s in steps[1]]
    assert len(tokens_of(steps[0])) == 16


def test_it_answers_many_prompts_at_once_for_calibration(theirs: ExllamaTarget, ours: TransformersTarget) -> None:
    requests = [AnswerRequest(tuple(ours.tokenizer.encode(text)), 12) for text in ("hello", "What is", "One two")]

    def answers(target: Target) -> list[list[int]]:
        return generate_answers(target, requests, batch_tokens=500, reporter=Reporter(quiet=True), label="")

    assert answers(theirs) == answers(ours)

"""Answers in batches equal answers one by one; on-policy rows keep prompts apart and never repeat a row."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pytest
import torch

from calibration_data import TARGET_PROMPTS_FILE, Message
from exl3_dflash.calibration import onpolicy
from exl3_dflash.calibration.candidates import Candidate, deal
from exl3_dflash.calibration.conversations import render
from exl3_dflash.calibration.onpolicy import AnswerRequest, generate_answers
from exl3_dflash.calibration.rows import load_rows
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.progress import Reporter
from exl3_dflash.runtime.engine import SamplingSettings, StopSettings
from exl3_dflash.runtime.reference import ReferenceEngine
from exl3_dflash.target.load import load_target
from exl3_dflash.target.transformers_target import TransformersTarget
from tests.calibration.fake_targets import ASSISTANT, END, ByteTarget
from tests.tiny_targets import make_tiny_family, make_tiny_llama, make_tiny_qwen3_next

QUIET = Reporter(quiet=True)


def make_target(directory: Path, family: str) -> TransformersTarget:
    makers = {"llama": make_tiny_llama, "qwen3_next": make_tiny_qwen3_next}
    if family in makers:
        makers[family](directory)
    else:
        make_tiny_family(directory, family)
    return load_target(directory, device="cpu", dtype=torch.float32)


def some_requests(sampling: bool) -> list[AnswerRequest]:
    rng = random.Random(5)
    settings = [SamplingSettings(temperature=0.8, seed=i) if sampling else SamplingSettings() for i in range(9)]
    return [
        AnswerRequest(tuple(rng.randrange(256) for _ in range(rng.randint(1, 30))), rng.randint(1, 40), one)
        for one in settings
    ]


def one_by_one(target: TransformersTarget, requests: list[AnswerRequest]) -> list[list[int]]:
    answers = []
    for request in requests:
        stops = StopSettings(request.max_new_tokens, frozenset(target.facts.eos_token_ids))
        steps = ReferenceEngine(target).generate(request.prompt, request.sampling, stops)
        answers.append([token for step in steps for token in step.token_ids])
    return answers


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "gemma2"])
def test_batched_answers_equal_one_by_one_in_fp32(tmp_path: Path, family: str) -> None:
    target = make_target(tmp_path, family)
    for sampling in (False, True):
        requests = some_requests(sampling)
        expected = one_by_one(target, requests)
        for batch_tokens in (16384, 120):
            answers = generate_answers(target, requests, batch_tokens=batch_tokens, reporter=QUIET, label="x")
            assert answers == expected, (sampling, batch_tokens)
        assert len({len(answer) for answer in answers}) > 3  # rows left the batch at different times


def test_padding_that_changes_the_answer_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that ignores the mask is not given padded prompts."""
    target = make_target(tmp_path, "llama")
    decoder_class = type(onpolicy.find_decoder(target.model))
    forward = decoder_class.forward
    assert onpolicy._BatchedDecoder(target).padding_is_neutral()

    @functools.wraps(forward)
    def deaf(self: object, *inputs: object, **options: object) -> object:
        return forward(self, *inputs, **{**options, "attention_mask": None})

    monkeypatch.setattr(decoder_class, "forward", deaf)
    assert not onpolicy._BatchedDecoder(target).padding_is_neutral()
    requests = some_requests(sampling=False)
    expected = one_by_one(target, requests)
    assert generate_answers(target, requests, batch_tokens=999, reporter=QUIET, label="x") == expected


def test_batches_are_bounded() -> None:
    requests = [AnswerRequest(tuple(range(length)), 10) for length in (5, 90, 5, 6, 40, 41, 300)]
    for padded in (True, False):
        batches = list(onpolicy._batches(requests, 120, padded))
        assert sorted(index for batch in batches for index in batch) == list(range(7))
        for batch in batches:
            longest = max(len(requests[index].prompt) for index in batch)
            assert len(batch) == 1 or len(batch) * (longest + 10) <= 120
            if not padded:
                assert len({len(requests[index].prompt) for index in batch}) == 1
    assert len(next(iter(onpolicy._batches([requests[0]] * 40, 10**6, True)))) == onpolicy.MAX_BATCH


def test_chat_rows_are_the_targets_own_answers(tmp_path: Path) -> None:
    target = make_target(tmp_path, "llama")
    rows = load_rows("chat", target, rows=6, cols=400, held_out=3, answer_tokens=24, seed=1)
    assert (len(rows.rows), len(rows.held_out)) == (6, 3)
    requests = [AnswerRequest(tuple(row.ids[: row.prompt_length].tolist()), 24) for row in (*rows.rows, *rows.held_out)]
    answers = [row.ids[row.prompt_length :].tolist() for row in (*rows.rows, *rows.held_out)]
    assert answers == one_by_one(target, requests)
    assert len({row.kind for row in rows.rows}) == 6  # the kinds take turns


def test_answers_are_cut_at_the_row_length_and_prompts_without_room_are_noted() -> None:
    target = ByteTarget(answer_length=10**6)
    rows = load_rows("chat", target, rows=12, cols=200, held_out=4)
    lengths = [len(row.ids) for row in (*rows.rows, *rows.held_out)]
    assert lengths == [200] * 16
    assert all(row.ids[row.prompt_length - 1] == ASSISTANT for row in rows.rows)
    assert any("of 343 prompts leave no room for an answer in 200 tokens" in note for note in rows.notes)


def test_held_out_prompts_are_no_calibration_prompts() -> None:
    target = ByteTarget()
    rows = load_rows("chat", target, rows=80, cols=300, held_out=20)
    prompts = [{tuple(row.ids[: row.prompt_length].tolist()) for row in side} for side in (rows.rows, rows.held_out)]
    assert not prompts[0] & prompts[1]
    assert (len(rows.rows), len(rows.held_out)) == (80, 20)
    assert all(row.ids[-1] == END for row in rows.rows if len(row.ids) < 300)  # the end token belongs to the answer
    again = load_rows("chat", target, rows=40, cols=300, held_out=20)
    assert [row.ids.tolist() for row in again.held_out] == [row.ids.tolist() for row in rows.held_out]


def write_own_prompts(directory: Path, count: int) -> None:
    lines = [
        f'{{"id": "p{i}", "kind": "mill", "messages": [{{"role": "user", "content": "Question {i}?"}}]}}'
        for i in range(count)
    ]
    (directory / TARGET_PROMPTS_FILE).write_text("\n".join(lines), encoding="utf-8")


def test_a_target_with_prompts_of_its_own_gets_those(tmp_path: Path) -> None:
    write_own_prompts(tmp_path, 12)
    rows = load_rows("chat", ByteTarget(), rows=8, cols=128, held_out=4, target_directory=tmp_path)
    assert [row.kind for row in (*rows.rows, *rows.held_out)] == ["mill"] * 12
    mixed = load_rows("default", ByteTarget(), rows=40, cols=64, target_directory=tmp_path)
    texts = [bytes(t for t in row.ids.tolist() if t < 256) for row in mixed.rows if row.kind == "prompts"]
    assert texts
    assert all(b"Question" in text for text in texts)


def test_more_rows_than_prompts_are_further_sampled_answers(tmp_path: Path) -> None:
    target = make_target(tmp_path, "llama")
    write_own_prompts(tmp_path, 6)
    arguments = {"rows": 15, "cols": 128, "held_out": 5, "answer_tokens": 20, "target_directory": tmp_path}
    rows = load_rows("chat", target, **arguments)
    assert (len(rows.rows), len(rows.held_out)) == (15, 1)
    all_ids = {tuple(row.ids.tolist()) for row in rows.rows}
    assert len(all_ids) == 15
    assert any("10 of 15 calibration rows are further answers sampled at temperature 0.8" in n for n in rows.notes)
    assert any("1 held-out rows instead of 5" in note for note in rows.notes)
    again = load_rows("chat", target, **arguments)
    assert [row.ids.tolist() for row in again.rows] == [row.ids.tolist() for row in rows.rows]


def test_a_target_that_cannot_vary_gives_fewer_rows(tmp_path: Path) -> None:
    """Sampling ends when it brings nothing new: rows are never repeated to fill up."""
    write_own_prompts(tmp_path, 3)
    target = ByteTarget(answer_length=2)  # nearly always the same letter, and END
    rows = load_rows("chat", target, rows=500, cols=64, target_directory=tmp_path)
    assert 3 <= len(rows.rows) < 500
    assert len({tuple(row.ids.tolist()) for row in rows.rows}) == len(rows.rows)
    assert any("calibration rows instead of 500" in note for note in rows.notes)


def test_empty_answers_are_left_out() -> None:
    with pytest.raises(Exl3DflashError, match=r"no usable row.*too short"):
        load_rows("chat", ByteTarget(answer_length=1), rows=5, cols=300)


def test_looping_answers_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(target: object, requests: list[AnswerRequest], **_: object) -> list[list[int]]:
        return [[7, 8] * 10 for _ in requests]

    monkeypatch.setattr("exl3_dflash.calibration.candidates.generate_answers", loop)
    rows = load_rows("chat", ByteTarget(), rows=5, cols=300, held_out=2)
    assert any("2 of 2 held-out answers repeat themselves" in note for note in rows.notes)


@pytest.mark.parametrize("thinking", [None, True, False])
def test_the_thinking_switch_reaches_the_template(thinking: bool | None) -> None:
    for source in ("chat", "default"):
        target = ByteTarget()
        load_rows(source, target, rows=2, cols=300, thinking=thinking)
        assert set(target.tokenizer.thinking) == {thinking}


def test_of_both_switches_each_prompt_gets_one_whatever_the_numbers() -> None:
    targets = [ByteTarget(), ByteTarget()]
    few, many = (
        load_rows("chat", target, rows=count, cols=300, held_out=4, thinking=(True, False))
        for target, count in zip(targets, (4, 24), strict=True)
    )
    switches = targets[1].tokenizer.thinking
    assert 0.3 < switches.count(True) / len(switches) < 0.7
    for ours, theirs in zip((*few.held_out, *few.rows), (*many.held_out, *many.rows), strict=False):
        assert torch.equal(ours.ids, theirs.ids)


def test_a_template_without_system_turns_gets_their_text_in_the_first_user_turn() -> None:
    messages = (Message(role="system", content="Be brief."), Message(role="user", content="Why?"))
    ids = render(ByteTarget(allows_system=False).tokenizer, messages, None, True)
    assert bytes(token for token in ids if token < 256) == b"Be brief.\n\nWhy?\n"
    with pytest.raises(Exl3DflashError, match="refuses a system turn"):
        render(ByteTarget(allows_system=False).tokenizer, messages[:1], None, True)


def test_chat_needs_a_template() -> None:
    with pytest.raises(Exl3DflashError, match=r"chat needs a chat template.*`default`"):
        load_rows("chat", ByteTarget(has_chat_template=False), rows=2, cols=64)


def test_progress_counts_answers(capsys: pytest.CaptureFixture[str]) -> None:
    load_rows("chat", ByteTarget(), rows=3, cols=300, progress=Reporter())
    assert "answer prompts" in capsys.readouterr().err


def candidates(prompts: list[int]) -> list[Candidate]:
    return [Candidate((prompt,), (1000 + i, 1), "x") for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    ("prompts", "held_out", "rows", "expected"),
    [
        ([1, 2, 3, 4], 1, 2, (1, 2)),
        ([1, 2, 3, 4], 2, 6, (1, 3)),
        ([1, 1, 1, 2], 1, 3, (1, 1)),  # answers to prompt 1 stay together
        ([1, 2], 4, 0, (2, 0)),
        ([1], 4, 4, (0, 1)),
        ([], 4, 4, (0, 0)),
        ([1, 2, 3], 0, 5, (0, 3)),
    ],
)
def test_deal(prompts: list[int], held_out: int, rows: int, expected: tuple[int, int]) -> None:
    held, calibration = deal(candidates(prompts), held_out, rows)
    assert (len(held), len(calibration)) == expected
    assert not {candidate.prompt for candidate in held} & {candidate.prompt for candidate in calibration}

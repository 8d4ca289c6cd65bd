"""Rows from the user's own files, and one clear error for every way such a file can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from exl3_dflash.calibration.rows import RowSet, load_rows
from exl3_dflash.errors import Exl3DflashError
from tests.calibration.fake_targets import ASSISTANT, BEGIN, END, USER, ByteTarget


def text_of(rows: RowSet) -> str:
    return "".join(bytes(t for t in row.ids.tolist() if t < 256).decode(errors="ignore") for row in rows.rows)


def write_text(tmp_path: Path, count: int = 400) -> str:
    path = tmp_path / "notes.txt"
    path.write_text("".join(f"line {number} of the notes\n" for number in range(count)), encoding="utf-8")
    return str(path)


def write_lines(tmp_path: Path, records: list[object]) -> str:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def write_tensors(tmp_path: Path, **tensors: torch.Tensor) -> str:
    path = tmp_path / "rows.safetensors"
    save_file(tensors, path)
    return str(path)


def conversation(number: int, answer: str | None = "It grinds flour, as it has always done.") -> dict[str, object]:
    messages = [{"role": "user", "content": f"What does mill number {number} do?"}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages, "source": "a further key is a note of the user's"}


def test_text_becomes_rows(tmp_path: Path) -> None:
    rows = load_rows(write_text(tmp_path), ByteTarget(), rows=8, cols=100, held_out=3, seed=2)
    assert (len(rows.rows), len(rows.held_out)) == (8, 3)
    assert all(len(row.ids) == 100 and row.ids[0] == BEGIN and row.kind == "text" for row in rows.rows)
    assert not rows.notes
    both = [{tuple(row.ids.tolist()) for row in side} for side in (rows.rows, rows.held_out)]
    assert not both[0] & both[1]


def test_a_short_text_is_shared_and_the_note_says_so(tmp_path: Path) -> None:
    rows = load_rows(write_text(tmp_path, 60), ByteTarget(), rows=40, cols=100, held_out=10)
    assert 8 <= len(rows.rows) < 40
    assert 1 <= len(rows.held_out) < 10
    assert any("calibration rows instead of 40" in note for note in rows.notes)
    assert any("held-out rows instead of 10" in note for note in rows.notes)
    lines = [line for line in text_of(rows).split("\n") if line]
    assert len(lines) == len(set(lines))  # nothing twice


def test_lines_of_text_are_documents(tmp_path: Path) -> None:
    source = write_lines(tmp_path, [{"text": f"document {i} " + "abc " * 40} for i in range(40)])
    rows = load_rows(source, ByteTarget(), rows=10, cols=120, held_out=4)
    assert (len(rows.rows), len(rows.held_out)) == (10, 4)


def test_finished_conversations_are_rows_with_their_prompt_length(tmp_path: Path) -> None:
    source = write_lines(tmp_path, [conversation(i) for i in range(12)])
    rows = load_rows(source, ByteTarget(), rows=8, cols=200, held_out=4)
    assert (len(rows.rows), len(rows.held_out)) == (8, 4)
    assert rows.notes == ()
    for row in rows.rows:
        prompt, answer = row.ids[: row.prompt_length].tolist(), row.ids[row.prompt_length :].tolist()
        assert prompt[:2] == [BEGIN, USER]
        assert prompt[-1] == ASSISTANT
        assert bytes(answer[:-1]) == b"It grinds flour, as it has always done."
        assert answer[-1] == END  # what the template writes after the end is no part of the answer


def test_open_conversations_are_answered_by_the_target(tmp_path: Path) -> None:
    source = write_lines(
        tmp_path, [conversation(i, None if i % 2 else "Nothing at all, these days.") for i in range(8)]
    )
    target = ByteTarget(answer_length=30)
    rows = load_rows(source, target, rows=8, cols=200)
    assert target.sessions == 4
    assert sorted(len(row.ids) - row.prompt_length for row in rows.rows) == [28] * 4 + [30] * 4
    assert any("4 conversations without a final answer are answered by the target" in note for note in rows.notes)


def test_answers_to_one_prompt_stay_on_one_side(tmp_path: Path) -> None:
    source = write_lines(tmp_path, [conversation(i % 5, f"Answer number {i} for it.") for i in range(40)])
    rows = load_rows(source, ByteTarget(), rows=20, cols=200, held_out=10)
    prompts = [{tuple(row.ids[: row.prompt_length].tolist()) for row in side} for side in (rows.rows, rows.held_out)]
    assert not prompts[0] & prompts[1]
    assert (len(rows.rows), len(rows.held_out)) == (20, 10)


def test_conversations_without_room_for_an_answer_are_noted(tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "w" * 300}, {"role": "assistant", "content": "yes, so"}]}
    source = write_lines(tmp_path, [conversation(1), long])
    rows = load_rows(source, ByteTarget(), rows=2, cols=100)
    assert len(rows.rows) == 1
    assert any("1 conversations have no answer within 100 tokens" in note for note in rows.notes)


def token_rows(count: int = 10, columns: int = 40) -> torch.Tensor:
    return torch.arange(count * columns, dtype=torch.int32).reshape(count, columns) % 251


def test_packed_rows_with_lengths(tmp_path: Path) -> None:
    lengths = torch.tensor([40, 30, 20, 40, 40, 40, 40, 40, 40, 40], dtype=torch.int32)
    source = write_tensors(tmp_path, input_ids=token_rows(), lengths=lengths)
    rows = load_rows(source, ByteTarget(), rows=7, cols=32, held_out=3)
    assert (len(rows.rows), len(rows.held_out)) == (7, 3)
    assert sorted(len(row.ids) for row in (*rows.rows, *rows.held_out)) == [20, 30] + [32] * 8
    assert all(row.ids.dtype == torch.int64 and row.prompt_length == 0 for row in rows.rows)
    assert any("8 of 10 rows were cut to 32 tokens" in note for note in rows.notes)


def test_packed_rows_with_prompts(tmp_path: Path) -> None:
    ids = token_rows()
    ids[1, :10] = ids[0, :10]  # two answers to one prompt
    prompts = torch.full((10,), 10)
    source = write_tensors(tmp_path, ids=ids, prompt_lengths=prompts)
    for seed in range(6):
        rows = load_rows(source, ByteTarget(), rows=6, cols=64, held_out=4, seed=seed)
        sides = [{tuple(row.ids[:10].tolist()) for row in side} for side in (rows.rows, rows.held_out)]
        assert not sides[0] & sides[1]
        assert all(row.prompt_length == 10 and row.kind == "rows" for row in rows.rows)


def test_repeated_rows_are_left_out(tmp_path: Path) -> None:
    source = write_tensors(tmp_path, input_ids=token_rows(4).repeat(3, 1))
    rows = load_rows(source, ByteTarget(), rows=9, cols=64, held_out=3)
    assert (len(rows.rows), len(rows.held_out)) == (3, 1)
    assert any("8 repeated rows" in note for note in rows.notes)


def test_rows_without_an_answer_or_too_short_are_left_out(tmp_path: Path) -> None:
    source = write_tensors(
        tmp_path,
        input_ids=token_rows(4),
        lengths=torch.tensor([40, 9, 40, 40]),
        prompt_lengths=torch.tensor([5, 5, 40, 0]),
    )
    rows = load_rows(source, ByteTarget(), rows=4, cols=64)
    assert sorted(row.prompt_length for row in rows.rows) == [0, 5]
    assert any("2 calibration rows were too short" in note for note in rows.notes)


def expect_error(source: str, message: str, target: ByteTarget | None = None) -> None:
    with pytest.raises(Exl3DflashError, match=message) as error:
        load_rows(source, target or ByteTarget(), rows=4, cols=64)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", r"a\.txt is empty"),
        ("a.txt", b" \n ", "is blank"),
        ("a.txt", b"\xff\xfe\x00x", "UTF-8"),
        ("a.txt", b"too short", "no usable row"),
        ("a.csv", b"x", r"no known format.*\.txt, \.jsonl, \.safetensors"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": ', r"a\.jsonl line 3 is not JSON"),
        ("a.jsonl", b'"text"\n', "line 1 is no JSON object"),
        ("a.jsonl", b'{"txet": "a"}\n', "line 1 has the keys txet.*`text` or `messages`"),
        ("a.jsonl", b'{"text": "a", "messages": []}\n', "not both"),
        ("a.jsonl", b'{"text": 5}\n', "`text` of .* line 1 is no string"),
        ("a.jsonl", b'{"messages": []}\n', "no turn of the user"),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": ["x"]}]}\n', "no conversation"),
        ("a.jsonl", b'{"text": "a"}\n{"messages": [{"role": "user", "content": "x"}]}\n', "line 2 mixes"),
        ("a.safetensors", b"not a safetensors file", r"cannot read .*a\.safetensors"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    expect_error(str(tmp_path / name), message)


def test_wrong_sources_are_refused(tmp_path: Path) -> None:
    expect_error("defalt", r"defalt does not exist.*`default`, `chat`")
    expect_error(str(tmp_path), "no known format")


def test_wrong_tensors_are_refused(tmp_path: Path) -> None:
    expect_error(write_tensors(tmp_path, tokens=token_rows()), "has the tensors tokens.*`input_ids`")
    expect_error(write_tensors(tmp_path, input_ids=token_rows().float()), "float32.*integers")
    expect_error(write_tensors(tmp_path, input_ids=torch.arange(9)), r"\[9\].*integers \[rows, columns\]")
    wrong_lengths = {"lengths": torch.tensor([1, 2])}
    expect_error(write_tensors(tmp_path, input_ids=token_rows(), **wrong_lengths), r"`lengths`.*integers \[10\]")
    too_long = {"lengths": torch.full((10,), 41)}
    expect_error(write_tensors(tmp_path, input_ids=token_rows(), **too_long), "is 41 in row 0.*1 to 40")
    expect_error(write_tensors(tmp_path, input_ids=token_rows() + 100), r"token id 350.*0 to 263.*own tokenizer")
    expect_error(write_tensors(tmp_path, input_ids=token_rows() - 5), "token id -5")
    expect_error(write_tensors(tmp_path, input_ids=token_rows(3, 10)), "no usable row")


def test_conversations_need_a_template(tmp_path: Path) -> None:
    source = write_lines(tmp_path, [conversation(1)])
    expect_error(source, r"data\.jsonl needs a chat template", ByteTarget(has_chat_template=False))

"""Token rows from the standard corpora: full, deterministic, disjoint, and honest where there is too little."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from exl3_dflash.calibration import default_rows as default_module
from exl3_dflash.calibration.default_rows import shares
from exl3_dflash.calibration.packing import DocumentSource, pack_documents, special_prefix
from exl3_dflash.calibration.rows import RowSet, check_source, load_rows
from exl3_dflash.calibration.rowset import TokenRow
from exl3_dflash.errors import Exl3DflashError
from tests.calibration.fake_targets import ASSISTANT, BEGIN, USER, ByteTarget


def ids_of(rows: tuple[TokenRow, ...] | list[TokenRow]) -> list[list[int]]:
    return [row.ids.tolist() for row in rows]


@pytest.fixture(scope="module")
def mixed() -> RowSet:
    return load_rows("default", ByteTarget(), rows=60, cols=200, seed=3, held_out=12)


def test_default_rows_are_full_and_mixed_by_weight(mixed: RowSet) -> None:
    assert mixed.source == "default"
    assert (len(mixed.rows), len(mixed.held_out)) == (60, 12)
    assert all(len(row.ids) == 200 and row.ids.dtype == torch.int64 for row in mixed.rows)
    assert all(row.prompt_length == 0 and row.ids[0] == BEGIN for row in mixed.rows)
    kinds = Counter(row.kind for row in mixed.rows)
    assert kinds == {"c4": 10, "code": 13, "multilingual": 5, "technical": 8, "wiki": 10, "tiny": 2, "prompts": 12}
    assert len({row.kind for row in mixed.rows[:20]}) > 4  # any first few rows are mixed too
    assert mixed.tokens == 60 * 200


def test_default_is_measured_on_answers_to_prompts_outside_the_mix(mixed: RowSet) -> None:
    tokenizer = ByteTarget().tokenizer
    text = tokenizer.decode([token for row in mixed.rows for token in row.ids.tolist()])
    for row in mixed.held_out:
        prompt, answer = row.ids[: row.prompt_length].tolist(), row.ids[row.prompt_length :].tolist()
        assert prompt[-1] == ASSISTANT
        assert answer, "the target wrote something"
        assert tokenizer.decode(prompt[-60:-2]) not in text


def test_without_a_template_default_is_measured_on_text_and_says_so() -> None:
    rows = load_rows("default", ByteTarget(has_chat_template=False), rows=8, cols=64, held_out=4)
    assert [row.prompt_length for row in rows.held_out] == [0] * 4
    assert any("did not write" in note for note in rows.notes)


def test_default_prompts_go_through_the_chat_template(mixed: RowSet) -> None:
    prompts = [row.ids.tolist() for row in mixed.rows if row.kind == "prompts"]
    assert sum(ids.count(USER) for ids in prompts) >= len(prompts)
    assert all(ids.count(BEGIN) == 1 for ids in prompts)  # the template's own is taken off inside a row


def test_the_same_request_gives_the_same_rows_and_another_seed_others(mixed: RowSet) -> None:
    again = load_rows("default", ByteTarget(), rows=60, cols=200, seed=3, held_out=12)
    assert ids_of(again.rows) == ids_of(mixed.rows)
    other = load_rows("default", ByteTarget(), rows=60, cols=200, seed=4, held_out=12)
    assert ids_of(other.rows) != ids_of(mixed.rows)


def test_held_out_rows_do_not_depend_on_the_number_of_calibration_rows(mixed: RowSet) -> None:
    fewer = load_rows("default", ByteTarget(), rows=5, cols=200, seed=3, held_out=12)
    assert ids_of(fewer.held_out) == ids_of(mixed.held_out)
    none = load_rows("default", ByteTarget(), rows=0, cols=200, seed=3, held_out=12)
    assert ids_of(none.held_out) == ids_of(mixed.held_out)
    assert none.rows == ()


def test_only_needed_text_is_tokenized() -> None:
    target = ByteTarget()
    load_rows("default", target, rows=4, cols=64, held_out=2)
    assert target.tokenizer.encoded_characters < 200_000  # of 5.6 million


def test_without_a_template_the_corpora_take_all_rows() -> None:
    rows = load_rows("default", ByteTarget(has_chat_template=False), rows=20, cols=64)
    assert len(rows.rows) == 20
    assert "prompts" not in {row.kind for row in rows.rows}
    assert any("no chat template" in note for note in rows.notes)


def test_columns_are_clamped_to_the_targets_positions() -> None:
    rows = load_rows("default", ByteTarget(positions=96), rows=3, cols=2048)
    assert {len(row.ids) for row in rows.rows} == {96}
    assert any("96 tokens instead of 2048" in note for note in rows.notes)


def test_a_source_that_runs_out_leaves_its_share_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    corpora = [
        default_module.standard_corpora()[0],
        type(default_module.standard_corpora()[0])("small", "word " * 60, 1000, "segments"),
    ]
    monkeypatch.setattr(default_module, "standard_corpora", lambda: corpora)
    rows = load_rows("default", ByteTarget(), rows=30, cols=128, held_out=6)
    kinds = Counter(row.kind for row in (*rows.rows, *rows.held_out))
    assert (len(rows.rows), len(rows.held_out)) == (30, 6)
    assert kinds["small"] <= 3
    assert not rows.notes


@pytest.mark.parametrize(
    ("count", "weights", "limits", "expected"),
    [
        (10, [1, 1], [None, None], [5, 5]),
        (3, [1, 1], [None, None], [2, 1]),
        (1, [1, 2, 2], [None, None, None], [0, 1, 0]),
        (10, [8, 1, 1], [2, None, None], [2, 4, 4]),
        (10, [8, 1, 1], [2, 1, None], [2, 1, 7]),
        (10, [1, 1], [2, 3], [2, 3]),
        (0, [1, 2], [None, None], [0, 0]),
    ],
)
def test_shares(count: int, weights: list[float], limits: list[int | None], expected: list[int]) -> None:
    assert shares(count, weights, limits) == expected


def numbered_source(lengths: list[int]) -> DocumentSource:
    """Document d is `lengths[d]` times the token d."""
    return DocumentSource("numbers", len(lengths), lambda index: [index] * lengths[index])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("held_out", "rows"), [(3, 10), (1, 1), (10, 3), (40, 40)])
def test_no_document_is_on_both_sides(seed: int, held_out: int, rows: int) -> None:
    lengths = [7 + 13 * (index % 9) for index in range(40)]
    packed = pack_documents(numbered_source(lengths), held_out=held_out, rows=rows, cols=50, prefix=[99], seed=seed)
    held, calibration = ({token for ids in ids_of(side) for token in ids} for side in (packed.held_out, packed.rows))
    assert held & calibration <= {99}  # the prefix
    assert len(packed.held_out) <= held_out
    assert len(packed.rows) <= rows
    counts = Counter(token for ids in ids_of([*packed.held_out, *packed.rows]) for token in ids if token != 99)
    assert all(count <= lengths[token] for token, count in counts.items())  # nothing twice
    if held_out + rows < 40:
        assert (len(packed.held_out), len(packed.rows)) == (held_out, rows)


def test_a_long_document_continues_in_the_next_row() -> None:
    source = DocumentSource("long", 1, lambda index: list(range(100)))
    packed = pack_documents(source, held_out=0, rows=3, cols=40, prefix=[7], seed=0)
    assert ids_of(packed.rows) == [[7, *range(39)], [7, *range(39, 78)], [7, *range(78, 100)]]


def test_scarce_documents_are_shared_and_a_single_one_is_for_calibration() -> None:
    packed = pack_documents(numbered_source([40] * 10), held_out=10, rows=30, cols=40, prefix=[], seed=1)
    assert (len(packed.held_out), len(packed.rows)) == (3, 7)
    packed = pack_documents(numbered_source([80]), held_out=2, rows=2, cols=40, prefix=[], seed=1)
    assert (len(packed.held_out), len(packed.rows)) == (0, 2)


def test_the_prefix_is_what_the_tokenizer_puts_first() -> None:
    assert special_prefix(ByteTarget().tokenizer) == [BEGIN]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": -1, "cols": 64}, "-1 calibration rows"),
        ({"rows": 1, "cols": 4}, "4 tokens per calibration row"),
        ({"rows": 1, "cols": 64, "held_out": -2}, "-2 held-out rows"),
        ({"rows": 1, "cols": 64, "answer_tokens": 1}, "1 tokens per answer"),
    ],
)
def test_requests_out_of_range_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(Exl3DflashError, match=message):
        load_rows("default", ByteTarget(), **arguments)


def test_a_tokenizer_beyond_the_embedding_is_refused() -> None:
    with pytest.raises(Exl3DflashError, match=r"gives the id \d+.*ids below 100"):
        load_rows("default", ByteTarget(vocab_size=100), rows=2, cols=64)


def test_sources_are_checked_before_a_model_is_loaded(tmp_path: Path) -> None:
    check_source("default")
    check_source("chat")
    with pytest.raises(Exl3DflashError, match=r"nowhere\.txt does not exist.*`default`, `chat`"):
        check_source(str(tmp_path / "nowhere.txt"))
    with pytest.raises(Exl3DflashError, match="no known format"):
        check_source(str(tmp_path))

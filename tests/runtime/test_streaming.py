"""Streamed text equals the decoded whole, and no part of a stop string is ever shown."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from exl3_dflash.runtime.engine import StopSettings
from exl3_dflash.runtime.streaming import IncrementalDecoder, StopScanner, TextStream, answer_text


class ByteTokenizer:
    """Token i is byte i; 256 is a special token."""

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        assert skip_special
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


class WordTokenizer:
    """SentencePiece-like: words carry their leading space, which decoding drops at the start of the text."""

    words = (" The", " cat", "s", " ", " sat", ".", "\n", " 猫", "")

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        text = "".join(self.words[token] for token in ids)
        return text[1:] if text.startswith(" ") else text


def pieces_of(tokenizer: object, ids: Sequence[int]) -> list[str]:
    decoder = IncrementalDecoder(tokenizer)
    return [*(decoder.push(token) for token in ids), decoder.flush()]


@given(st.text(max_size=20))
@example("a猫😀é\ufffd.\ufffd")
def test_bytes_of_any_text_stream_as_the_text(text: str) -> None:
    pieces = pieces_of(ByteTokenizer(), list(text.encode()))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces if "\ufffd" not in text)


@given(st.lists(st.one_of(st.integers(0, 256), st.sampled_from([0xE7, 0x8C, 0xAB, 0xF0, 0x9F])), max_size=30))
def test_any_bytes_stream_as_the_decoded_whole(ids: list[int]) -> None:
    assert "".join(pieces_of(ByteTokenizer(), ids)) == ByteTokenizer().decode(ids, skip_special=True)


@given(st.lists(st.integers(0, 8), max_size=20))
def test_dropped_leading_spaces_come_back(ids: list[int]) -> None:
    assert "".join(pieces_of(WordTokenizer(), ids)) == WordTokenizer().decode(ids)


def test_complete_characters_are_shown_at_once() -> None:
    assert pieces_of(ByteTokenizer(), list("é!".encode())) == ["", "é", "!", ""]
    assert pieces_of(WordTokenizer(), [0, 1, 2, 5]) == ["The", " cat", "s", ".", ""]


def first_completed_cut(text: str, stops: Sequence[str]) -> str:
    """The text before the stop string that is completed first, character by character."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@settings(max_examples=300)
@given(
    pieces=st.lists(st.text("abc", max_size=5), max_size=8),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_across_pieces(pieces: list[str], stops: list[str]) -> None:
    scanner, shown, text = StopScanner(stops), "", "".join(pieces)
    wanted = first_completed_cut(text, stops)
    for piece in pieces:
        shown += scanner.push(piece)
        assert wanted.startswith(shown)
    assert scanner.found == any(stop in text for stop in stops)
    assert shown + scanner.flush() == wanted


def test_partial_stop_string_is_held_back_and_released() -> None:
    scanner = StopScanner(["<end>"])
    assert [scanner.push(piece) for piece in ("a<", "en", "d", "!", "<e")] == ["a", "", "", "<end!", ""]
    assert scanner.flush() == "<e"


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("one\ntwo\n\nthree", StopSettings(strings=("\n\n",)), "one\ntwo"),
        ("猫 and 犬.", StopSettings(strings=("犬",)), "猫 and "),
        ("abc", StopSettings(token_ids=frozenset(b"c")), "ab"),
    ],
)
def test_answer_text(text: str, stops: StopSettings, shown: str) -> None:
    assert answer_text(ByteTokenizer(), text.encode(), stops) == shown


def test_nothing_is_shown_after_a_stop() -> None:
    stream = TextStream(ByteTokenizer(), StopSettings(strings=("b",)))
    assert stream.push(b"ab") == "a"
    assert stream.stopped
    assert stream.push(b"cd") + stream.finish() == ""

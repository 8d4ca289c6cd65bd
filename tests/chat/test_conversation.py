"""Saved chats: round trip, foreign lists, and every kind of wrong file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exl3_dflash.chat.conversation import FORMAT, Conversation
from exl3_dflash.errors import Exl3DflashError

USER = {"role": "user", "content": "hi"}


def test_round_trip(tmp_path: Path) -> None:
    conversation = Conversation("sé", True, [USER, {"role": "assistant", "content": "猫\n"}])
    path = tmp_path / "chat.json"
    conversation.save(path)
    conversation.save(path)
    assert Conversation.load(path) == conversation


def test_bare_list_of_messages(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text(json.dumps([{"role": "system", "content": "kind"}, USER]))
    assert Conversation.load(path) == Conversation("kind", None, [USER])


@pytest.mark.parametrize(
    "content",
    [
        "no json",
        b"\xff\xfe\x00",
        {},
        3,
        {"format": FORMAT, "version": 99, "messages": []},
        {"format": FORMAT, "version": 1, "messages": "text"},
        {"format": FORMAT, "version": 1, "messages": [], "thinking": "yes"},
        [{"role": "user"}],
        [{"role": "robot", "content": "hi"}],
        [USER, {"role": "system", "content": "late"}],
        ["hi"],
    ],
)
def test_wrong_files_are_named(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(Exl3DflashError, match=r"wrong\.json is no saved chat"):
        Conversation.load(path)
    with pytest.raises(Exl3DflashError, match="exists and is no saved chat"):
        Conversation().save(path)


def test_unreadable_and_unwritable_places(tmp_path: Path) -> None:
    with pytest.raises(Exl3DflashError, match="cannot read"):
        Conversation.load(tmp_path / "absent.json")
    with pytest.raises(Exl3DflashError, match="cannot read"):
        Conversation.load(tmp_path)
    with pytest.raises(Exl3DflashError, match="cannot write"):
        Conversation().save(tmp_path / "absent" / "chat.json")


def test_last_question_is_taken_with_its_answer() -> None:
    conversation = Conversation(
        messages=[USER, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    )
    assert conversation.take_last_question() == "b"
    assert conversation.take_last_question() == "hi"
    assert conversation.take_last_question() is None

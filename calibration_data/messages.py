"""Conversations as they stand in JSON files: a list of {"role": ..., "content": ...}, checked with clear errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, TypedDict

from quantize.errors import Exl3DflashError


class Message(TypedDict):
    """One turn of a conversation; the role is one that the target's chat template knows."""

    role: str
    content: str


def json_lines(text: str, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, object) for every non-blank line of the JSON Lines `text`.

    Args:
        text: contents of the file.
        name: the file, for errors; `place` is "<name> line <n>".

    Raises:
        Exl3DflashError: a line is not a JSON object; the message gives its number.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{name} line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise Exl3DflashError(
                f"{place} is not JSON ({error})", "one JSON object per line", "fix the line"
            ) from None
        if not isinstance(record, dict):
            raise Exl3DflashError(f"{place} is no JSON object", "one JSON object per line", "fix the line")
        yield place, record


def check_messages(value: object, place: str) -> tuple[Message, ...]:
    """The conversation in `value`.

    Raises:
        Exl3DflashError: not a list of turns with a role and text, or without any turn of the user.
    """
    if not isinstance(value, list) or not all(_is_message(message) for message in value):
        raise Exl3DflashError(
            f"`messages` of {place} is no conversation",
            'a list of {"role": "user", "content": "text"} with text that is not empty',
            "fix the line",
        )
    if not any(message["role"] == "user" for message in value):
        raise Exl3DflashError(f"`messages` of {place} has no turn of the user", "at least one", "fix the line")
    return tuple(Message(role=message["role"], content=message["content"]) for message in value)


def _is_message(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    role, content = value.get("role"), value.get("content")
    return isinstance(role, str) and bool(role) and isinstance(content, str) and bool(content.strip())

"""The messages of a chat and their file format.

A saved chat is one JSON object, written under a temporary name and renamed:

    {"format": "exl3-dflash chat", "version": 1, "system": null | text, "thinking": null | bool,
     "messages": [{"role": "user" | "assistant", "content": text}, ...]}

A bare list of messages, as many programs export it, is read too; its first message may be the system's.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exl3_dflash.errors import Exl3DflashError

if TYPE_CHECKING:
    from exl3_dflash.target.base import ChatMessage

FORMAT = "exl3-dflash chat"
VERSION = 1


@dataclass
class Conversation:
    """System prompt, thinking switch (None: the template's default) and the turns, oldest first."""

    system: str | None = None
    thinking: bool | None = None
    messages: list[ChatMessage] = field(default_factory=list)

    def add(self, role: str, content: str) -> None:
        """Append one turn."""
        self.messages.append({"role": role, "content": content})

    def for_template(self) -> list[ChatMessage]:
        """All messages as the chat template wants them, the system prompt first."""
        system: list[ChatMessage] = [{"role": "system", "content": self.system}] if self.system else []
        return system + self.messages

    def take_last_question(self) -> str | None:
        """Remove the last user message and everything after it; returns its text, None where there is none."""
        for at in range(len(self.messages) - 1, -1, -1):
            if self.messages[at]["role"] == "user":
                text = self.messages[at]["content"]
                del self.messages[at:]
                return text
        return None

    def save(self, path: Path) -> None:
        """Write to `path`, replacing a chat saved there before.

        Raises:
            Exl3DflashError: the file is something other than a saved chat, or cannot be written.
        """
        if path.exists() and not _is_saved_chat(path):
            raise Exl3DflashError(f"{path} exists and is no saved chat", "a new file", "choose another name")
        content = {
            "format": FORMAT,
            "version": VERSION,
            "system": self.system,
            "thinking": self.thinking,
            "messages": self.messages,
        }
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise Exl3DflashError(f"cannot write {path}: {error.strerror}", fix="choose another file") from error

    @classmethod
    def load(cls, path: Path) -> Conversation:
        """Read a saved chat.

        Raises:
            Exl3DflashError: the file cannot be read or is no saved chat; the message says what is wrong.
        """
        content = _read_json(path)
        if isinstance(content, list):
            content = {"format": FORMAT, "version": VERSION, "messages": content}
        if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("version") != VERSION:
            raise _not_a_chat(path, f"no {FORMAT!r} of version {VERSION}")
        system, thinking, messages = content.get("system"), content.get("thinking"), content.get("messages")
        if (
            not isinstance(system, str | None)
            or not isinstance(thinking, bool | None)
            or not isinstance(messages, list)
        ):
            raise _not_a_chat(path, "system, thinking or messages has a wrong type")
        for number, message in enumerate(messages, 1):
            _check_message(path, number, message)
        turns: list[ChatMessage] = [{"role": message["role"], "content": message["content"]} for message in messages]
        if turns and turns[0]["role"] == "system":
            system = turns.pop(0)["content"]
        return cls(system=system, thinking=thinking, messages=turns)


def _check_message(path: Path, number: int, message: Any) -> None:
    roles = ("user", "assistant", "system") if number == 1 else ("user", "assistant")
    if not isinstance(message, dict) or message.get("role") not in roles or not isinstance(message.get("content"), str):
        raise _not_a_chat(path, f"message {number} is no object with a role ({' or '.join(roles)}) and text content")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Exl3DflashError(f"cannot read {path}: {error.strerror}", fix="check the path") from error
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError
        raise _not_a_chat(path, "it is no JSON") from error


def _is_saved_chat(path: Path) -> bool:
    try:
        Conversation.load(path)
    except Exl3DflashError:
        return False
    return True


def _not_a_chat(path: Path, reason: str) -> Exl3DflashError:
    return Exl3DflashError(f"{path} is no saved chat: {reason}", "a file written by /save", "choose another file")

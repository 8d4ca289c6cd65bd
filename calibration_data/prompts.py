"""The project's own prompts, in ten kinds, and the same schema read from a target that brings its own.

Why own prompts: a drafter is measured and calibrated on what its target writes, and what it writes depends on what it
is asked. Ten kinds keep the rows from being all chat or all code; long_context asks about documents of 1,000 to 3,500
words. All texts were written for this project.

File format (JSON Lines, one prompt a line):

    {"id": "chat-001", "kind": "chat", "messages": [{"role": "user", "content": "..."}]}

The last turn is the user's: the target writes the next one. In prompts/long_context.jsonl a list `documents` names
files of documents/, which replace the word {documents} in the messages; each document is stored once.

A target directory may hold `exl3_dflash_prompts.jsonl` in this format (any kinds, without `documents`): a target for
one domain is then calibrated on that domain.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from calibration_data.messages import Message, check_messages, json_lines
from quantize.errors import Exl3DflashError

KINDS = (
    "chat",
    "code",
    "math",
    "json_tools",
    "summarization",
    "translation",
    "lists",
    "stories",
    "multilingual",
    "long_context",
)
TARGET_PROMPTS_FILE = "exl3_dflash_prompts.jsonl"

_KEYS = frozenset({"id", "kind", "messages"})
_DOCUMENTS_MARK = "{documents}"


@dataclass(frozen=True)
class Prompt:
    """A conversation that waits for the target's answer.

    Attributes:
        kind: what sort of text it asks for, one of KINDS for the project's own.
        messages: the turns so far; the last is the user's.
        id: unique within its file.
    """

    kind: str
    messages: tuple[Message, ...]
    id: str


def load_prompts(kinds: Iterable[str] | None = None) -> list[Prompt]:
    """The project's prompts, in a fixed order.

    Args:
        kinds: of KINDS; all of them where None.

    Raises:
        Exl3DflashError: an unknown kind, or the data files are not installed.
    """
    wanted = KINDS if kinds is None else tuple(kinds)
    for kind in wanted:
        if kind not in KINDS:
            raise Exl3DflashError(f"prompt kind {kind!r}", f"one of {', '.join(KINDS)}", "choose another kind")
    return [prompt for kind in wanted for prompt in _prompts_of_kind(kind)]


def target_prompts(directory: Path | None) -> list[Prompt]:
    """The prompts that a target's directory brings along in `exl3_dflash_prompts.jsonl`; none without that file.

    Raises:
        Exl3DflashError: the file is not in the format of the module docstring, or empty.
    """
    path = directory / TARGET_PROMPTS_FILE if directory else None
    if path is None or not path.is_file():
        return []
    prompts = _parse(_read(path), str(path), _KEYS)
    if not prompts:
        raise Exl3DflashError(f"{path} has no prompts", "one JSON object per line", "fill or remove the file")
    return prompts


@cache
def _prompts_of_kind(kind: str) -> tuple[Prompt, ...]:
    name = f"prompts/{kind}.jsonl"
    return tuple(_parse(_resource(name), name, {*_KEYS, "documents"}))


def _resource(name: str) -> str:
    """Text of one of this package's data files."""
    return _read(files("calibration_data").joinpath(name))


def _read(file: Traversable | Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Exl3DflashError(
            f"cannot read {file} ({error})", "a UTF-8 text file", "install exl3-dflash again"
        ) from None


def _parse(text: str, name: str, keys: Set[str]) -> list[Prompt]:
    prompts = [_prompt(record, place, keys) for place, record in json_lines(text, name)]
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise Exl3DflashError(f"{name} has the id {prompt.id!r} twice", "unique ids", "rename one of them")
        seen.add(prompt.id)
    return prompts


def _prompt(record: dict[str, Any], place: str, keys: Set[str]) -> Prompt:
    unknown = sorted(set(record) - keys)
    if unknown or not all(isinstance(record.get(key), str) and record[key] for key in ("id", "kind")):
        fault = f"has the unknown key {unknown[0]!r}" if unknown else "lacks an id or a kind"
        raise Exl3DflashError(f"{place} {fault}", "the keys id, kind and messages", "fix the line")
    messages = check_messages(record.get("messages"), place)
    if messages[-1]["role"] != "user":
        raise Exl3DflashError(
            f"{place} ends with the role {messages[-1]['role']!r}", "a turn of the user", "fix the line"
        )
    if "documents" in record:
        messages = _with_documents(messages, record["documents"])
    return Prompt(kind=record["kind"], messages=messages, id=record["id"])


def _with_documents(messages: tuple[Message, ...], names: list[str]) -> tuple[Message, ...]:
    """Put the named documents where the messages say {documents}; several are numbered."""
    texts = [_resource(f"documents/{name}.txt").strip() for name in names]
    if len(texts) > 1:
        texts = [f"[Document {number}]\n\n{text}" for number, text in enumerate(texts, 1)]
    quoted = "\n\n\n".join(texts)
    return tuple(
        Message(role=message["role"], content=message["content"].replace(_DOCUMENTS_MARK, quoted))
        for message in messages
    )

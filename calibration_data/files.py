"""Calibration files given by the user, read and checked; nothing here knows a tokenizer or a model.

    .txt           UTF-8 text
    .jsonl         one object a line with `text`, or one with `messages` (a conversation) on every line
    .safetensors   `input_ids` or `ids` [rows, columns] of integers, with optional `lengths` [rows] (the rest of a row
                   is padding) and `prompt_lengths` [rows] (tokens before the answer); exllamav3 writes such traces

Further keys of a JSON line are ignored: they are notes of whoever made the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calibration_data.messages import Message, check_messages, json_lines
from quantize.errors import Exl3DflashError

if TYPE_CHECKING:
    import torch

FILE_KINDS = (".txt", ".jsonl", ".safetensors")
_ID_KEYS = ("input_ids", "ids")


@dataclass(frozen=True)
class JsonLinesFile:
    """Either documents or conversations; the other tuple is empty."""

    documents: tuple[str, ...]
    conversations: tuple[tuple[Message, ...], ...]


@dataclass(frozen=True)
class FileRow:
    """One token row of a file: ids (S,) int64 without padding; prompt_length 0 means all of it is text."""

    ids: torch.Tensor
    prompt_length: int


def check_file(path: Path) -> None:
    """Raise Exl3DflashError unless `path` is a file of a kind that can be read here and is not empty."""
    if not path.exists():
        raise Exl3DflashError(
            f"calibration data {path} does not exist",
            f"`default`, `chat`, or a file ({', '.join(FILE_KINDS)})",
            "check the spelling",
        )
    if not path.is_file() or path.suffix not in FILE_KINDS:
        raise Exl3DflashError(
            f"calibration data {path} has no known format", f"a file ({', '.join(FILE_KINDS)})", "convert it"
        )
    if path.stat().st_size == 0:
        raise Exl3DflashError(f"calibration data {path} is empty", "text or token rows", "give another file")


def read_text(path: Path) -> str:
    """The contents of a UTF-8 file that is not blank."""
    check_file(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise Exl3DflashError(f"cannot read {path} ({error})", "UTF-8 text", "convert the file") from None
    if not text.strip():
        raise Exl3DflashError(f"calibration data {path} is blank", "text", "give another file")
    return text


def read_json_lines(path: Path) -> JsonLinesFile:
    """The texts or the conversations of a .jsonl file.

    Raises:
        Exl3DflashError: a line that is not JSON or has neither `text` nor `messages` (its number is given), or a file
            that mixes the two.
    """
    documents: list[str] = []
    conversations: list[tuple[Message, ...]] = []
    for place, record in json_lines(read_text(path), str(path)):
        if ("text" in record) == ("messages" in record):
            keys = ", ".join(sorted(record)) or "none"
            raise Exl3DflashError(f"{place} has the keys {keys}", "`text` or `messages`, not both", "fix the line")
        if "messages" in record:
            conversations.append(check_messages(record["messages"], place))
        elif isinstance(record["text"], str):
            documents.append(record["text"])
        else:
            raise Exl3DflashError(f"`text` of {place} is no string", "text", "fix the line")
        if documents and conversations:
            raise Exl3DflashError(f"{place} mixes `text` with `messages`", "one of them in all lines", "split the file")
    return JsonLinesFile(tuple(document for document in documents if document.strip()), tuple(conversations))


def read_token_rows(path: Path) -> list[FileRow]:
    """The rows of a .safetensors file, padding cut off.

    Raises:
        Exl3DflashError: not safetensors, no id tensor, or lengths that do not fit it.
    """
    tensors = _load_tensors(path)
    key = next((name for name in _ID_KEYS if name in tensors), None)
    if key is None:
        raise Exl3DflashError(
            f"{path} has the tensors {', '.join(sorted(tensors)) or 'none'}",
            "`input_ids` (or `ids`) [rows, columns], optionally `lengths` and `prompt_lengths` [rows]",
            "rename the tensor",
        )
    ids = tensors[key]
    if ids.dim() != 2 or ids.is_floating_point() or ids.is_complex() or not ids.numel():
        raise Exl3DflashError(
            f"`{key}` of {path} is {ids.dtype} {list(ids.shape)}", "integers [rows, columns]", "write token ids"
        )
    count, columns = ids.shape
    lengths = _row_numbers(tensors, "lengths", count, 1, columns, path) or [columns] * count
    prompts = _row_numbers(tensors, "prompt_lengths", count, 0, columns, path) or [0] * count
    return [
        FileRow(row[:length].long(), min(prompt, length))
        for row, length, prompt in zip(ids, lengths, prompts, strict=True)
    ]


def _load_tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_file(path)
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise Exl3DflashError(
            f"cannot read {path} ({error})", "a complete safetensors file", "write it again"
        ) from None


def _row_numbers(
    tensors: dict[str, torch.Tensor], key: str, count: int, least: int, most: int, path: Path
) -> list[int]:
    """The numbers of tensor `key`, one per row and within least..most; empty where the file has none."""
    if key not in tensors:
        return []
    tensor = tensors[key]
    if tensor.is_floating_point() or tuple(tensor.shape) != (count,):
        raise Exl3DflashError(
            f"`{key}` of {path} is {tensor.dtype} {list(tensor.shape)}", f"integers [{count}]", "write one per row"
        )
    numbers: list[int] = tensor.tolist()
    for row, number in enumerate(numbers):
        if not least <= number <= most:
            raise Exl3DflashError(
                f"`{key}` of {path} is {number} in row {row}", f"{least} to {most}", "write the file again"
            )
    return numbers

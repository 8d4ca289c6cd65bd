"""The safetensors file format: headers read strictly, files written without a copy in memory.

A safetensors file is an 8-byte little-endian length, that many bytes of JSON (`{name: {dtype, shape, data_offsets}}`,
plus an optional `__metadata__`), then the tensors' bytes back to back in one data section. Readers differ in how much
of this they check: an interrupted download or a file with holes may load in one program and fail, or load garbage, in
the next. So everything is checked here before a single tensor is used: the file's size against the header, every
entry's offsets against its shape and type, and the data section for gaps, overlaps and repeated names.

Left out: reading the tensors themselves, which `quantize.tensor_directory` maps into memory through the safetensors
package.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard

import torch

from quantize.errors import Exl3DflashError

MAX_HEADER_BYTES = 100 * 1024**2  # the reference implementation's own limit
LENGTH_BYTES = 8

TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "I16": torch.int16,
        "U16": torch.uint16,
        "I32": torch.int32,
        "U32": torch.uint32,
        "I64": torch.int64,
        "U64": torch.uint64,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F32": torch.float32,
        "F64": torch.float64,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
    }
)

DTYPE_TAGS: Mapping[torch.dtype, str] = MappingProxyType({dtype: tag for tag, dtype in TORCH_DTYPES.items()})

_DOWNLOAD_AGAIN = "download or write the file again"


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies and what it is: `begin` and `end` are bytes from the start of the data section."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Read and check the header of `file`; the entries by tensor name, in the order of their data.

    Raises:
        Exl3DflashError: the file cannot be read, is cut off, or contradicts itself; the message names what is wrong.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            _check_length(file, size, length)
            text = stream.read(length)
    except OSError as error:
        raise Exl3DflashError(f"{file} cannot be read: {error.strerror}") from error
    entries = {name: _entry(file, name, value) for name, value in _parse_json(file, text).items()}
    _check_data_section(file, entries, size - LENGTH_BYTES - length)
    return dict(sorted(entries.items(), key=lambda item: item[1].begin))


def _check_length(file: Path, size: int, length: int) -> None:
    if size < LENGTH_BYTES:
        raise Exl3DflashError(f"{file} is cut off: {size} bytes", "a safetensors file", _DOWNLOAD_AGAIN)
    if length.to_bytes(LENGTH_BYTES, "little") == b"version ":
        raise Exl3DflashError(
            f"{file} is a Git LFS pointer, not the weights", "a safetensors file", "run `git lfs pull` in its folder"
        )
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise Exl3DflashError(f"{file} is not a safetensors file: header length {length}", "2 bytes to 100 MiB")
    if LENGTH_BYTES + length > size:
        raise Exl3DflashError(
            f"{file} is cut off inside its header: {size} bytes, header of {length}", fix=_DOWNLOAD_AGAIN
        )


def _parse_json(file: Path, text: bytes) -> dict[str, Any]:
    """The header's tensor entries, without `__metadata__`; a name that occurs twice is an error."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise Exl3DflashError(f"{file} names {key!r} twice in its header", "every tensor once")
            seen[key] = value
        return seen

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise Exl3DflashError(f"{file} has a damaged header: {error}", "JSON", _DOWNLOAD_AGAIN) from error
    if not isinstance(header, dict):
        raise Exl3DflashError(f"{file} has a damaged header", "a JSON object", _DOWNLOAD_AGAIN)
    header.pop("__metadata__", None)
    return header


def _entry(file: Path, name: str, value: Any) -> TensorEntry:
    """Check one header entry by itself: its fields, its type, and its byte count against its shape."""
    fields = value if isinstance(value, dict) else {}
    tag, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not (isinstance(tag, str) and _all_counts(shape) and _all_counts(offsets) and len(offsets) == 2):
        raise Exl3DflashError(f"{file}: the header entry of {name!r} is damaged", "dtype, shape and data_offsets")
    if tag not in TORCH_DTYPES:
        raise Exl3DflashError(
            f"{file}: tensor {name!r} has the type {tag}, which cannot be read", f"one of {', '.join(TORCH_DTYPES)}"
        )
    dtype, (begin, end) = TORCH_DTYPES[tag], offsets
    expected = math.prod(shape) * dtype.itemsize
    if end - begin != expected:
        raise Exl3DflashError(
            f"{file}: tensor {name!r} covers {end - begin} bytes", f"{expected} for shape {shape} of {tag}"
        )
    return TensorEntry(file, dtype, tuple(shape), begin, end)


def _all_counts(value: object) -> TypeGuard[list[int]]:
    """A list of whole numbers of at least 0 (True is not a number here)."""
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_data_section(file: Path, entries: Mapping[str, TensorEntry], data_bytes: int) -> None:
    """The tensors must fill the data section from its first to its last byte, each byte once."""
    if not entries:
        raise Exl3DflashError(f"{file} holds no tensors", "at least one")
    position, previous = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            fault = "a gap" if entry.begin > position else "an overlap"
            between = f"between {previous!r} and {name!r}" if previous else f"before {name!r}"
            raise Exl3DflashError(f"{file} has {fault} in its data {between}", "tensors back to back", _DOWNLOAD_AGAIN)
        position, previous = entry.end, name
    if position > data_bytes:
        cut = _first_cut(entries.items(), data_bytes)
        raise Exl3DflashError(
            f"{file} is cut off: {data_bytes} bytes of data, so {cut!r} is incomplete", f"{position}", _DOWNLOAD_AGAIN
        )
    if position < data_bytes:
        raise Exl3DflashError(
            f"{file} has {data_bytes - position} bytes that belong to no tensor", f"{position} bytes of data"
        )


def _first_cut(entries: Iterable[tuple[str, TensorEntry]], data_bytes: int) -> str:
    """The name of the first tensor that ends past the data that is there."""
    return min((entry.begin, name) for name, entry in entries if entry.end > data_bytes)[1]


def write_file(file: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write CPU tensors to a new safetensors file and flush it to the disk; each tensor goes straight from its memory.

    Wide types come first, so that every tensor is aligned to its element size. The metadata says `format: pt`, which
    transformers asks for, and `metadata` beside it.

    Raises:
        OSError: from the file system, for example when the disk is full. A partial file may be left.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    position = 0
    for name, tensor in ordered:
        offsets = [position, position + tensor.nbytes]
        header[name] = {"dtype": DTYPE_TAGS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        position = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for _, tensor in ordered:
            if tensor.numel():
                stream.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        stream.flush()
        os.fsync(stream.fileno())

"""Read access to the tensors of a model directory, one safetensors file or many.

Which files count, in this order:

- the shards that `model.safetensors.index.json` lists, where there is an index. Every tensor it lists must be in the
  shard it names, and a shard may hold nothing else;
- `model.safetensors`, where there is one;
- the only `*.safetensors` file, or a complete set `<stem>-00001-of-0000N.safetensors`.

Everything else is refused, because other programs answer it differently: ExLlamaV3 reads every `*.safetensors` file it
finds, transformers reads `model.safetensors` and ignores an index beside it. Tensors are mapped into memory on demand;
opening a directory reads headers only.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quantize.errors import Exl3DflashError
from quantize.safetensors_file import TensorEntry, read_header

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_NUMBERED_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.ckpt")


class TensorDirectory:
    """The tensors of one directory (or one file), by name. Made by `open`; a context manager."""

    def __init__(self, path: Path, files: tuple[Path, ...], entries: dict[str, TensorEntry]) -> None:
        self.path = path
        self.files = files
        self._entries = entries
        self._handles: dict[Path, Any] = {}
        self._sha256: str | None = None

    @classmethod
    def open(cls, path: str | Path) -> TensorDirectory:
        """Find the weight files under `path` and check them completely; nothing but headers is read.

        Args:
            path: a directory with one safetensors file or an index and its shards, or a single `.safetensors` file.

        Raises:
            Exl3DflashError: for each structural fault, naming the file and the tensor: no such folder, no weights, an
                absent or incomplete shard, a file that is cut off or has gaps, a tensor in no shard or in two.
        """
        path = Path(path).expanduser()
        if path.is_file():
            return cls(path, (path,), read_header(path))
        if not path.is_dir():
            raise Exl3DflashError(f"{path} does not exist", "a model directory", "check the path")
        index = path / INDEX_NAME
        if index.is_file():
            files, entries = _open_index(index)
        else:
            files = _files_without_index(path)
            entries = _merge(files)
        return cls(path, files, entries)

    def names(self) -> tuple[str, ...]:
        """All tensor names, sorted."""
        return tuple(sorted(self._entries))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, name: str) -> TensorEntry:
        """File, type, shape and place of `name`; an error that names it where it is absent."""
        if name not in self._entries:
            raise Exl3DflashError(f"{self.path} has no tensor {name!r}", "a complete checkpoint")
        return self._entries[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self.entry(name).dtype

    def nbytes(self, name: str | None = None) -> int:
        """Bytes of one tensor, or of all tensors."""
        if name is not None:
            return self.entry(name).nbytes
        return sum(entry.nbytes for entry in self._entries.values())

    def get(self, name: str) -> torch.Tensor:
        """The tensor `name` on the CPU in its stored type, mapped from the file: treat it as read-only."""
        file = self.entry(name).file
        try:
            if file not in self._handles:
                self._handles[file] = safe_open(file, framework="pt", device="cpu")
            tensor: torch.Tensor = self._handles[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise Exl3DflashError(f"{file}: tensor {name!r} cannot be read: {error}") from error
        return tensor

    def sha256(self) -> str:
        """One SHA-256 for the weight files: the file's own where there is one file, else that of the sorted lines
        `<digest>  <file name>` that `sha256sum` would print."""
        if self._sha256 is None:
            digests = {file.name: file_sha256(file) for file in self.files}
            lines = "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))
            one = len(digests) == 1
            self._sha256 = next(iter(digests.values())) if one else hashlib.sha256(lines.encode()).hexdigest()
        return self._sha256

    def close(self) -> None:
        """Let go of the mapped files; tensors already handed out stay valid."""
        self._handles.clear()

    def __enter__(self) -> TensorDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def file_sha256(file: Path) -> str:
    """SHA-256 of a file's bytes, as hex digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _files_without_index(path: Path) -> tuple[Path, ...]:
    """The weight files of a directory that has no index; see the module's list of what counts."""
    found = sorted(path.glob("*.safetensors"))
    if (path / SINGLE_NAME) in found:
        return (path / SINGLE_NAME,)
    numbered = [match for file in found if (match := _NUMBERED_SHARD.fullmatch(file.name))]
    if numbered and len(numbered) == len(found):
        _check_numbered(path, numbered)
        return tuple(found)
    if len(found) > 1:
        raise Exl3DflashError(
            f"{path} has {len(found)} safetensors files and no {INDEX_NAME}",
            f"one {SINGLE_NAME}, or an index",
            "keep the files of one model in the folder",
        )
    if not found:
        others = sorted(file.name for pattern in _OTHER_WEIGHTS for file in path.glob(pattern))
        seen = f" (it has {others[0]})" if others else ""
        raise Exl3DflashError(f"{path} has no safetensors file{seen}", f"{SINGLE_NAME}, or {INDEX_NAME} with shards")
    return tuple(found)


def _check_numbered(path: Path, numbered: list[re.Match[str]]) -> None:
    """Numbered shards without an index are a model only if they are one complete set."""
    sets = {(match["stem"], int(match["count"])) for match in numbered}
    if len(sets) > 1:
        raise Exl3DflashError(f"{path} mixes shards of {len(sets)} models and has no {INDEX_NAME}", "one complete set")
    ((stem, count),) = sets
    missing = sorted(set(range(1, count + 1)) - {int(match["number"]) for match in numbered})
    if missing or len(numbered) != count:
        raise Exl3DflashError(
            f"{path} has {len(numbered)} of {count} shards of {stem!r}, and no {INDEX_NAME}",
            f"all of them (missing: {', '.join(map(str, missing)) or 'none'})",
            "download the rest",
        )


def _merge(files: tuple[Path, ...]) -> dict[str, TensorEntry]:
    """The entries of all files together; a tensor in two files is an error."""
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in read_header(file).items():
            if name in entries:
                raise Exl3DflashError(f"tensor {name!r} is in {entries[name].file.name} and in {file}", "it once")
            entries[name] = entry
    return entries


def _open_index(index: Path) -> tuple[tuple[Path, ...], dict[str, TensorEntry]]:
    """The shards an index lists and their tensors, checked against each other in both directions."""
    weight_map = _read_weight_map(index)
    files = tuple(index.parent / shard for shard in sorted(set(weight_map.values())))
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise Exl3DflashError(
            f"{index} lists {', '.join(absent)}, absent from the folder", "every shard", "download the rest"
        )
    single = index.parent / SINGLE_NAME
    if single.is_file() and single not in files:
        raise Exl3DflashError(
            f"{index.parent} has {SINGLE_NAME} and an index that does not list it",
            "one set of weights",
            "remove the one that is out of date",
        )
    entries = _merge(files)
    for name, shard in weight_map.items():
        if name not in entries or entries[name].file.name != shard:
            where = f"it is in {entries[name].file.name}" if name in entries else "no shard has it"
            raise Exl3DflashError(f"{index} places tensor {name!r} in {shard}, but {where}", "an index that fits")
    unlisted = sorted(entries.keys() - weight_map.keys())
    if unlisted:
        file = entries[unlisted[0]].file
        raise Exl3DflashError(f"{file} holds {unlisted[0]!r}, which {INDEX_NAME} does not list", "an index that fits")
    return files, entries


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise Exl3DflashError(f"{index} cannot be used: {error!r}", "JSON with a weight_map") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise Exl3DflashError(f"{index} has an empty or damaged weight_map", "tensor name -> shard file")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".", ".."):
            raise Exl3DflashError(f"{index} places tensor {name!r} in {shard!r}", "a file name in the same folder")
    return weight_map

"""Write a model directory that is there completely or not at all.

Everything goes into a temporary directory beside the destination, which takes the destination's name in one rename at
the end; on any error the temporary directory is removed. A directory that is replaced with `force` stays in place until
the new one is complete.

Layout: `model.safetensors`; above the shard size `model-00001-of-0000N.safetensors` and `model.safetensors.index.json`;
`config.json` and `quantization_config.json`; whatever files are added. Tensors are kept by reference until a shard is
full, so memory is bounded by one shard (nothing at all for tensors that are mapped from files).
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from quantize.errors import Exl3DflashError
from quantize.quantization_config import CONFIG_NAME, QUANTIZATION_NAME, quantized_config, tensor_storage
from quantize.safetensors_file import DTYPE_TAGS, write_file
from quantize.tensor_directory import INDEX_NAME, SINGLE_NAME

DEFAULT_SHARD_BYTES = 8 * 1024**3
_HEADROOM_BYTES = 16 * 1024**2  # headers and JSON files
_TEMPORARY_SUFFIX, _REPLACED_SUFFIX = ".partial", ".old"
_RESERVED = (CONFIG_NAME, QUANTIZATION_NAME, INDEX_NAME)


class CheckpointWriter:
    """Collects tensors and files and puts the directory in place; a context manager.

    Args:
        out_dir: the directory to make.
        force: replace `out_dir` if it is a model directory already.
        shard_bytes: largest size of one safetensors file.
        expected_bytes: size of all tensors, if known: the disk is checked for it before any work.

    Raises:
        Exl3DflashError: on entering, if `out_dir` exists (and is not empty, or without `force`), its parent cannot be
            written, or the disk is too small; later, if writing fails. Leaving the block without `finish` discards all.
    """

    def __init__(
        self,
        out_dir: str | Path,
        *,
        force: bool = False,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        expected_bytes: int = 0,
    ) -> None:
        self.out_dir = Path(out_dir).expanduser().resolve()
        self._force = force
        self._shard_bytes = shard_bytes
        self._expected_bytes = expected_bytes
        self._temporary: Path | None = None
        self._made_parents: list[Path] = []
        self._pending: dict[str, torch.Tensor] = {}
        self._facts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._shards: list[tuple[str, ...]] = []
        self._config: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None

    def __enter__(self) -> CheckpointWriter:
        check_destination(self.out_dir, self._force)
        parent = self.out_dir.parent
        with writing(parent):
            self._made_parents = make_parents(parent)
            prefix = _temporary_prefix(self.out_dir)
            self._temporary = Path(tempfile.mkdtemp(prefix=prefix, suffix=_TEMPORARY_SUFFIX, dir=parent))
        try:
            require_space(parent, self._expected_bytes)
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._discard()

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors added so far."""
        return sum(_bytes(shape, dtype) for shape, dtype in self._facts.values())

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor; every name once. It is written when its shard is full, so do not change it afterwards."""
        assert name not in self._facts, f"tensor {name} added twice"
        assert tensor.dtype in DTYPE_TAGS, f"tensor {name} has type {tensor.dtype}"
        tensor = tensor.detach().cpu()
        if self._pending and sum(other.nbytes for other in self._pending.values()) + tensor.nbytes > self._shard_bytes:
            self._flush()
        self._pending[name] = tensor
        self._facts[name] = (tuple(tensor.shape), tensor.dtype)

    def add_file(self, name: str, content: str | bytes) -> None:
        """Add a file of the given content (text is stored as UTF-8) under a plain file name."""
        assert Path(name).name == name, f"{name} is not a plain file name"
        assert name not in _RESERVED, f"{name} is made by the writer"
        file = self._inside(name)
        with writing(file):
            file.write_bytes(content.encode() if isinstance(content, str) else content)

    def set_config(self, config: Mapping[str, Any], quantization: Mapping[str, Any]) -> None:
        """What `config.json` says: the source's keys, and `quantization_config` (see `quantize.quantization_config`).

        `quantization_config.json` with the storage of every tensor is derived from it when the directory is finished.
        """
        self._config = (config, quantization)

    def finish(self, check: Callable[[Path], object] | None = None) -> Path:
        """Write what is left, put the directory in place, and return its path.

        Args:
            check: is given the complete directory before it gets its final name; what it raises discards everything.
        """
        assert self._facts, "a checkpoint without tensors"
        self._flush()
        self._name_shards()
        if self._config is not None:
            config = quantized_config(*self._config)
            storage = {**config["quantization_config"], "tensor_storage": tensor_storage(self._facts)}
            self._write_json(CONFIG_NAME, config)
            self._write_json(QUANTIZATION_NAME, storage)
        temporary = self._inside("")
        if check is not None:
            check(temporary)
        with writing(self.out_dir):
            temporary.chmod(0o777 & ~_umask())
            _put_in_place(temporary, self.out_dir)
        self._temporary, self._made_parents = None, []
        return self.out_dir

    def discard_leftovers(self) -> None:
        """Remove what killed writers of the same `out_dir` left beside it; where one was killed while it replaced a
        directory, that directory comes back. Only for a caller that knows it is alone."""
        drawn = re.compile(re.escape(_temporary_prefix(self.out_dir)) + r"[a-z0-9_]+\.(partial|old)")
        for path in list(self.out_dir.parent.iterdir()):
            if not drawn.fullmatch(path.name) or path == self._temporary or not path.is_dir():
                continue
            if path.suffix == _REPLACED_SUFFIX and not self.out_dir.exists():
                path.replace(self.out_dir)
            else:
                shutil.rmtree(path, ignore_errors=True)

    def _flush(self) -> None:
        """Write the pending tensors as one shard under a name that its number may still change."""
        if not self._pending:
            return
        file = self._inside(_draft_name(len(self._shards)))
        require_space(file.parent, sum(tensor.nbytes for tensor in self._pending.values()))
        with writing(file):
            write_file(file, self._pending)
        self._shards.append(tuple(self._pending))
        self._pending = {}

    def _name_shards(self) -> None:
        """Give the shards their final names, and write an index if there are several."""
        count = len(self._shards)
        names = [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
        names = names if count > 1 else [SINGLE_NAME]
        with writing(self.out_dir):
            for number, name in enumerate(names):
                self._inside(_draft_name(number)).rename(self._inside(name))
        if count > 1:
            weight_map = {tensor: names[number] for number, shard in enumerate(self._shards) for tensor in shard}
            self._write_json(INDEX_NAME, {"metadata": {"total_size": self.tensor_bytes}, "weight_map": weight_map})

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        file = self._inside(name)
        with writing(file):
            file.write_text(json.dumps(content, indent=4), encoding="utf-8")

    def _inside(self, name: str) -> Path:
        assert self._temporary is not None, "used outside its with block"
        return self._temporary / name

    def _discard(self) -> None:
        """Remove the temporary directory and the parents made for it; does nothing after `finish`."""
        self._pending = {}
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None
        remove_empty(self._made_parents)
        self._made_parents = []


def _temporary_prefix(out_dir: Path) -> str:
    return f".{out_dir.name}."


def check_destination(out_dir: Path, force: bool) -> None:
    """Refuse a destination that exists, unless it is empty or, with `force`, a model directory.

    Raises:
        Exl3DflashError: naming what is in the way.
    """
    if not out_dir.exists():
        return
    if not out_dir.is_dir():
        raise Exl3DflashError(f"{out_dir} is a file", "a directory, or nothing", "choose another --out")
    content = [entry.name for entry in out_dir.iterdir()]
    if not content:
        return
    if not force:
        raise Exl3DflashError(f"{out_dir} exists and is not empty", "a new directory", "choose another, or use --force")
    if CONFIG_NAME not in content and not any(name.endswith(".safetensors") for name in content):
        raise Exl3DflashError(
            f"{out_dir} is not a model directory (it has {sorted(content)[0]!r})",
            "one that --force may delete",
            "choose another directory",
        )


def require_space(folder: Path, needed: int) -> None:
    """Raise `Exl3DflashError` unless the disk of `folder` has room for `needed` bytes and a little more."""
    free = shutil.disk_usage(folder).free
    if free < needed + _HEADROOM_BYTES:
        raise Exl3DflashError(
            f"{folder} has {free / 1e9:.2f} GB free", f"{(needed + _HEADROOM_BYTES) / 1e9:.2f} GB", "free some space"
        )


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the file system into one `Exl3DflashError` that names `path`."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        fix = "free some space" if full else "check the path and its permissions"
        raise Exl3DflashError(f"{path} cannot be written: {error.strerror or error}", fix=fix) from error


def _put_in_place(temporary: Path, out_dir: Path) -> None:
    """Rename `temporary` to `out_dir`; what was there is deleted last, and comes back if the rename fails."""
    if not out_dir.exists():
        temporary.replace(out_dir)
        return
    old = Path(tempfile.mkdtemp(prefix=_temporary_prefix(out_dir), suffix=_REPLACED_SUFFIX, dir=out_dir.parent))
    old.rmdir()  # only its name is wanted: not every system renames onto a directory
    out_dir.replace(old)
    try:
        temporary.replace(out_dir)
    except OSError:
        old.replace(out_dir)
        raise
    shutil.rmtree(old, ignore_errors=True)


def make_parents(folder: Path) -> list[Path]:
    """Make `folder` and its missing parents; the ones made, outermost first."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing[::-1]


def remove_empty(folders: list[Path]) -> None:
    """Remove those of `folders`, outermost first, that hold nothing."""
    for folder in reversed(folders):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _draft_name(number: int) -> str:
    return f"shard-{number:05}.partial"


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask

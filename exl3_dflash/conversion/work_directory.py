"""Intermediate results of a quantization job on disk, so that a job that dies loses at most the step it was in.

    work/manifest.json          what the job is: settings, digests of source and target, versions
    work/lock                   held while a job runs; the system releases it when the job dies
    work/<result>.safetensors   one finished step: its tensors; its facts and a checksum in the header

A result appears under its name complete or not at all (written beside it, flushed to the disk, renamed), and is
checked against its checksum when it is read: what is damaged is made again. A job only continues from results of the
same manifest. When a job has finished, its directory is removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from exl3_dflash.errors import Exl3DflashError

MANIFEST, LOCK, SUFFIX, PARTIAL = "manifest.json", "lock", ".safetensors", ".partial"


@dataclass(frozen=True)
class StepResult:
    """What a step left behind: tensors by name, and plain facts (JSON)."""

    tensors: dict[str, torch.Tensor]
    facts: dict[str, Any]


class WorkDirectory:
    """Results of one job; a context manager that holds the job's lock.

    Args:
        path: the directory; made where it does not exist.
        manifest: plain data that says what the job is. Results are only reused under an equal manifest.
        resume: continue an earlier job; it must be there.
        restart: throw away what an earlier job left.

    Raises:
        Exl3DflashError: on entering, if another job holds the directory, it holds something else than a job, an earlier
            job is there and neither `resume` nor `restart` is given, or it differs from `manifest`.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any], *, resume: bool = False, restart: bool = False) -> None:
        assert not (resume and restart)
        self.path = path
        self._manifest: dict[str, Any] = json.loads(json.dumps(manifest))
        self._resume = resume
        self._restart = restart
        self._lock = FileLock(path / LOCK)

    def __enter__(self) -> WorkDirectory:
        if self._resume and not (self.path / MANIFEST).is_file():
            raise Exl3DflashError(
                f"there is no job to resume in {self.path}",
                expected="the work directory of an interrupted job",
                fix="check --work-dir and --out, or leave out --resume",
            )
        self._refuse_foreign_files()
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise Exl3DflashError(
                f"another job is running in {self.path}", expected="one job per work directory", fix="let it finish"
            ) from None
        try:
            self._enter_locked()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path.is_dir() and not any(self.path.glob("*" + SUFFIX)):
            self.remove()  # no step was finished: there is nothing to resume
        self._lock.release()

    def _refuse_foreign_files(self) -> None:
        """A directory that is not a job's is never written to, let alone emptied."""
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise Exl3DflashError(f"the work directory {self.path} is a file", fix="give another --work-dir")
        foreign = [path.name for path in self.path.iterdir() if not _is_ours(path)]
        if foreign:
            raise Exl3DflashError(
                f"{self.path} holds {sorted(foreign)[0]}, which is no part of a job",
                expected="an empty directory or the work directory of an earlier job",
                fix="give another --work-dir",
            )

    def _enter_locked(self) -> None:
        earlier = self._read_manifest()
        if self._restart:
            self._clear()
            earlier = None
        if earlier is not None and not self._resume:
            raise Exl3DflashError(
                f"{self.path} holds an unfinished job",
                expected="a decision what to do with it",
                fix="--resume continues it, --restart starts over",
            )
        if earlier is None:
            self._clear()
            self._write_manifest()
            return
        differences = list(_differences(earlier, self._manifest))
        if differences:
            raise Exl3DflashError(
                f"the job in {self.path} was another one: {'; '.join(differences)}",
                expected="the same source, settings and versions",
                fix="give those again, or --restart to start over",
            )

    def _read_manifest(self) -> dict[str, Any] | None:
        try:
            manifest: dict[str, Any] = json.loads((self.path / MANIFEST).read_text("utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        return manifest

    def _write_manifest(self) -> None:
        partial = self.path / (MANIFEST + PARTIAL)
        partial.write_text(json.dumps(self._manifest, indent=2), encoding="utf-8")
        partial.replace(self.path / MANIFEST)

    def _clear(self) -> None:
        for path in self.path.iterdir():
            if path.name != LOCK:
                path.unlink()

    def load(self, step: str) -> StepResult | None:
        """The result of a finished step; None where there is none or it is damaged."""
        file = self._file(step)
        try:
            with safe_open(file, framework="pt") as opened:
                header = opened.metadata() or {}
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, no mapping
        except (FileNotFoundError, SafetensorError):
            return None
        facts = header.get("facts", "")
        if header.get("checksum") != _checksum(tensors, facts):
            return None
        return StepResult(tensors, json.loads(facts))

    def save(self, step: str, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """Keep the result of a finished step."""
        stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        text = json.dumps(facts)
        file = self._file(step)
        partial = file.with_name(file.name + PARTIAL)
        try:
            save_file(stored, partial, metadata={"facts": text, "checksum": _checksum(stored, text)})
            with partial.open("rb+") as handle:
                os.fsync(handle.fileno())
            partial.replace(file)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise Exl3DflashError(
                f"the result of step {step} cannot be written to {self.path}: {error}",
                expected="space on the disk and the right to write",
                fix="make room, then continue with --resume",
            ) from error

    def remove(self) -> None:
        """Delete everything; the job is done."""
        self._clear()
        self._lock.release()
        shutil.rmtree(self.path, ignore_errors=True)

    def _file(self, step: str) -> Path:
        assert "/" not in step, step
        return self.path / (step + SUFFIX)


def _is_ours(path: Path) -> bool:
    return path.name.removesuffix(PARTIAL) in (MANIFEST, LOCK) or path.name.removesuffix(PARTIAL).endswith(SUFFIX)


def _checksum(tensors: Mapping[str, torch.Tensor], facts: str) -> str:
    digest = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _differences(earlier: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """`key: was -> is` for every key that differs, nested ones by their path."""
    for key in sorted({*earlier, *now}):
        was, is_now = earlier.get(key), now.get(key)
        if isinstance(was, dict) and isinstance(is_now, dict):
            yield from _differences(was, is_now, f"{prefix}{key}.")
        elif was != is_now:
            yield f"{prefix}{key} was {was}, is {is_now}"

"""Intermediate results of a quantization job on disk, so that a job that dies loses at most the step it was in.

    work/manifest.json          what the job is: settings, digests of source and target, versions
    work/lock                   held while a job runs; the system releases it when the job dies
    work/<result>.safetensors   one finished step: its tensors; its facts and a checksum in the header

A result appears under its name complete or not at all (written beside it, flushed to the disk, renamed), and is
checked against its checksum when it is read: what is damaged is made again. A job only continues from results of the
same manifest. When a job has finished, its directory is removed, the manifest first: without one there is no job.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open

from exl3_dflash.errors import Exl3DflashError
from quantize.checkpoint import make_parents, remove_empty, writing
from quantize.safetensors_file import write_file

MANIFEST, LOCK, SUFFIX, PARTIAL = "manifest.json", "lock", ".safetensors", ".partial"


@dataclass(frozen=True)
class StepResult:
    """What a step left behind: tensors by name, and plain facts (JSON)."""

    tensors: dict[str, torch.Tensor]
    facts: dict[str, Any]


class WorkDirectory:
    """Results of one job; a context manager that holds the job's lock. `begin` before any result is read or kept.

    Args:
        path: the directory; made where it does not exist.
        resume: continue an earlier job; it must be there.
        restart: throw away what an earlier job left.
        note: is told about results that are damaged and will be made again.

    Raises:
        Exl3DflashError: on entering, if another job holds the directory, it holds something else than a job, or an
            earlier job is there and neither `resume` nor `restart` is given. Nothing is changed then.
    """

    def __init__(
        self,
        path: Path,
        *,
        resume: bool = False,
        restart: bool = False,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        assert not (resume and restart)
        self.path = path
        self._resume = resume
        self._restart = restart
        self._note = note
        self._lock = FileLock(path / LOCK)
        self._made_parents: list[Path] = []

    def __enter__(self) -> WorkDirectory:
        if self._resume and not (self.path / MANIFEST).is_file():
            raise Exl3DflashError(
                f"there is no job to resume in {self.path}",
                expected="the work directory of an interrupted job",
                fix="check --work-dir and --out, or leave out --resume",
            )
        self._refuse_foreign_files()
        with writing(self.path):
            self._made_parents = make_parents(self.path)
            self._acquire()
        if self._read_manifest() is not None and self.has_results and not (self._resume or self._restart):
            self._lock.release()
            raise Exl3DflashError(
                f"{self.path} holds an unfinished job",
                expected="a decision what to do with it",
                fix="--resume continues it, --restart starts over",
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path.is_dir() and not self.has_results:
            self.remove()  # no step was finished: there is nothing to resume
        self._lock.release()

    def _acquire(self) -> None:
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise Exl3DflashError(
                f"another job is running in {self.path}", expected="one job per work directory", fix="let it finish"
            ) from None

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

    def check(self, facts: Mapping[str, Any]) -> None:
        """Refuse, with `resume`, to continue a job whose manifest differs from `facts`, plain data: all of a manifest
        or those parts that are known early.

        Raises:
            Exl3DflashError: naming every difference.
        """
        earlier = self._read_manifest() if self._resume else None
        if earlier is None:
            return
        now = json.loads(json.dumps(facts))
        differences = list(_differences({key: earlier.get(key) for key in now}, now))
        if differences:
            raise Exl3DflashError(
                f"the job in {self.path} was another one: {'; '.join(differences)}",
                expected="the same source, target, settings and versions",
                fix="give those again, or --restart to start over",
            )

    def begin(self, manifest: Mapping[str, Any]) -> None:
        """Start the job that `manifest` (plain data) describes, or continue it.

        Raises:
            Exl3DflashError: as `check`, or the manifest cannot be written.
        """
        self.check(manifest)
        if self._resume and self._read_manifest() is not None:
            self._clear(lambda path: path.name.endswith(PARTIAL))
            return
        with writing(self.path):
            self._clear()
            partial = self.path / (MANIFEST + PARTIAL)
            partial.write_text(json.dumps(manifest, indent=2), encoding="utf-8")
            partial.replace(self.path / MANIFEST)

    def _read_manifest(self) -> dict[str, Any] | None:
        try:
            manifest: dict[str, Any] = json.loads((self.path / MANIFEST).read_text("utf-8"))
        except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
            return None
        return manifest

    def _clear(self, chosen: Callable[[Path], bool] = lambda path: True) -> None:
        """Delete the chosen files, the manifest before all others and never the lock."""
        for path in sorted(self.path.iterdir(), key=lambda path: path.name != MANIFEST):
            if path.name != LOCK and chosen(path):
                path.unlink()

    @property
    def has_results(self) -> bool:
        """Whether any step was finished."""
        return any(self.path.glob("*" + SUFFIX))

    @contextmanager
    def resumable(self) -> Iterator[None]:
        """Errors that leave finished steps behind say so."""
        try:
            yield
        except Exl3DflashError as error:
            if not self.has_results or "--resume" in (error.fix or ""):
                raise
            fix = f"{error.fix}, then continue with --resume" if error.fix else "continue with --resume"
            raise Exl3DflashError(error.what, error.expected, fix) from error

    def load(self, step: str) -> StepResult | None:
        """The result of a finished step, in memory of its own; None where there is none or it is damaged."""
        file = self._file(step)
        if not file.exists():
            return None
        result = _read(file)
        if result is None:
            self._note(f"note: {file} is damaged; this step is done again")
        return result

    def save(self, step: str, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """Keep the result of a finished step, in place of an earlier one.

        Raises:
            Exl3DflashError: the disk is full or cannot be written; what was kept before stays.
        """
        stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        text = json.dumps(facts)
        file = self._file(step)
        partial = file.with_name(file.name + PARTIAL)
        with writing(self.path):
            try:
                write_file(partial, stored, {"facts": text, "checksum": _checksum(stored, text)})
                partial.replace(file)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise

    def remove(self) -> None:
        """Delete everything; the job is done."""
        self._clear()
        self._lock.release()
        shutil.rmtree(self.path, ignore_errors=True)
        remove_empty(self._made_parents)

    def _file(self, step: str) -> Path:
        assert "/" not in step, step
        return self.path / (step + SUFFIX)


def _is_ours(path: Path) -> bool:
    return path.name.removesuffix(PARTIAL) in (MANIFEST, LOCK) or path.name.removesuffix(PARTIAL).endswith(SUFFIX)


def _read(file: Path) -> StepResult | None:
    """The content of a result file, None where it is damaged.

    Tensors are copied out of the mapped file: where a mapped one lies depends on the file, and linear algebra may take
    another path, with other last bits, for memory that is aligned otherwise than torch aligns its own.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            header = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118, no mapping
    except (OSError, SafetensorError):
        return None
    facts = header.get("facts", "")
    if header.get("checksum") != _checksum(tensors, facts):
        return None
    return StepResult(tensors, json.loads(facts))


def _checksum(tensors: Mapping[str, torch.Tensor], facts: str) -> str:
    digest = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _differences(earlier: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """`key was A, is B` for every key that differs, nested ones by their path."""
    for key in sorted({*earlier, *now}):
        was, is_now = earlier.get(key), now.get(key)
        if isinstance(was, dict) and isinstance(is_now, dict):
            yield from _differences(was, is_now, f"{prefix}{key}.")
        elif was != is_now:
            yield f"{prefix}{key} was {was}, is {is_now}"

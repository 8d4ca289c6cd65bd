"""What a job works on, told apart by content: digests for its manifest, and a guard against changes while it runs.

Weights up to `HASHED_BYTES` are hashed completely. Of larger targets every file's size, first and last MiB count:
reading hundreds of GB once more would take longer than many jobs, and other weights differ there already.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from exl3_dflash.conversion.report import package_versions
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.target.load import HASHED_BYTES
from quantize.checkpoint import TensorDirectory
from quantize.tensor_directory import file_sha256

SAMPLE_BYTES = 1 << 20
SETTING_SUFFIXES = {".json", ".jsonl", ".jinja", ".model", ".txt", ".tiktoken"}  # config, tokenizer, template, prompts
SETTING_LIMIT = 64 << 20  # bytes; a larger file of such a name is data


def job_manifest(settings: JobSettings, checkpoint: DrafterCheckpoint, target: Path | None) -> dict[str, Any]:
    """What a job is, as plain data: results of another one are not reused.

    Args:
        settings: of the job.
        checkpoint: the source.
        target: the target's directory, if there is one.
    """
    cal_data = Path(settings.cal_data).expanduser()  # a file, or `default`, `chat` or `auto`
    manifest = {
        "settings": settings.binding(),
        "cal_data_sha256": file_sha256(cal_data) if cal_data.is_file() else None,
        "source_sha256": checkpoint.sha256,
        "source_config_sha256": settings_digest(checkpoint.directory.path),
        "versions": package_versions(),
    }
    if target is not None:
        with TensorDirectory.open(target) as directory:
            manifest["target_sha256"] = weights_digest(directory)
        manifest["target_config_sha256"] = settings_digest(target)
    return manifest


def weights_digest(directory: TensorDirectory) -> str:
    """SHA-256 of the weight files, of samples of them where they are large (see the module's docstring)."""
    if directory.nbytes() <= HASHED_BYTES:
        return directory.sha256()
    digest = hashlib.sha256()
    for file in directory.files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(SAMPLE_BYTES))
            stream.seek(max(0, size - SAMPLE_BYTES))
            digest.update(stream.read())
    return digest.hexdigest()


def settings_digest(path: Path) -> str:
    """SHA-256 of the names and contents of all files of a model directory that say how its weights are used."""
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.suffix in SETTING_SUFFIXES and file.is_file() and file.stat().st_size <= SETTING_LIMIT:
            digest.update(f"{file.name} {file_sha256(file)}\n".encode())
    return digest.hexdigest()


class UnchangedFiles:
    """Files that must stay as they are while a job reads them, told by size, time and place on the disk.

    Args:
        files: absolute paths.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._seen = {file: _signature(file) for file in files}

    def check(self) -> None:
        """Raise `Exl3DflashError` where a file is no longer what it was."""
        for file, signature in self._seen.items():
            if _signature(file) != signature:
                raise Exl3DflashError(
                    f"{file} changed while the job was running",
                    expected="a source that stays as it is",
                    fix="put the old file back and continue with --resume, or use --restart",
                )


def _signature(file: Path) -> tuple[int, int, int] | None:
    """Size, time of the last change and inode; None where the file is gone."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino

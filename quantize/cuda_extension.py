"""ExLlamaV3's compiled extension: its import, and its compilation at the first one, with progress.

Installed from PyPI, exllamav3 carries the sources of its CUDA extension; torch compiles them when the package is first
imported, which takes minutes, and keeps the result in its extension directory for as long as version, compiler and
flags stay the same. That would look like a program that hangs, so a compilation is announced and counted, file by file.

Everything that can be missing is looked at first (`quantize.cuda_requirements`).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType

import torch

from quantize.cuda_requirements import EXTENSION, PACKAGE, WHEEL, check_cuda_device, is_precompiled
from quantize.errors import Exl3DflashError

log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]  # files compiled, files in all
_SUFFIXES = (".cu", ".cpp", ".c")
_SECONDS_BETWEEN = 2.0


def log_progress(compiled: int, total: int) -> None:
    """The progress of a compilation as lines of the log."""
    if compiled == 0:
        log.info("compiling ExLlamaV3's CUDA extension, once and for minutes: %d files", total)
    else:
        log.info("compiled %d of %d files", compiled, total)


def load_extension(device: str = "cuda", progress: Progress = log_progress) -> ModuleType:
    """Import exllamav3 and return its compiled extension; the first time this compiles it.

    Args:
        device: "cuda" or "cuda:N", where it is to be used.
        progress: is told of a compilation when it begins and after every few files.

    Raises:
        Exl3DflashError: something is missing, or the compilation failed.
    """
    check_cuda_device(device, kernels=True)
    files = [] if is_precompiled() else sources()
    target = None if is_precompiled() else build_directory()
    with _watched(target, files, progress) if target and not is_built(target, files) else nullcontext():
        try:
            return importlib.import_module(f"{PACKAGE}.ext").exllamav3_ext
        except Exception as error:  # torch's builder raises RuntimeError, the loader ImportError, others their own
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise Exl3DflashError(
                f"exllamav3 cannot be imported on CUDA: {reason[0]}",
                expected=f"a version that fits torch {torch.__version__} and the CUDA toolkit",
                fix=f"install the CUDA toolkit of torch's version ({torch.version.cuda}), or {WHEEL}",
            ) from error


def sources() -> list[Path]:
    """The files that a CUDA build of the extension compiles."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent / EXTENSION
    return sorted(p for p in root.rglob("*") if p.suffix in _SUFFIXES and "rocm" not in p.relative_to(root).parts)


def build_directory() -> Path:
    """Where torch keeps what it compiles of the extension."""
    from torch.utils import cpp_extension

    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is not None:
        return Path(root) / EXTENSION
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    version = torch.version.hip or torch.version.cuda or ""
    platform = ("rocm" if torch.version.hip else "cu" if version else "cpu") + version.replace(".", "")
    return Path(cpp_extension.get_default_build_root()) / f"{python}_{platform}" / EXTENSION


def is_built(directory: Path, files: list[Path]) -> bool:
    """True where a compiled extension lies that is no older than any source file (torch asks the same)."""
    library = directory / f"{EXTENSION}.so"
    return library.is_file() and library.stat().st_mtime >= _newest(files)


@contextmanager
def _watched(directory: Path, files: list[Path], progress: Progress) -> Iterator[None]:
    """Tell the progress of a compilation while the body runs."""
    finished = threading.Event()

    def watch() -> None:
        told = 0
        while not finished.wait(_SECONDS_BETWEEN):
            compiled = sum(1 for path in directory.glob("*.o") if path.stat().st_mtime >= _newest(files))
            if compiled > told:
                progress(compiled, len(files))
                told = compiled

    progress(0, len(files))
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def _newest(files: list[Path]) -> float:
    return max((path.stat().st_mtime for path in files), default=0.0)

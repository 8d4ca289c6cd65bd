"""ExLlamaV3, the library, imported for generation.

Its CUDA extension is compiled when the package is first imported, unless it came with it: that takes minutes and is
kept for later. So what a GPU and a compilation need is looked at before the import (`quantize.cuda_requirements`), and
a compilation is announced and shows how far it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import torch

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.progress import Reporter
from exl3_dflash.target.messages import first_line
from quantize.cuda_requirements import EXTENSION, PACKAGE, is_precompiled, kernel_problem

CHECKED_VERSION = "1.6.5"  # docs/exllamav3.md says what was checked against it
_SOURCES = ("*.cu", "*.cpp")
_PROGRESS_SECONDS = 2.0


def require_exllamav3(device: torch.device, reporter: Reporter | None = None) -> ModuleType:
    """The `exllamav3` package, ready for `device`; compiles its extension if that has not been done.

    Args:
        device: where it is wanted.
        reporter: says that a compilation begins and shows its progress.

    Raises:
        Exl3DflashError: what is missing and how to get it; or the import failed.
    """
    if device.type != "cuda":
        raise Exl3DflashError(
            f"the engine exllamav3 runs on CUDA, not on {device}", "a CUDA device", "use --engine reference"
        )
    problem = kernel_problem(device.index or 0)
    if problem is not None:
        raise problem
    build = build_directory()
    if is_precompiled() or (build / f"{EXTENSION}.so").is_file():
        return _import()
    reporter = reporter or Reporter()
    reporter.note(f"compiling ExLlamaV3's CUDA extension: this takes minutes, once; it is kept in {build}")
    with _build_progress(build, reporter):
        return _import()


def build_directory() -> Path:
    """Where torch keeps the extension that it compiles at the first import."""
    from torch.utils import cpp_extension

    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is None:
        python = f"py3{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
        cuda = f"cu{torch.version.cuda.replace('.', '')}" if torch.version.cuda else "cpu"
        root = str(Path(cpp_extension.get_default_build_root()) / f"{python}_{cuda}")
    return Path(root) / EXTENSION


def _import() -> ModuleType:
    try:
        return importlib.import_module(PACKAGE)
    except Exception as error:  # torch's builder raises RuntimeError, the loader ImportError, others their own
        raise Exl3DflashError(
            f"ExLlamaV3 {version(PACKAGE)} cannot be imported: {first_line(error)}",
            expected="a version that fits this torch and its CUDA toolkit",
            fix=f"install exllamav3=={CHECKED_VERSION} for torch {torch.__version__}, or use --engine reference",
        ) from error


@contextmanager
def _build_progress(build: Path, reporter: Reporter) -> Iterator[None]:
    """A bar of compiled files while the body runs."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    sources = Path(spec.origin).parent / EXTENSION
    total = sum(1 for pattern in _SOURCES for _ in sources.rglob(pattern))
    finished = threading.Event()
    with reporter.bar("compiling", total, "file") as advance:

        def watch() -> None:
            seen = 0
            while not finished.wait(_PROGRESS_SECONDS):
                compiled = sum(1 for _ in build.glob("*.o"))
                advance(compiled - seen)
                seen = compiled

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            finished.set()
            thread.join()

"""The import of ExLlamaV3's extension: a compilation is announced and counted, a failure is one line."""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

from quantize import cuda_extension
from quantize.cuda_extension import build_directory, is_built, load_extension, log_progress, sources
from quantize.errors import Exl3DflashError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An exllamav3 with three sources on a machine that has everything; `.imports` is what its import does."""
    root = tmp_path / "site" / "exllamav3"
    for name in ("quant/a.cu", "b.cpp", "c.cu", "rocm/d.cu", "quant/e.cuh"):
        file = root / "exllamav3_ext" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    build = tmp_path / "torch" / "exllamav3_ext"
    build.mkdir(parents=True)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(build.parent))
    extension = ModuleType("exllamav3_ext")
    made = SimpleNamespace(root=root, build=build, extension=extension, imports=lambda: None, checked=[])

    def import_module(name: str) -> Any:
        assert name == "exllamav3.ext"
        made.imports()
        return SimpleNamespace(exllamav3_ext=extension)

    monkeypatch.setattr(cuda_extension, "check_cuda_device", lambda *asked, **more: made.checked.append((asked, more)))
    monkeypatch.setattr(cuda_extension, "is_precompiled", lambda: False)
    monkeypatch.setattr(cuda_extension.importlib, "import_module", import_module)
    spec = SimpleNamespace(origin=str(root / "__init__.py"))
    monkeypatch.setattr(cuda_extension.importlib.util, "find_spec", {"exllamav3": spec}.get)
    return made


def test_a_compilation_is_announced_and_counted(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_extension, "_SECONDS_BETWEEN", 0.005)
    told: list[tuple[int, int]] = []
    counted = threading.Event()

    def progress(compiled: int, total: int) -> None:
        told.append((compiled, total))
        if compiled == 2:
            counted.set()

    def compile_two_files() -> None:
        assert told == [(0, 3)], "said before anything is compiled"
        for name in ("a.cuda.o", "b.o"):
            (package.build / name).touch()
        assert counted.wait(20)

    (package.build / "old.o").touch()
    os.utime(package.build / "old.o", (1, 1))  # of an older version of the sources
    package.imports = compile_two_files
    assert load_extension("cuda:1", progress) is package.extension
    assert told[0] == (0, 3)
    assert told[-1] == (2, 3)
    assert package.checked == [(("cuda:1",), {"kernels": True})]


def test_what_is_compiled_already_is_imported_in_silence(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    (package.build / "exllamav3_ext.so").touch()
    load_extension(progress=lambda *counts: told.append(counts))
    assert told == []
    later = time.time() + 100
    os.utime(package.root / "exllamav3_ext" / "b.cpp", (later, later))
    assert not is_built(package.build, sources())
    load_extension(progress=lambda *counts: told.append(counts))
    assert told == [(0, 3)], "an upgrade is compiled again"
    told.clear()
    monkeypatch.setattr(cuda_extension, "is_precompiled", lambda: True)
    load_extension(progress=lambda *counts: told.append(counts))
    assert told == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("Error building extension 'exllamav3_ext': ninja\nmany\nlines"), "Error building extension"),
        (ImportError("undefined symbol: _ZN3c10"), "undefined symbol"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_a_failure_is_one_line(package: Any, error: Exception, said: str) -> None:
    def fail() -> None:
        raise error

    package.imports = fail
    with pytest.raises(Exl3DflashError, match=f"cannot be imported on CUDA: {said}.*prebuilt wheel") as raised:
        load_extension(progress=lambda *counts: None)
    assert "\n" not in str(raised.value)


def test_progress_as_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "quantize"):
        log_progress(0, 194)
        log_progress(7, 194)
    assert caplog.messages == [
        "compiling ExLlamaV3's CUDA extension, once and for minutes: 194 files",
        "compiled 7 of 194 files",
    ]


def test_the_build_directory_is_torchs_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setattr(cpp_extension, "get_default_build_root", lambda: str(tmp_path))
    for cuda in (None, "13.0"):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert str(build_directory()) == cpp_extension._get_build_directory("exllamav3_ext", False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "mine"))
    assert str(build_directory()) == cpp_extension._get_build_directory("exllamav3_ext", False)


@pytest.mark.skipif(importlib.util.find_spec("exllamav3") is None, reason="exllamav3 is not installed")
def test_the_installed_package_has_its_sources_where_we_look() -> None:
    files = sources()
    assert len(files) > 100
    assert any(file.name == "quantize.cu" for file in files)
    assert not any("rocm" in file.parts[-3:] for file in files)

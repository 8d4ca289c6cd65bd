"""What a GPU run needs: each thing that can be missing is named in one line, with the way to get it."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quantize import cuda_requirements
from quantize.cuda_requirements import Driver, TorchBuild, check_cuda_device, find_nvcc, torch_build
from quantize.errors import Exl3DflashError

CUDA_13 = TorchBuild("2.14.1+cu130", "13.0", None)
H200 = Driver((13, 0), ((9, 0),))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine on which nothing is missing; called with what differs."""

    def make(
        build: TorchBuild = CUDA_13, driver: Driver | str = H200, packages: str = "exllamav3", **found: Any
    ) -> None:
        programs = {"nvcc": Path("/cuda/bin/nvcc"), "c++": "c++", "ninja": "ninja", "precompiled": False} | found
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(cuda_requirements, "torch_build", lambda: build)
        monkeypatch.setattr(cuda_requirements, "ask_driver", lambda: driver)
        monkeypatch.setattr(cuda_requirements, "find_nvcc", lambda: programs["nvcc"])
        monkeypatch.setattr(cuda_requirements, "is_precompiled", lambda: programs["precompiled"])
        monkeypatch.setattr(cuda_requirements.shutil, "which", lambda name: programs[name])
        known = {name: object() for name in packages.split()}
        monkeypatch.setattr(cuda_requirements.importlib.util, "find_spec", known.get)

    make()
    return make


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ({"build": TorchBuild("2.13.0+cpu", None, None)}, r"torch 2.13.0\+cpu is built without CUDA.*pytorch.org"),
        ({"driver": "there is no NVIDIA driver"}, "there is no NVIDIA driver.*nvidia-smi"),
        ({"driver": "the NVIDIA driver finds no GPU"}, "finds no GPU"),
        ({"driver": Driver((13, 0), ())}, r"shows 0 GPU\(s\), and number 0 was asked for"),
        ({"driver": Driver((12, 4), ((9, 0),))}, "supports CUDA 12.4, torch 2.14.1.cu130 is built for 13.0.*update"),
        ({"driver": Driver((13, 0), ((7, 0),))}, "GPU 0 has compute capability 7.0; expected 7.5 or newer"),
        ({"packages": ""}, "exllamav3 is not installed.*pip install exllamav3"),
        ({"nvcc": None}, "nvcc is not found.*CUDA toolkit.*CUDA_HOME or PATH.*prebuilt wheel"),
        ({"c++": None}, r"c\+\+ not found"),
        ({"ninja": None}, "ninja not found.*pip install ninja"),
    ],
)
def test_what_is_missing_is_named(machine: Any, differs: dict[str, Any], said: str) -> None:
    machine(**differs)
    with pytest.raises(Exl3DflashError, match=said) as raised:
        check_cuda_device("cuda", kernels=True)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith("CUDA cannot be used: ")


@pytest.mark.parametrize(
    "differs",
    [
        {},
        {"precompiled": True, "nvcc": None, "c++": None, "ninja": None},
        {"driver": Driver((13, 2), ((12, 0),))},
        {"build": TorchBuild("2.9.1+rocm7", None, "7.0"), "driver": "there is no NVIDIA driver", "nvcc": None},
    ],
)
def test_nothing_is_missing(machine: Any, differs: dict[str, Any]) -> None:
    machine(**differs)
    check_cuda_device("cuda:0", kernels=True)


@pytest.mark.parametrize("differs", [{"packages": ""}, {"nvcc": None}, {"driver": Driver((13, 0), ((7, 0),))}])
def test_what_only_the_kernels_need_is_asked_only_for_them(machine: Any, differs: dict[str, Any]) -> None:
    machine(**differs)
    check_cuda_device("cuda")
    with pytest.raises(Exl3DflashError):
        check_cuda_device("cuda", kernels=True)


def test_only_cuda_devices_are_asked_for(machine: Any) -> None:
    machine(driver=Driver((13, 0), ((9, 0), (7, 0))))
    for device in ("auto", "cpu", "cuda", "cuda:0", "gpu", "cuda:x"):
        check_cuda_device(device, kernels=True)
    with pytest.raises(Exl3DflashError, match=r"GPU 1 has compute capability 7\.0"):
        check_cuda_device("cuda:1", kernels=True)
    with pytest.raises(Exl3DflashError, match="number 2 was asked for"):
        check_cuda_device("cuda:2")


def test_torch_says_of_itself_what_its_version_file_says() -> None:
    build = torch_build()
    assert (build.version, build.cuda, build.rocm) == (torch.__version__, torch.version.cuda, torch.version.hip)


class FakeLibrary:
    """libcuda with two GPUs, or one that answers every start with an error."""

    def __init__(self, start: int = 0) -> None:
        self.cuInit = lambda flags: start  # (the driver's name)

    @staticmethod
    def cuDriverGetVersion(number: Any) -> int:  # noqa: N802 (the driver's name)
        return FakeLibrary._answer(number, 13020)

    @staticmethod
    def cuDeviceGetCount(number: Any) -> int:  # noqa: N802
        return FakeLibrary._answer(number, 2)

    @staticmethod
    def cuDeviceGetAttribute(number: Any, attribute: int, gpu: int) -> int:  # noqa: N802
        return FakeLibrary._answer(number, {75: (9, 8), 76: (0, 6)}[attribute][gpu])

    @staticmethod
    def _answer(number: Any, value: int) -> int:
        ctypes.cast(number, ctypes.POINTER(ctypes.c_int))[0] = value
        return 0


def test_the_driver_is_asked_through_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries: list[Any] = [FakeLibrary(), FakeLibrary(100), FakeLibrary(999)]
    monkeypatch.setattr(cuda_requirements, "ctypes", SimpleNamespace(**vars(ctypes)))
    monkeypatch.setattr(cuda_requirements.ctypes, "CDLL", lambda name: libraries.pop(0))
    assert cuda_requirements.ask_driver() == Driver((13, 2), ((9, 0), (8, 6)))
    assert cuda_requirements.ask_driver() == "the NVIDIA driver finds no GPU"
    assert cuda_requirements.ask_driver() == "the NVIDIA driver does not start (error 999)"


def test_nvcc_is_found_where_torch_looks_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PYTORCH_NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    nvcc = tmp_path / "bin" / ("nvcc.exe" if sys.platform == "win32" else "nvcc")
    nvcc.parent.mkdir()
    nvcc.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(nvcc.parent))
    assert find_nvcc() == nvcc
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "elsewhere"))
    assert find_nvcc() is None
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_nvcc() == nvcc
    monkeypatch.setenv("PYTORCH_NVCC", "/opt/nvcc")
    assert find_nvcc() == Path("/opt/nvcc")


def test_a_compiled_extension_counts_and_its_sources_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    found: dict[str, Any] = {}
    monkeypatch.setattr(cuda_requirements.importlib.util, "find_spec", found.get)
    assert not cuda_requirements.is_precompiled()
    found["exllamav3_ext"] = SimpleNamespace(origin="/x/exllamav3_ext/__init__.py")
    assert not cuda_requirements.is_precompiled()
    found["exllamav3_ext"] = SimpleNamespace(origin=f"/x/exllamav3_ext{suffix}")
    assert cuda_requirements.is_precompiled()

"""What has to be there before anything runs on a GPU, found out in milliseconds and without importing torch.

On a GPU this project runs on ExLlamaV3's kernels. They need a CUDA build of torch, an NVIDIA driver that is as new as
that build, a GPU of compute capability 7.5 or newer, the package exllamav3, and its compiled extension: either inside
the package (its prebuilt wheels) or built at the first import, for which torch needs the CUDA toolkit's nvcc, a C++
compiler and ninja at every start. What is missing is said in one line before a model is opened.

How: torch's version file is read by itself, the driver's library is asked through ctypes (no CUDA context is made),
packages and programs are looked up by name. CUDA_VISIBLE_DEVICES holds for the driver's answers. A ROCm build of torch
has no such driver; there torch itself has to say what it sees.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from quantize.errors import Exl3DflashError

PACKAGE = "exllamav3"
EXTENSION = "exllamav3_ext"
LEAST_CAPABILITY = (7, 5)
TORCH_FIX = "install a CUDA build of torch (pytorch.org/get-started/locally), or use --device cpu"
WHEEL = "a prebuilt wheel from github.com/turboderp-org/exllamav3/releases"
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


@dataclass(frozen=True)
class TorchBuild:
    """What the installed torch was built for: its version, and those of CUDA and ROCm (None where it has neither)."""

    version: str
    cuda: str | None
    rocm: str | None


@dataclass(frozen=True)
class Driver:
    """What the NVIDIA driver says: the newest CUDA version it runs, and every visible GPU's compute capability."""

    cuda: tuple[int, int]
    capabilities: tuple[tuple[int, int], ...]


def check_cuda_device(device: str, kernels: bool = False) -> None:
    """Raise unless `device`, as given on a command line, can be used; "cpu" and "auto" always can.

    Args:
        device: "auto", "cpu", "cuda" or "cuda:N"; anything else is left to be refused where it is read.
        kernels: ExLlamaV3's kernels are needed there as well.

    Raises:
        Exl3DflashError: naming the first thing that is missing, and how to get it.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda" or (number and not number.isdecimal()):
        return
    index = int(number or 0)
    problem = gpu_problem(index) or (kernel_problem(index) if kernels else None)
    if problem is not None:
        raise problem


def gpu_problem(index: int = 0) -> Exl3DflashError | None:
    """Why torch cannot use GPU number `index`, or None."""
    build = torch_build()
    if build.rocm:
        return None
    if build.cuda is None:
        return _missing(f"torch {build.version} is built without CUDA", "a CUDA build of torch", TORCH_FIX)
    driver = ask_driver()
    if isinstance(driver, str):
        return _missing(driver, "an NVIDIA GPU and its driver", "install the driver (nvidia-smi must list the GPU)")
    if index >= len(driver.capabilities):
        seen = f"the driver shows {len(driver.capabilities)} GPU(s)"
        return _missing(f"{seen}, and number {index} was asked for", "a GPU that is there", "see nvidia-smi")
    if driver.cuda[0] < int(build.cuda.partition(".")[0]):
        return _missing(
            f"the driver supports CUDA {_dotted(driver.cuda)}, torch {build.version} is built for {build.cuda}",
            "a driver as new as torch's CUDA",
            "update the driver, or install torch for an older CUDA",
        )
    return None


def kernel_problem(index: int = 0) -> Exl3DflashError | None:
    """Why ExLlamaV3's extension could not be built, imported or used on GPU number `index`; None where it can."""
    if importlib.util.find_spec(PACKAGE) is None:
        return _missing("exllamav3 is not installed", "the package exllamav3", f"pip install exllamav3, or {WHEEL}")
    if torch_build().rocm is None:
        driver = ask_driver()
        if isinstance(driver, Driver) and driver.capabilities[index] < LEAST_CAPABILITY:
            found = f"GPU {index} has compute capability {_dotted(driver.capabilities[index])}"
            return _missing(found, f"{_dotted(LEAST_CAPABILITY)} or newer", "use --device cpu")
    return None if is_precompiled() else _build_problem()


def _build_problem() -> Exl3DflashError | None:
    if torch_build().rocm is None and find_nvcc() is None:
        return _missing(
            "nvcc is not found, and exllamav3's CUDA extension is compiled at its first import",
            "the CUDA toolkit that torch was built for",
            f"install it (CUDA_HOME or PATH must lead to nvcc), or {WHEEL}",
        )
    absent = [name for name in (os.environ.get("CXX", "c++").split()[0], "ninja") if shutil.which(name) is None]
    if absent:
        return _missing(
            f"{' and '.join(absent)} not found, and exllamav3's CUDA extension is compiled at its first import",
            "a C++ compiler and ninja",
            f"install g++ and `pip install ninja`, or {WHEEL}",
        )
    return None


def _dotted(numbers: tuple[int, int]) -> str:
    return "{}.{}".format(*numbers)


def _missing(what: str, expected: str, fix: str) -> Exl3DflashError:
    return Exl3DflashError(f"CUDA cannot be used: {what}", expected, fix)


def torch_build() -> TorchBuild:
    """What torch's own version file says, read without importing torch."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return TorchBuild("(not installed)", None, None)
    file = Path(torch.origin).with_name("version.py")
    spec = importlib.util.spec_from_file_location("_torch_version", file)
    assert spec is not None
    assert spec.loader is not None
    version = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(version)
    return TorchBuild(version.__version__, version.cuda, version.hip)


def ask_driver() -> Driver | str:
    """What the NVIDIA driver says, or why it says nothing."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver"
    code = library.cuInit(0)
    if code == 100:  # CUDA_ERROR_NO_DEVICE
        return "the NVIDIA driver finds no GPU"
    if code != 0:
        return f"the NVIDIA driver does not start (error {code})"
    number = ctypes.c_int()

    def ask(function: str, *arguments: int) -> int:
        getattr(library, function)(ctypes.byref(number), *arguments)
        return number.value

    version, count = ask("cuDriverGetVersion"), ask("cuDeviceGetCount")
    attributes = (_CAPABILITY_MAJOR, _CAPABILITY_MINOR)
    pairs = [[ask("cuDeviceGetAttribute", key, gpu) for key in attributes] for gpu in range(count)]
    return Driver((version // 1000, version % 1000 // 10), tuple((major, minor) for major, minor in pairs))


def is_precompiled() -> bool:
    """True where the compiled extension is installed, as with ExLlamaV3's prebuilt wheels."""
    spec = importlib.util.find_spec(EXTENSION)
    return bool(spec and spec.origin and spec.origin.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES)))


def find_nvcc() -> Path | None:
    """The nvcc that torch would compile with: from PYTORCH_NVCC, CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda."""
    override = os.environ.get("PYTORCH_NVCC")
    if override:
        return Path(override)
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc")
    if home:
        found = Path(home) / "bin" / ("nvcc.exe" if sys.platform == "win32" else "nvcc")
    elif on_path:
        found = Path(on_path)
    else:
        found = Path("/usr/local/cuda/bin/nvcc")
    return found if found.exists() else None

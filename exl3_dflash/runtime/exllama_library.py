"""ExLlamaV3, the library, for generation: its extension is checked for, compiled where needed and imported first."""

from __future__ import annotations

import importlib
import re
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

import torch

from exl3_dflash.errors import Exl3DflashError
from quantize.cuda_requirements import PACKAGE, check_cuda_device

OLDEST = (1, 4, 2)
WITHOUT = "without it: --engine reference or --device cpu"


def check_exllamav3(device: torch.device) -> None:
    """Raise where ExLlamaV3 cannot run on `device`, in milliseconds.

    Raises:
        Exl3DflashError: `device` is no CUDA device, or what `quantize.cuda_requirements` finds missing.
    """
    if device.type != "cuda":
        raise Exl3DflashError(
            f"the engine exllamav3 runs on CUDA, not on {device}", "a CUDA device", "use --engine reference"
        )
    try:
        check_cuda_device(str(device), kernels=True)
    except Exl3DflashError as error:
        fix = error.fix or ""
        more = "" if "--device cpu" in fix else f", or run {WITHOUT}"
        raise Exl3DflashError(error.what, error.expected, fix + more) from None
    try:
        installed = version(PACKAGE)
    except PackageNotFoundError:  # sources on the path: what they lack is found where it is used
        return
    if tuple(int(number) for number in re.findall(r"\d+", installed)[:3]) < OLDEST:
        raise Exl3DflashError(
            f"ExLlamaV3 {installed} is too old for the engine exllamav3",
            expected=f"{'.'.join(map(str, OLDEST))} or newer; 1.6.5 was checked",
            fix=f"pip install -U exllamav3, or run {WITHOUT}",
        )


def require_exllamav3(device: torch.device) -> ModuleType:
    """The `exllamav3` package, ready for `device`.

    Raises:
        Exl3DflashError: as `check_exllamav3`; or see `quantize.cuda_extension.load_extension`.
    """
    check_exllamav3(device)
    from quantize.cuda_extension import load_extension

    load_extension(str(device))
    return importlib.import_module(PACKAGE)

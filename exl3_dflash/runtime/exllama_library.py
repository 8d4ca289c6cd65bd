"""ExLlamaV3, the library, for generation: its extension is checked for, compiled where needed and imported first."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from exl3_dflash.errors import Exl3DflashError
from quantize.cuda_requirements import PACKAGE, check_cuda_device


def check_exllamav3(device: torch.device) -> None:
    """Raise where ExLlamaV3 cannot run on `device`, in milliseconds.

    Raises:
        Exl3DflashError: `device` is no CUDA device, or what `quantize.cuda_requirements` finds missing.
    """
    if device.type != "cuda":
        raise Exl3DflashError(
            f"the engine exllamav3 runs on CUDA, not on {device}", "a CUDA device", "use --engine reference"
        )
    check_cuda_device(str(device), kernels=True)


def require_exllamav3(device: torch.device) -> ModuleType:
    """The `exllamav3` package, ready for `device`.

    Raises:
        Exl3DflashError: as `check_exllamav3`; or see `quantize.cuda_extension.load_extension`.
    """
    check_exllamav3(device)
    from quantize.cuda_extension import load_extension

    load_extension(str(device))
    return importlib.import_module(PACKAGE)

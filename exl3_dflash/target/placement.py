"""Where a target runs and in which precision, when the user leaves it open.

Device: `auto` is CUDA where there is a GPU, else the CPU. What is asked for by name is there, or is refused with what
is missing (`quantize.cuda_requirements`).

Dtype:
- CUDA: the checkpoint's own, but BF16 for FP16 checkpoints: residuals of real models pass FP16's 65,504, and taps are
  residuals.
- CPU: FP32 where the weights take at most FP32_CPU_BYTES in FP32 (exact, and fast on every CPU), else BF16.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from exl3_dflash.errors import Exl3DflashError
from quantize.cuda_requirements import check_cuda_device

FP32_CPU_BYTES = 4 << 30
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(device: str) -> torch.device:
    """The device that "auto", "cpu", "cuda" or "cuda:N" stands for; Exl3DflashError where it is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise Exl3DflashError(f"device {device!r} is unknown", "auto, cpu, cuda or cuda:N")
    check_cuda_device(device)
    chosen = torch.device(device)
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise Exl3DflashError(
            f"device {device} is not there",
            expected=f"one of the {torch.cuda.device_count()} CUDA devices that torch sees",
            fix="see nvidia-smi, or use --device cpu",
        )
    return chosen


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype by name; None stays None. Raises Exl3DflashError for anything that no target runs in."""
    if dtype is None or dtype in DTYPES.values():
        return dtype if isinstance(dtype, torch.dtype) else None
    if dtype not in DTYPES:
        raise Exl3DflashError(f"dtype {dtype!r} is unknown", f"one of {', '.join(DTYPES)}")
    return DTYPES[str(dtype)]


def choose_dtype(stored: Any, parameters: int, device: torch.device) -> torch.dtype:
    """The precision to run in. stored: the dtype in config.json (None where absent); parameters: their number."""
    if device.type == "cuda":
        return stored if isinstance(stored, torch.dtype) and stored != torch.float16 else torch.bfloat16
    return torch.float32 if parameters * torch.float32.itemsize <= FP32_CPU_BYTES else torch.bfloat16

"""What ExLlamaV3 raises, as one error of ours: while a model is read and loaded, and while its generator runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.target.messages import first_line


def guarded_load(action: str, path: Path, function: Callable[[], Any]) -> Any:
    """What `function` returns; `action` ("read", "build", "load", ..) is what it does with the model in `path`."""
    try:
        return function()
    except Exception as error:  # assertions, ValueError, KeyError, RuntimeError: each architecture has its own
        if isinstance(error, torch.cuda.OutOfMemoryError) or "Insufficient VRAM" in str(error):
            raise Exl3DflashError(
                f"{path} and its cache do not fit on the GPU",
                expected="room for the weights, the cache and one forward",
                fix="more GPUs, a smaller target, or in `chat` fewer --cache-tokens or --cache-bits 8",
            ) from error
        raise Exl3DflashError(
            f"ExLlamaV3 cannot {action} {path}: {first_line(error)}",
            expected="a model of an architecture that this version of ExLlamaV3 knows",
            fix="pip install -U exllamav3, or run without it: --engine reference or --device cpu",
        ) from error


def guarded_run(function: Callable[[], Any]) -> Any:
    """What `function`, a call into the generator, returns."""
    try:
        return function()
    except Exception as error:
        raise run_failure(error) from error


def run_failure(error: Exception) -> Exl3DflashError:
    """The error to raise for one of the generator's."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return Exl3DflashError(
            "the GPU has too little memory for this request",
            expected="room for one forward beside the weights and the cache",
            fix="a shorter prompt, or in `chat` fewer --cache-tokens",
        )
    return Exl3DflashError(
        f"ExLlamaV3's generator failed: {first_line(error)}",
        expected="a pair that it supports",
        fix="run without it (--engine reference or --device cpu), or report it to ExLlamaV3 with the versions",
    )


def require_facts(thing: Any, names: Sequence[str]) -> None:
    """Refuse a version of ExLlamaV3 whose objects do not have the attributes that the engine reads."""
    missing = [name for name in names if not hasattr(thing, name)]
    if missing:
        raise Exl3DflashError(
            f"this ExLlamaV3's {type(thing).__name__} has no {', '.join(missing)}",
            expected="a version that this engine knows (1.6.5 was checked)",
            fix="pip install exllamav3==1.6.5, or run without it: --engine reference or --device cpu",
        )

"""The options that choose an engine and place a pair on GPUs, shared by the commands that generate."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from exl3_dflash.errors import Exl3DflashError
from quantize.cuda_requirements import check_cuda_device

if TYPE_CHECKING:
    from exl3_dflash.runtime.load import EngineChoice

PANEL = "Engine (all but --engine: exllamav3 only)"


class EngineName(StrEnum):
    """Engines offered on the command line."""

    auto = "auto"
    exllamav3 = "exllamav3"
    reference = "reference"


def _engine_can_run(engine: EngineName) -> EngineName:
    """Refuse ExLlamaV3 where something that it needs is missing, while the command line is read."""
    if engine == EngineName.exllamav3:
        try:
            check_cuda_device("cuda", kernels=True)
        except Exl3DflashError as error:
            fix = (error.fix or "").removesuffix(", or use --device cpu")
            raise Exl3DflashError(error.what, error.expected, f"{fix}, or use --engine reference") from None
    return engine


def _is_split(text: str | None) -> str | None:
    """Refuse a split that cannot be read, before anything is imported."""
    _parse_split(text)
    return text


def _parse_split(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise Exl3DflashError(f"--gpu-split {text!r}", "GB for each GPU, for example 20,24", "give numbers") from None


EngineOption = Annotated[
    EngineName,
    typer.Option(
        "--engine",
        callback=_engine_can_run,
        help="auto is exllamav3 on CUDA, else reference.",
        rich_help_panel=PANEL,
    ),
]
CacheTokensOption = Annotated[
    int | None,
    typer.Option("--cache-tokens", min=1, help="Tokens that the cache holds.", rich_help_panel=PANEL),
]
CacheBitsOption = Annotated[
    int | None,
    typer.Option("--cache-bits", min=2, max=8, help="Bits of cached keys and values.", rich_help_panel=PANEL),
]
GpuSplitOption = Annotated[
    str | None,
    typer.Option(
        "--gpu-split", callback=_is_split, help="GB to use of each GPU, for example 20,24.", rich_help_panel=PANEL
    ),
]
DynamicDraftOption = Annotated[
    bool,
    typer.Option("--dynamic-draft", help="Verify fewer tokens where the drafter is unsure.", rich_help_panel=PANEL),
]


def engine_choice(
    engine: EngineName, cache_tokens: int | None, cache_bits: int | None, gpu_split: str | None, dynamic_draft: bool
) -> EngineChoice:
    """The options as `load_pair` takes them.

    Raises:
        Exl3DflashError: the split is no list of numbers, or a value is out of its range.
    """
    from exl3_dflash.runtime.exllama_model import ExllamaSettings
    from exl3_dflash.runtime.load import EngineChoice

    given = any(value is not None for value in (cache_tokens, cache_bits, gpu_split))
    settings = ExllamaSettings(cache_tokens, cache_bits, _parse_split(gpu_split)) if given else None
    return EngineChoice(engine.value, settings, dynamic_draft)

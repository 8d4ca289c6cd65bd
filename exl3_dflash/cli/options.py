"""Options that several commands share, so that they are spelled and described once."""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import Annotated

import typer

from quantize.cuda_requirements import check_cuda_device

PAIR_NAMES = "a local directory, a Hugging Face id (org/name[@revision]) or 'demo'"


class Dtype(StrEnum):
    """Computation types offered on the command line."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


def _gpu_is_there(device: str) -> str:
    """Refuse a GPU that cannot be used while the command line is read, before anything is loaded."""
    check_cuda_device(device)
    return device


def _gpu_has_kernels(device: str) -> str:
    """The same where nothing works without ExLlamaV3's kernels."""
    check_cuda_device(device, kernels=True)
    return device


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
DeviceOption = Annotated[str, typer.Option("--device", callback=_gpu_is_there, help="auto, cpu, cuda or cuda:N.")]
KernelDeviceOption = Annotated[
    str, typer.Option("--device", callback=_gpu_has_kernels, help="auto, cpu, cuda or cuda:N.")
]
ThreadsOption = Annotated[int, typer.Option("--threads", min=0, help="CPU threads; 0 means the physical cores.")]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Computation type of target and drafter.")]
BlockSizeOption = Annotated[
    int | None,
    typer.Option("--block-size", min=2, help="Block size of a drafter whose config.json does not say it."),
]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Say more on stderr.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Only errors on stderr.")]


def set_verbosity(verbose: bool, quiet: bool) -> None:
    """Set the level of this project's loggers (stderr): warnings only if quiet, debug if verbose."""
    level = logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    for name in ("exl3_dflash", "quantize", "calibration_data"):
        logging.getLogger(name).setLevel(level)

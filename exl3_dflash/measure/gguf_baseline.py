"""What another popular format does to a drafter's linears: GGUF Q4_0 and Q8_0, by the `gguf` package's own code.

Both round blocks of 32 weights along the inputs to a grid with one FP16 scale each: 4.5 and 8.5 bits per weight,
without any data. Everything that is not a linear stays as it is, as in an EXL3 file.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from exl3_dflash.drafter.checkpoint import DrafterCheckpoint, LinearSpec
from exl3_dflash.errors import Exl3DflashError

GGUF_BITS = {"gguf-q4_0": 4.5, "gguf-q8_0": 8.5}
BLOCK = 32


def check_gguf(linears: Iterable[LinearSpec]) -> None:
    """Refuse what the baseline cannot do.

    Raises:
        Exl3DflashError: the package is not installed, or a linear's inputs are not whole blocks.
    """
    _package()
    for linear in linears:
        if linear.in_features % BLOCK:
            raise Exl3DflashError(
                f"{linear.name} has {linear.in_features} inputs", f"a multiple of {BLOCK}", "leave the GGUF methods out"
            )


def gguf_weights(checkpoint: DrafterCheckpoint, method: str) -> dict[str, torch.Tensor]:
    """Every linear of a drafter through a GGUF format and back, float32 (in, out) by name.

    Args:
        checkpoint: the unquantized drafter.
        method: a key of `GGUF_BITS`.
    """
    package = _package()
    kind = package.GGMLQuantizationType[method.removeprefix("gguf-").upper()]
    weights = {}
    for linear in checkpoint.linears:
        rows = checkpoint.load(f"{linear.name}.weight").float().numpy()  # (out, in)
        decoded = package.quants.dequantize(package.quants.quantize(rows, kind), kind)
        weights[linear.name] = torch.from_numpy(decoded.copy()).T.contiguous()
    return weights


def _package() -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise Exl3DflashError(
            "the GGUF methods need the Python package gguf, which is not installed",
            fix='pip install "exl3-dflash[gguf]"',
        ) from error
    return gguf

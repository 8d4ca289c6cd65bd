"""ExLlamaV3's CPU expert kernel as an independent reader of our layers; needs its compiled extension, but no GPU.

Three layers, quantized here, run there as one gated expert: `down(silu(gate x) * up x)`. That kernel takes the mul1
codebook unrounded, `(byte sum - 510) * k`, so it is compared with our states under that codebook, in float64. Its
scalar path is asked for: the others round activations to 8 bits. Alone, where the extension can be imported:

    EXL3_MOE_CPU_MAX_ISA=scalar python -m tests.gpu.cpu_expert
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

import torch

from quantize.hadamard import rotate_both_sides_
from quantize.linear import QuantizedLinear, QuantSettings, quantize_linear
from quantize.trellis import SUPPORTED_BITS, tiles_to_weight, unpack_states

from .outcome import Findings

SIZES = {"gate": (256, 384), "up": (256, 384), "down": (384, 256)}
CLOSE = 2e-6
MULTIPLIER, SCALE_BITS = 0x83DCD12D, 0x1EEE  # of mul1, the scale as the bits of an fp16 number


def compare_cpu_expert(extension: ModuleType, rates: tuple[float, ...] = SUPPORTED_BITS) -> Findings:
    """The relative difference at every rate, and what one flipped bit of one trellis changes."""
    os.environ.setdefault("EXL3_MOE_CPU_MAX_ISA", "scalar")  # read at the kernel's first use
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(0)).half()
    figures: dict[str, Any] = {}
    passed = True
    for bits in rates:
        layers = {name: _layer(name, bits) for name in SIZES}
        found = _their_output(extension, layers, x)
        gate, up, down = (_unrounded(layers[name]) for name in SIZES)
        wanted = (torch.nn.functional.silu(x.double() @ gate) * (x.double() @ up)) @ down
        layers["down"].trellis[3, 5, 0] ^= 1
        moved = _their_output(extension, layers, x)
        row = {"difference": _relative(found, wanted), "flipped_bit": _relative(moved, found)}
        passed &= row["difference"] < CLOSE < 100 * CLOSE < row["flipped_bit"]
        figures[f"{bits:g} bits"] = row
    return passed, figures


def _layer(name: str, bits: float) -> QuantizedLinear:
    rows, columns = SIZES[name]
    seed = list(SIZES).index(name)
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) / rows**0.5
    return quantize_linear(weight, None, QuantSettings(bits=bits, seed=seed))


def _unrounded(layer: QuantizedLinear) -> torch.Tensor:
    """The decoded weight with the codebook before its rounding to fp16, float64 (in, out)."""
    states = unpack_states(layer.trellis.reshape(-1, layer.trellis.shape[2]), layer.bits).long()
    products = (states * MULTIPLIER) & 0xFFFFFFFF
    byte_sums = sum((products >> shift) & 0xFF for shift in (0, 8, 16, 24))
    scale = torch.tensor(SCALE_BITS, dtype=torch.int16).view(torch.float16).double()
    values = (torch.as_tensor(byte_sums).double() - 510.0) * scale
    weight = rotate_both_sides_(tiles_to_weight(values.view(*layer.trellis.shape[:2], 256)).contiguous())
    return weight * layer.suh.double()[:, None] * layer.svh.double()


def _their_output(extension: ModuleType, layers: dict[str, QuantizedLinear], x: torch.Tensor) -> torch.Tensor:
    stored = [[getattr(layers[name], part)] for name in SIZES for part in ("trellis", "suh", "svh")]
    handle = extension.exl3_moe_cpu_make_layer(*stored, [], [], [], 0, 0.0, 0)
    out = torch.empty(len(x), 256)
    selected, weights = torch.zeros(len(x), 1, dtype=torch.int64), torch.ones(len(x), 1, dtype=torch.float16)
    extension.exl3_moe_cpu_forward(handle, x, selected, weights, out, 1)
    extension.exl3_moe_cpu_free_layer(handle)
    return out.double()


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


if __name__ == "__main__":
    for rate, row in compare_cpu_expert(importlib.import_module("exllamav3_ext"))[1].items():
        print(rate, row)

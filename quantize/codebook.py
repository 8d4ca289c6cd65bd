"""EXL3's three codebooks: the 65,536 values that a 16-bit trellis state can stand for.

A codebook is a hash, not a stored table: the state is multiplied (32-bit wrap-around), and the bits of the product
become a value. Every step is defined in fp16 with one rounding, so the values are exact and the same everywhere:

- `mul1`: the four bytes of `state * 0x83DCD12D` are added to 1024 and scaled by one fp16 fused multiply-add; the sum
  of four bytes is close to Gaussian, with unit spread.
- `mcg` and `3inst`: the bits of the product are masked and flipped so that both 16-bit halves are fp16 numbers of
  moderate size; the value is their fp16 sum (spread 1.244). They differ in the multiplication only.

The arithmetic below runs in int64 and float32, where each intermediate is exact, and rounds to fp16 once at the end.
Left out: other state widths, since EXL3 has 16-bit states only. The format is ExLlamaV3's (turboderp).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from quantize.errors import Exl3DflashError

CODEBOOKS = ("mul1", "mcg", "3inst")
STATES = 1 << 16

_MUL1_MULTIPLIER = 0x83DCD12D
_MCG_MULTIPLIER = 0xCBAC1FED
_3INST_MULTIPLIER = 89226354
_3INST_INCREMENT = 64248484
_MUL1_SCALE_FP16_BITS = 0x1EEE  # 0.00677, about 1 / 147.7
_MUL1_BIAS_FP16_BITS = 0xC931  # -10.39, centres the byte sum
_HALVES_KEEP = 0x8FFF8FFF
_HALVES_FLIP = 0x3B603B60


def check_codebook(name: str) -> None:
    """Raise `Exl3DflashError` unless `name` is one of `CODEBOOKS`."""
    if name not in CODEBOOKS:
        raise Exl3DflashError(f"unknown codebook {name!r}", expected="one of " + ", ".join(CODEBOOKS))


def codebook_values(name: str, device: torch.device | str = "cpu") -> Tensor:
    """The value of every state, float32 (65536,), each exactly an fp16 number.

    Args:
        name: one of `CODEBOOKS`; anything else raises `Exl3DflashError`.
        device: where the result lives.
    """
    return codebook_table(name).to(device, copy=True)


@cache
def codebook_table(name: str) -> Tensor:
    """`codebook_values` on the CPU, computed once and shared: callers must not write to it."""
    check_codebook(name)
    state = torch.arange(STATES, dtype=torch.int64)
    if name == "mul1":
        return _byte_sum_values(_product(state, _MUL1_MULTIPLIER))
    if name == "mcg":
        return _half_sum_values(_product(state, _MCG_MULTIPLIER))
    return _half_sum_values(_product(state, _3INST_MULTIPLIER) + _3INST_INCREMENT & 0xFFFFFFFF)


def codebook_marker(name: str) -> Tensor | None:
    """The 0-d int32 tensor stored as `<linear>.<codebook>` to name the codebook; None for 3inst, which has none."""
    check_codebook(name)
    if name == "3inst":
        return None
    multiplier = _MUL1_MULTIPLIER if name == "mul1" else _MCG_MULTIPLIER
    return torch.tensor(multiplier - (1 << 32), dtype=torch.int32)  # the same 32 bits read as signed


def _product(state: Tensor, multiplier: int) -> Tensor:
    """state * multiplier mod 2^32, int64. Both halves of the multiplier keep the products within 48 bits."""
    low, high = multiplier & 0xFFFF, multiplier >> 16
    return (state * low + ((state * high & 0xFFFF) << 16)) & 0xFFFFFFFF


def _byte_sum_values(product: Tensor) -> Tensor:
    byte_sum = (product & 0xFF) + (product >> 8 & 0xFF) + (product >> 16 & 0xFF) + (product >> 24)
    scale, bias = _fp16_from_bits(torch.tensor([_MUL1_SCALE_FP16_BITS, _MUL1_BIAS_FP16_BITS])).float()
    # An 11-bit integer times an 11-bit significand, plus the bias, needs 22 bits: exact in float32, then one rounding.
    return ((1024 + byte_sum).float() * scale + bias).half().float()


def _half_sum_values(product: Tensor) -> Tensor:
    bits = (product & _HALVES_KEEP) ^ _HALVES_FLIP
    # Both halves lie in 2^-3 .. 2^1, so their float32 sum is exact and the fp16 rounding is the only one.
    return (_fp16_from_bits(bits & 0xFFFF).float() + _fp16_from_bits(bits >> 16).float()).half().float()


def _fp16_from_bits(bits: Tensor) -> Tensor:
    signed = bits - ((bits & 0x8000) << 1)
    return signed.to(torch.int16).view(torch.float16)

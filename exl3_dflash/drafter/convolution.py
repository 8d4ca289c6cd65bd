"""The dynamic convolutions of DFlash 2: each sublayer's input and output mixed along the rows of a block.

    d = (kernel_projection n).view(rows, 2, k, H / g)                       n: the sublayer's normed input
    conv(z, side)[t, c] = sum over o < k of (base[side, o, c] + d[t, side, o, c // g]) * z[t - o, c]

side 0 acts on the sublayer's input, side 1 on its output. Rows before the first of a block count as zero: neither the
context nor another anchor's block is ever mixed in. Weights and sums are FP32 (FP64 in a float64 model).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from exl3_dflash.drafter.config import ConvolutionSettings
from exl3_dflash.drafter.modules import BLOCK, Observer, TracedLinear


def convolve(z: torch.Tensor, dynamic: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """One side of a dynamic convolution.

    Args:
        z: (C, B, H), the rows of C blocks.
        dynamic: (C, B, k, H / g), weights of each row.
        base: (k, H), weights of all rows.

    Returns:
        (C, B, H).
    """
    count, rows, width = z.shape
    groups = dynamic.shape[-1]
    grouped = z.view(count, rows, groups, width // groups)
    weights = base.view(len(base), groups, -1) + dynamic[..., None]  # (C, B, k, H / g, g)
    mixed = weights[:, :, 0] * grouped
    for offset in range(1, min(len(base), rows)):
        mixed[:, offset:] += weights[:, offset:, offset] * grouped[:, : rows - offset]
    return mixed.view(count, rows, width)


class DynamicConvolution(nn.Module):
    """Wraps a sublayer in two convolutions whose weights depend on the sublayer's input.

    Args:
        settings: kernel and group size.
        name: canonical name.
        observer: shared by all linears of a model.
    """

    base_kernel: torch.Tensor

    def __init__(self, settings: ConvolutionSettings, name: str, observer: Observer) -> None:
        super().__init__()
        self.kernel_size, self.group_size = settings.kernel_size, settings.group_size
        self.kernel_projection = TracedLinear(f"{name}.kernel_projection", observer)
        self.register_buffer("base_kernel", torch.empty(0))

    def forward(self, n: torch.Tensor, rows: int, sublayer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`n (C * B, H)`, blocks of `rows` rows, to (C * B, H): conv(sublayer(conv(n, 0)), 1)."""
        base = self.base_kernel  # (2, k, H)
        groups = n.shape[-1] // self.group_size
        dynamic = self.kernel_projection(n, BLOCK).to(base.dtype).view(-1, rows, 2, self.kernel_size, groups)
        n = n.to(base.dtype).view(-1, rows, n.shape[-1])
        mixed = convolve(n, dynamic[:, :, 0], base[0]).flatten(0, 1)
        output = sublayer(mixed).to(base.dtype)
        return convolve(output.view(n.shape), dynamic[:, :, 1], base[1]).flatten(0, 1)

"""One draft layer: attention and SwiGLU with their norms, inside convolutions where the dialect has them (DFlash 2)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from exl3_dflash.drafter.attention import DrafterAttention
from exl3_dflash.drafter.cache import DrafterCache
from exl3_dflash.drafter.config import DrafterConfig
from exl3_dflash.drafter.convolution import DynamicConvolution
from exl3_dflash.drafter.layout import CONVOLUTIONS
from exl3_dflash.drafter.modules import BLOCK, Observer, RMSNorm, TracedLinear


class DrafterMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, index: int, observer: Observer) -> None:
        super().__init__()
        self.gate_proj = TracedLinear(f"layers.{index}.mlp.gate_proj", observer)
        self.up_proj = TracedLinear(f"layers.{index}.mlp.up_proj", observer)
        self.down_proj = TracedLinear(f"layers.{index}.mlp.down_proj", observer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (T, H) to (T, H)."""
        return self.down_proj(functional.silu(self.gate_proj(x, BLOCK)) * self.up_proj(x, BLOCK), BLOCK)


class DrafterLayer(nn.Module):
    """One draft layer."""

    def __init__(self, config: DrafterConfig, index: int, observer: Observer) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.rms_norm_eps)
        self.self_attn = DrafterAttention(config, index, observer)
        self.mlp = DrafterMLP(index, observer)
        self.context_is_normed = config.dialect.context_is_normed
        self.attention_conv: DynamicConvolution | None = None
        self.mlp_conv: DynamicConvolution | None = None
        if config.convolutions is not None:
            names = (f"layers.{index}.{name}" for name in CONVOLUTIONS)
            self.attention_conv, self.mlp_conv = (
                DynamicConvolution(config.convolutions, name, observer) for name in names
            )

    def extend(self, context: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: DrafterCache) -> None:
        """Write K/V of context rows `(T, H)` behind the rows that `cache` has."""
        context = self.input_layernorm(context) if self.context_is_normed else context
        self.self_attn.extend(context, cos, sin, cache)

    def forward(self, x: torch.Tensor, rows: int, attend: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Block rows `x (C * B, H)`, B = `rows` of each anchor, to the same; `attend` is this layer's attention."""
        n = self.input_layernorm(x)
        x = x + (attend(n) if self.attention_conv is None else self.attention_conv(n, rows, attend))
        m = self.post_attention_layernorm(x)
        return x + (self.mlp(m) if self.mlp_conv is None else self.mlp_conv(m, rows, self.mlp))

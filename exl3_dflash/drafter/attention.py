"""Attention of a drafter: which keys a block row sees, and one attention layer over context and block.

Keys are laid out as context rows [first, end) followed by the block rows of C anchors, B each. Block row i of anchor a
sits at position a + i and sees (q, k positions; W window):

    context   k < a, and q - k < W where sliding                (never the anchor's own state)
    block     its own block; j <= i where causal; |i - j| < W where sliding

Several anchors of one token row share the context and are kept apart by the mask, which is how calibration and
measurement run; generation is the case C = 1, where most layers need no mask at all.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from exl3_dflash.drafter.cache import DrafterCache
from exl3_dflash.drafter.config import DrafterConfig
from exl3_dflash.drafter.modules import BLOCK, CONTEXT, Observer, RMSNorm, TracedLinear
from exl3_dflash.drafter.rope import rotate


def first_visible(anchor: int, window: int | None) -> int:
    """The first context row that the block of `anchor` can see."""
    return 0 if window is None else max(0, anchor - window + 1)


def block_mask(
    anchors: torch.Tensor, rows: int, first: int, end: int, window: int | None, causal: bool
) -> torch.Tensor | None:
    """Which of `end - first + C * rows` keys each block row sees, or None if every row sees every key.

    Args:
        anchors: int64 (C,), positions of the anchors on the drafter's device.
        rows: block rows B of each anchor.
        first, end: the context rows [first, end) that are there; end is the largest anchor.
        window, causal: of the layer.

    Returns:
        bool (C * B, end - first + C * B), True where visible.
    """
    if len(anchors) == 1 and not causal and (window is None or end - first + rows <= window):
        return None
    offsets = torch.arange(rows, device=anchors.device)
    query = (anchors[:, None] + offsets).flatten()  # (C * B,) positions of the block rows
    owner = torch.arange(len(anchors), device=anchors.device).repeat_interleave(rows)
    context = torch.arange(first, end, device=anchors.device)
    sees_context = context < anchors.repeat_interleave(rows)[:, None]  # (C * B, end - first)
    sees_block = owner[:, None] == owner  # (C * B, C * B)
    distance = query[:, None] - query
    if window is not None:
        sees_context &= query[:, None] - context < window
        sees_block &= distance.abs() < window
    if causal:
        sees_block &= distance >= 0
    return torch.cat([sees_context, sees_block], dim=1)


class DrafterAttention(nn.Module):
    """Grouped-query attention with normed and rotated heads; keys come from the context and from the block."""

    def __init__(self, config: DrafterConfig, index: int, observer: Observer) -> None:
        super().__init__()
        self.index = index
        self.head_dim = config.head_dim
        self.num_kv_heads = config.num_kv_heads
        self.window = config.layer_window(index)
        self.causal = config.layer_is_causal(index)
        prefix = f"layers.{index}.self_attn"
        self.q_proj = TracedLinear(f"{prefix}.q_proj", observer)
        self.k_proj = TracedLinear(f"{prefix}.k_proj", observer)
        self.v_proj = TracedLinear(f"{prefix}.v_proj", observer)
        self.o_proj = TracedLinear(f"{prefix}.o_proj", observer)
        self.q_norm = RMSNorm(config.rms_norm_eps)
        self.k_norm = RMSNorm(config.rms_norm_eps)

    def project_keys(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, stream: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `x (T, H)` at the positions of `cos, sin` to keys and values `(nkv, T, hd)`."""
        keys = self.k_norm(self._heads(self.k_proj(x, stream)))
        values = self._heads(self.v_proj(x, stream))
        return rotate(keys, cos, sin).to(values.dtype).transpose(0, 1), values.transpose(0, 1)

    def extend(self, context: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: DrafterCache) -> None:
        """Write K/V of context rows `(T, H)` behind the rows that `cache` has."""
        keys, values = self.project_keys(context, cos, sin, CONTEXT)
        cache.write(self.index, cache.length, keys, values)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: DrafterCache, first: int, end: int,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Block rows `x (T, H)` over context rows [first, end) of `cache` and over themselves; overwrites rows
        [end, end + T) of the cache's buffers."""
        rows = x.shape[0]
        queries = rotate(self.q_norm(self._heads(self.q_proj(x, BLOCK))), cos, sin)  # (T, nh, hd)
        cache.write(self.index, end, *self.project_keys(x, cos, sin, BLOCK))
        keys, values = cache.rows(self.index, first, end + rows)
        groups = queries.shape[1] // self.num_kv_heads
        # The query heads of a K/V head become further rows, so that its keys are read once and never repeated.
        queries = queries.to(keys.dtype).view(rows, self.num_kv_heads, groups, self.head_dim).permute(1, 2, 0, 3)
        attended = functional.scaled_dot_product_attention(
            queries.reshape(1, self.num_kv_heads, groups * rows, self.head_dim),
            keys[None],
            values[None],
            attn_mask=None if mask is None else mask.repeat(groups, 1),
        )
        attended = attended.view(self.num_kv_heads, groups, rows, self.head_dim).permute(2, 0, 1, 3)
        return self.o_proj(attended.reshape(rows, -1), BLOCK)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1] // self.head_dim, self.head_dim)

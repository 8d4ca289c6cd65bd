"""Attention of a drafter: which keys a block row sees, and one attention layer over context and block.

Keys are laid out as context rows [first, end) followed by the block rows of C anchors, B each. Block row i of anchor a
sits at position a + i and sees (q, k positions; W window):

    context   k < a, and q - k < W where sliding                (never the anchor's own state)
    block     its own block; j <= i where causal; |i - j| < W where sliding

Several anchors of one token row share the context and are kept apart by the mask, which is how calibration and
measurement run; generation is the case C = 1, where most layers need no mask at all.

Two variants: a sink is a learned score per query head that takes part in the softmax without a value behind it, so that
the weights of the keys sum to less than one; a head gate multiplies the output of each query head by softplus(g x).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from exl3_dflash.drafter.cache import DrafterCache
from exl3_dflash.drafter.config import DrafterConfig
from exl3_dflash.drafter.layout import SINKS
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


def attend_with_sinks(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor
) -> torch.Tensor:
    """Attention whose softmax also counts a sink.

    Args:
        queries: (heads, T, hd).
        keys, values: (heads, S, hd).
        mask: bool (T, S), True where visible.
        sinks: (heads, T), scores of the sinks, in the type the softmax is computed in.

    Returns:
        (heads, T, hd) in the type of the values.
    """
    scores = (queries @ keys.transpose(1, 2)).to(sinks.dtype) * queries.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = torch.cat([scores, sinks[..., None]], dim=-1).softmax(-1)[..., :-1]
    return weights.to(values.dtype) @ values


class DrafterAttention(nn.Module):
    """Grouped-query attention with normed and rotated heads; keys come from the context and from the block.

    Attributes:
        attention_sink_bias: (nh,), or None without sinks.
    """

    attention_sink_bias: torch.Tensor | None

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
        self.g_proj = TracedLinear(f"{prefix}.g_proj", observer) if config.dialect.head_gates else None
        self.register_buffer(SINKS, None)
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
        queries = queries.reshape(1, self.num_kv_heads, groups * rows, self.head_dim)
        mask = None if mask is None else mask.repeat(groups, 1)
        if self.attention_sink_bias is None:
            attended = functional.scaled_dot_product_attention(queries, keys[None], values[None], attn_mask=mask)
        else:
            sinks = self.attention_sink_bias.view(self.num_kv_heads, groups, 1).expand(-1, -1, rows).flatten(1)
            attended = attend_with_sinks(queries[0], keys, values, mask, sinks)
        attended = attended.view(self.num_kv_heads, groups, rows, self.head_dim).permute(2, 0, 1, 3)
        if self.g_proj is not None:
            gates = functional.softplus(self.g_proj(x, BLOCK).to(attended.dtype))  # (T, nh)
            attended = attended * gates.view(rows, self.num_kv_heads, groups, 1)
        return self.o_proj(attended.reshape(rows, -1), BLOCK)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1] // self.head_dim, self.head_dim)

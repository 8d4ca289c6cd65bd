"""The DFlash v1 drafter in torch: context cache, block forward for generation, many-anchors forward for calibration.

    ctx = hidden_norm(fc(taps of rows 0..a-1));   x = [embedding of the anchor a, mask row x (B-1)] at a..a+B-1
    per layer   n = input_layernorm(x);  q from n;  k, v from [ctx ; n], ctx without input_layernorm
                x += o(attention(q, k, v));  x += down(silu(gate m) * up m),  m = post_attention_layernorm(x)
    h = norm(x);  row k of h predicts the token at position a + k

Context K/V is computed once per token and kept (`DrafterCache`); block K/V is not. Both forwards run the same code: the
block forward is the many-anchors forward with one anchor. Inputs and results are FP32 (FP64 in a float64 model),
weights and linears FP32 or BF16. All weights are buffers: nothing here trains.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional

from exl3_dflash.drafter.attention import DrafterAttention, block_mask, first_visible
from exl3_dflash.drafter.cache import DrafterCache
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.config import DrafterConfig
from exl3_dflash.drafter.layout import EMBEDDING, HEAD, MASK_EMBEDDING
from exl3_dflash.drafter.modules import BLOCK, CONTEXT, InputCallback, Observer, RMSNorm, TracedLinear
from exl3_dflash.drafter.rope import RotaryTable
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.target.base import Target

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
MASK_ELEMENTS = 1 << 20  # of the largest attention mask of a chunk of anchors, before it is repeated for query heads


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


class DrafterModel(nn.Module):
    """A DFlash v1 drafter. Made by `from_checkpoint`.

    Attributes:
        config: its config.
        dtype: type of the linears.
        device: where it computes.
    """

    def __init__(self, config: DrafterConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.device = device
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32
        self._observer = Observer()
        self._rotary = RotaryTable(config.rope, config.head_dim, self._wide, device)
        self.fc = TracedLinear("fc", self._observer)
        self.hidden_norm = RMSNorm(config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config, i, self._observer) for i in range(config.num_layers))
        self.norm = RMSNorm(config.rms_norm_eps)
        self.lm_head: TracedLinear | None = None
        self._embedding: torch.Tensor | None = None
        self._mask_embedding: torch.Tensor | None = None

    @classmethod
    def from_checkpoint(
        cls, checkpoint: DrafterCheckpoint, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> DrafterModel:
        """Load all weights, decoding EXL3 ones.

        Args:
            checkpoint: the drafter.
            dtype: float32, bfloat16, or float64 for exact comparisons.
            device: where to put it.

        Raises:
            Exl3DflashError: float16 or another type; a weight that is not finite.
        """
        if dtype not in DTYPES:
            raise Exl3DflashError(
                f"a drafter cannot run in {str(dtype).removeprefix('torch.')}",
                expected="float32 or bfloat16: the features of real targets leave float16's range",
                fix="choose float32 or bfloat16",
            )
        model = cls(checkpoint.config, dtype, torch.device(device))
        if checkpoint.has_head:
            model.lm_head = TracedLinear(HEAD, model._observer)
        for name in checkpoint.tensor_names():
            model._assign(name, checkpoint.load(name))
        return model.eval()

    def _assign(self, name: str, tensor: torch.Tensor) -> None:
        if name == EMBEDDING:
            self._embedding = tensor.to(self.device, self.dtype)
        elif name == MASK_EMBEDDING:
            self._mask_embedding = tensor.to(self.device, self._wide)
        else:
            path, _, attribute = name.rpartition(".")
            module = self.get_submodule(path)
            dtype = self._wide if isinstance(module, RMSNorm) else self.dtype
            setattr(module, attribute, tensor.to(self.device, dtype).contiguous())

    def set_linear_weight(self, name: str, weight: torch.Tensor) -> None:
        """Replace the weight of linear `name` by `weight (in, out)`, for example a decoded quantized one."""
        linear = self.get_submodule(name)
        assert isinstance(linear, TracedLinear), name
        assert linear.weight.shape == weight.T.shape, (name, weight.shape)
        linear.weight = weight.T.to(self.device, self.dtype).contiguous()

    @contextmanager
    def observe(self, callback: InputCallback) -> Iterator[None]:
        """While active, `callback(name, stream, x)` sees the input x (..., in) of every linear, in the model's type.

        `stream` is "context" for `fc` and for k_proj and v_proj over context rows, "block" for everything else.
        """
        previous, self._observer.callback = self._observer.callback, callback
        try:
            yield
        finally:
            self._observer.callback = previous

    def new_cache(self) -> DrafterCache:
        """An empty context cache."""
        config = self.config
        return DrafterCache(config.num_layers, config.num_kv_heads, config.head_dim, self.dtype, self.device)

    def extend_context(self, cache: DrafterCache, taps: torch.Tensor) -> None:
        """Append the context rows of `taps (T, K * Ht)`, the target's features of positions length..length+T-1."""
        stop = cache.length + taps.shape[0]
        cache.reserve(stop)
        context = self.hidden_norm(self.fc(taps.to(self.device), CONTEXT))  # (T, H)
        cos, sin = self._rotary.at(torch.arange(cache.length, stop, device=self.device), stop)
        for layer in self._layers():
            layer.self_attn.extend(context, cos, sin, cache)
        cache.length = stop

    def draft(self, cache: DrafterCache, embeddings: torch.Tensor, start: int) -> torch.Tensor:
        """One block forward: `embeddings (B', H)` of [anchor, mask, ...] to the final normed hidden state (B', H).

        B' may be smaller than block_size. `start` is the anchor's position and must equal `cache.length`; the cache's
        context is unchanged.
        """
        rows = embeddings.shape[0]
        assert start == cache.length, f"an anchor at {start} after {cache.length} context rows"
        assert 1 <= rows <= self.config.block_size, rows
        anchors = torch.tensor([start], device=self.device)
        return self._forward_blocks(cache, embeddings[None], anchors, start, start)[0]

    def forward_anchors(
        self, taps: torch.Tensor, block_embeddings: torch.Tensor, anchors: torch.Tensor, chunk: int | None = None
    ) -> torch.Tensor:
        """Blocks of many anchors of one token row, each as `draft` would compute it alone.

        Args:
            taps: (S, K * Ht), features of the whole row.
            block_embeddings: (N, B, H), from `block_embeddings`.
            anchors: int64 (N,), positions from 0 to S in any order, repeats allowed. Anchor a sees context rows 0..a-1.
            chunk: anchors per forward; by default as many as keep the attention masks small.

        Returns:
            (N, B, H), in the order of `anchors`.
        """
        rows = block_embeddings.shape[1]
        cache = self.new_cache()
        cache.reserve(taps.shape[0] + rows)
        self.extend_context(cache, taps)
        anchors, block_embeddings = anchors.to(self.device), block_embeddings.to(self.device)
        if chunk is None:
            chunk = max(1, MASK_ELEMENTS // (rows * (taps.shape[0] + rows)))
            chunk = min(chunk, max(1, taps.shape[0] // rows))
        hidden = block_embeddings.new_empty(block_embeddings.shape, dtype=self._wide)
        # From the last anchor to the first: a chunk's transient K/V overwrites context that no later chunk can see.
        for chosen in anchors.argsort(descending=True).split(chunk):
            positions = anchors[chosen]
            low, high = int(positions.min()), int(positions.max())
            assert 0 <= low <= high <= taps.shape[0], "an anchor outside its token row"
            hidden[chosen] = self._forward_blocks(cache, block_embeddings[chosen], positions, low, high)
        return hidden

    def _forward_blocks(
        self, cache: DrafterCache, embeddings: torch.Tensor, anchors: torch.Tensor, low: int, high: int
    ) -> torch.Tensor:
        """Blocks (C, B, H) of `anchors (C,)` between low and high, over context rows below high; rows of the cache's
        buffers from high on are overwritten."""
        count, rows, width = embeddings.shape
        cache.reserve(high + count * rows)
        positions = (anchors[:, None] + torch.arange(rows, device=self.device)).flatten()
        cos, sin = self._rotary.at(positions, high + rows)
        masks: dict[tuple[int | None, bool], torch.Tensor | None] = {}
        x = embeddings.to(self.device, self._wide).reshape(count * rows, width)
        for layer in self._layers():
            attention = layer.self_attn
            first = first_visible(low, attention.window)
            kind = (attention.window, attention.causal)
            if kind not in masks:
                masks[kind] = block_mask(anchors, rows, first, high, *kind)
            x = x + attention(layer.input_layernorm(x), cos, sin, cache, first, high, masks[kind])
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x).view(count, rows, width)

    def block_embeddings(self, target: Target, anchors: torch.Tensor, rows: int | None = None) -> torch.Tensor:
        """Block inputs of anchor tokens: the anchor's embedding, then mask rows.

        Args:
            target: lends its table where the drafter has none.
            anchors: token ids, int64 (N,).
            rows: block rows B, block_size by default.

        Returns:
            (N, B, H).
        """
        rows = rows or self.config.block_size
        anchor_rows = self._embed(target, anchors)  # (N, H)
        if self._mask_embedding is not None:
            mask_row = self._mask_embedding
        else:
            mask_row = self._embed(target, torch.tensor([self.config.mask_token_id], device=anchors.device))[0]
        return torch.cat([anchor_rows[:, None], mask_row.expand(len(anchors), rows - 1, -1)], dim=1)

    def _embed(self, target: Target, ids: torch.Tensor) -> torch.Tensor:
        if self._embedding is not None:
            return self._embedding[ids.to(self.device)].to(self._wide)
        return target.embed(ids.to(target.device)).to(self.device, self._wide)

    def logits(self, target: Target, hidden: torch.Tensor) -> torch.Tensor:
        """Normed hidden states (..., H) to logits (..., V), by the drafter's own head or by the target's."""
        if self.lm_head is None:
            return target.head(hidden.to(target.device))
        scores = self.lm_head(hidden, BLOCK).to(self._wide)
        cap = self.config.final_logit_softcap
        return scores if cap is None else cap * torch.tanh(scores / cap)

    def _layers(self) -> Iterator[DrafterLayer]:
        for layer in self.layers:
            assert isinstance(layer, DrafterLayer)
            yield layer

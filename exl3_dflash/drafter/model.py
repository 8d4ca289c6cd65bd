"""The DFlash drafter in torch: context cache, block forward for generation, many-anchors forward for calibration.

    ctx = hidden_norm(fc(taps of rows 0..a-1));   x = [embedding of the anchor a, mask row x (B-1)] at a..a+B-1
    per layer   n = input_layernorm(x);  q from n;  k, v from [ctx ; n], ctx without input_layernorm
                x += o(attention(q, k, v));  x += down(silu(gate m) * up m),  m = post_attention_layernorm(x)
    h = norm(x);  row k of h predicts the token at position a + k

What the dialects change (`drafter.dialects`): DFlash 2 wraps both sublayers in convolutions (`drafter.convolution`) and
chooses proposals with a selector (`drafter.selector`); Laguna norms each tap before fc and the context in every layer.

Context K/V is computed once per token and kept (`DrafterCache`); block K/V is not. Both forwards run the same code: the
block forward is the many-anchors forward with one anchor. Inputs and results are FP32 (FP64 in a float64 model),
weights and linears FP32 or BF16. All weights are buffers: nothing here trains.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from exl3_dflash.drafter.attention import block_mask, first_visible
from exl3_dflash.drafter.cache import DrafterCache
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.config import DrafterConfig
from exl3_dflash.drafter.layer import DrafterLayer
from exl3_dflash.drafter.layout import (
    CODEBOOKS,
    DRAFT_TO_TARGET,
    EMBEDDING,
    HEAD,
    MASK_EMBEDDING,
    TARGET_TO_DRAFT,
)
from exl3_dflash.drafter.modules import BLOCK, CONTEXT, InputCallback, Observer, RMSNorm, TracedLinear
from exl3_dflash.drafter.rope import RotaryTable
from exl3_dflash.drafter.selector import CandidateSelector, Proposal, columns_of
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.target.base import Target

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
MASK_ELEMENTS = 1 << 20  # of the largest attention mask of a chunk of anchors, before it is repeated for query heads


class DrafterModel(nn.Module):
    """A DFlash drafter. Made by `from_checkpoint`.

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
        taps = len(config.target_layer_ids) if config.dialect.norm_per_tap else 0
        self.aux_hidden_norms = nn.ModuleList(RMSNorm(config.rms_norm_eps) for _ in range(taps))
        self.layers = nn.ModuleList(DrafterLayer(config, i, self._observer) for i in range(config.num_layers))
        self.norm = RMSNorm(config.rms_norm_eps)
        self.candidate_selector: CandidateSelector | None = None
        if config.convolutions is not None:
            self.candidate_selector = CandidateSelector(config.convolutions.selector_top_k, self._observer)
        self.lm_head: TracedLinear | None = None
        self._token_ids: torch.Tensor | None = None  # target ids (D,) of the head's rows
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
        token_ids = checkpoint.draft_token_ids()
        model._token_ids = None if token_ids is None else token_ids.to(model.device)
        for name in checkpoint.tensor_names():
            if name not in (DRAFT_TO_TARGET, TARGET_TO_DRAFT):
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
            dtype = self.dtype if isinstance(module, TracedLinear) else self._wide
            dtype = tensor.dtype if name in CODEBOOKS else dtype
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
        context = self.hidden_norm(self.fc(self._normed_taps(taps.to(self.device)), CONTEXT))  # (T, H)
        cos, sin = self._rotary.at(torch.arange(cache.length, stop, device=self.device), stop)
        for layer in self._layers():
            layer.extend(context, cos, sin, cache)
        cache.length = stop

    def _normed_taps(self, taps: torch.Tensor) -> torch.Tensor:
        """taps (T, K * Ht), each tap under its own norm where the dialect has them."""
        if not self.aux_hidden_norms:
            return taps
        parts = taps.chunk(len(self.aux_hidden_norms), dim=-1)
        return torch.cat([norm(part) for norm, part in zip(self.aux_hidden_norms, parts, strict=True)], dim=-1)

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
            x = layer(
                x,
                rows,
                partial(attention, cos=cos, sin=sin, cache=cache, first=first, end=high, mask=masks[kind]),
            )
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
            rows = self._embedding[ids.to(self.device)].to(self._wide)
        else:
            rows = target.embed(ids.to(target.device)).to(self.device, self._wide)
        scale = self.config.input_embedding_scale
        return rows if scale == 1.0 else rows * scale

    def logits(self, target: Target, hidden: torch.Tensor) -> torch.Tensor:
        """Normed hidden states (..., H) to logits (..., D), by the drafter's own head or by the target's.

        A drafter that states its own scale or softcap (DFlash 2, or one with its own head) has them applied to the
        bare output matrix; any other takes the target's head with all that the target does behind it.
        """
        scale, cap = self.config.output_multiplier, self.config.final_logit_softcap
        if self.lm_head is not None:
            scores = self.lm_head(hidden, BLOCK).to(self._wide)
        elif scale == 1.0 and (cap is None or self.candidate_selector is None):
            return target.head(hidden.to(target.device))
        else:
            scores = target.output_matrix(hidden.to(target.device))
        scores = scores if scale == 1.0 else scores * scale
        return scores if cap is None else cap * torch.tanh(scores / cap)

    def draft_columns(self, ids: torch.Tensor) -> torch.Tensor:
        """Columns of `logits` that stand for target ids (...), -1 where the drafter's vocabulary lacks them."""
        return ids if self._token_ids is None else columns_of(ids, self._token_ids, len(self._token_ids))

    def propose(self, target: Target, anchors: torch.Tensor, hidden: torch.Tensor) -> Proposal:
        """The tokens that the drafter proposes.

        Args:
            target: lends its head where the drafter has none.
            anchors: token ids of the anchors, int64 (N,).
            hidden: (N, R, H), final hidden states of block rows 1..R.

        Returns:
            Target ids (N, R) and the logits (N, R, D) they were chosen from.
        """
        logits = self.logits(target, hidden)
        token_ids = None if self._token_ids is None else self._token_ids.to(logits.device)
        if self.candidate_selector is not None:
            logits = logits.to(self.device)
            chosen = self.candidate_selector(logits, hidden.to(self.device), anchors.to(self.device), self._token_ids)
            return Proposal(chosen, logits, self._token_ids)
        best = logits.argmax(-1)
        return Proposal(best if token_ids is None else token_ids[best], logits, token_ids)

    def _layers(self) -> Iterator[DrafterLayer]:
        for layer in self.layers:
            assert isinstance(layer, DrafterLayer)
            yield layer

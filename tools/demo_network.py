"""Trainable forms of the demo pair's two models, lean enough to train on one CPU core.

`TargetNetwork` is a Llama (RMS norms, RoPE, SwiGLU, tied head) and `DrafterNetwork` a DFlash v1 drafter in the
many-anchors layout: context rows are the target's layer outputs of a whole row, every anchor's block sees the context
before the anchor and itself. Both compute what transformers and `exl3_dflash.drafter` compute from the files that
`demo_files` writes, and a test holds them to it.

Why not the product's own models: q, k and v and the two halves of the MLP are one matrix each here, linears and
attention run in bfloat16 (fast on a CPU that has it), and everything has gradients. Weights and residuals are float32.

Letters: R rows, S tokens, H hidden size, N anchors of a row, B block size, hd head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 272  # 256 bytes, 6 special tokens, padded to a multiple of 16
END_OF_TEXT, SYSTEM, USER, ASSISTANT, END, MASK = range(256, 262)
NORM_EPSILON = 1e-6
ROPE_THETA = 10000.0
POSITIONS = 1024


@dataclass(frozen=True)
class NetworkShape:
    """Sizes of a network: both models of the pair use this."""

    layers: int
    hidden: int = 128
    heads: int = 4
    head_dim: int = 32
    intermediate: int = 384


TARGET_SHAPE = NetworkShape(layers=4)
DRAFTER_SHAPE = NetworkShape(layers=1, heads=8, intermediate=256)
TAP_LAYERS = (0, 1, 2)
BLOCK_SIZE = 8


def rotary_table(head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines (POSITIONS, hd) of RoPE over the whole head, halves rotated (NEOX)."""
    frequencies = ROPE_THETA ** (-torch.arange(head_dim // 2, dtype=torch.float64) / (head_dim // 2))
    angles = torch.arange(POSITIONS, dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.cos()], -1).float(), torch.cat([-angles.sin(), angles.sin()], -1).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x (..., hd) with tables that broadcast against it."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def attention_weights(products: Tensor, mask: Tensor, head_dim: int) -> Tensor:
    """Softmax of scaled and masked (0 or -inf) query-key products; on a CPU its backward beats the fused kernel's."""
    return (products * head_dim**-0.5 + mask).softmax(-1)


class Layer(nn.Module):
    """The weights of one decoder layer, fused; `qk_norm` adds the drafter's norms on queries and keys."""

    def __init__(self, shape: NetworkShape, qk_norm: bool) -> None:
        super().__init__()
        width = shape.heads * shape.head_dim
        self.input_layernorm = nn.Parameter(torch.ones(shape.hidden))
        self.post_attention_layernorm = nn.Parameter(torch.ones(shape.hidden))
        self.qkv = _matrix(3 * width, shape.hidden, 0.5)
        self.out = _matrix(shape.hidden, width, 0.15)
        self.gate_up = _matrix(2 * shape.intermediate, shape.hidden, 0.5)
        self.down = _matrix(shape.hidden, shape.intermediate, 0.15)
        if qk_norm:
            self.q_norm = nn.Parameter(torch.ones(shape.head_dim))
            self.k_norm = nn.Parameter(torch.ones(shape.head_dim))

    def mlp(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The normed SwiGLU branch of x (..., H)."""
        gate, up = _linear(_norm(x, self.post_attention_layernorm), self.gate_up, dtype).chunk(2, -1)
        return _linear(functional.silu(gate) * up, self.down, dtype)

    def tensors(self) -> dict[str, Tensor]:
        """Weights under their names in a checkpoint."""
        q, k, v = self.qkv.detach().chunk(3)
        gate, up = self.gate_up.detach().chunk(2)
        projections = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": self.out.detach()}
        named = {f"self_attn.{name}.weight": weight for name, weight in projections.items()}
        named |= {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up, "mlp.down_proj.weight": self.down.detach()}
        norms = ("input_layernorm", "post_attention_layernorm")
        named |= {f"{name}.weight": getattr(self, name).detach() for name in norms}
        if hasattr(self, "q_norm"):
            named |= {f"self_attn.{name}.weight": getattr(self, name).detach() for name in ("q_norm", "k_norm")}
        return named


class TargetNetwork(nn.Module):
    """The byte-level Llama."""

    def __init__(self, shape: NetworkShape = TARGET_SHAPE, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, shape.hidden) * 0.02)
        self.layers = nn.ModuleList(Layer(shape, qk_norm=False) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self.cos, self.sin = rotary_table(shape.head_dim)

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Ids (R, S) to logits (R, S, V) and the output of every layer, (R, S, H) each."""
        x = functional.embedding(ids, self.embedding)
        outputs = []
        for layer in self.layers:
            assert isinstance(layer, Layer)
            x = x + self._attention(layer, x)
            x = x + layer.mlp(x, self.dtype)
            outputs.append(x)
        return self.head(_norm(x, self.norm)), outputs

    def head(self, hidden: Tensor) -> Tensor:
        """Normed states (..., H) to float32 logits (..., V)."""
        return _linear(hidden, self.embedding, self.dtype).float()

    def _attention(self, layer: Layer, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        heads, dim = self.shape.heads, self.shape.head_dim
        qkv = _linear(_norm(x, layer.input_layernorm), layer.qkv, self.dtype).view(rows, tokens, 3 * heads, dim)
        both, v = qkv.transpose(1, 2).split([2 * heads, heads], 1)  # (R, 2 * heads, S, hd), (R, heads, S, hd)
        q, k = rotate(both, self.cos[:tokens].to(both), self.sin[:tokens].to(both)).chunk(2, 1)
        future = torch.full((tokens, tokens), float("-inf"), dtype=self.dtype).triu(1)
        mixed = attention_weights(q @ k.transpose(-1, -2), future, dim) @ v
        return _linear(mixed.transpose(1, 2).reshape(rows, tokens, heads * dim), layer.out, self.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """Weights under the names of a transformers Llama; the head is tied to the embedding."""
        named = {"model.embed_tokens.weight": self.embedding.detach(), "model.norm.weight": self.norm.detach()}
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            named |= {f"model.layers.{index}.{name}": tensor for name, tensor in layer.tensors().items()}
        return named


class DrafterNetwork(nn.Module):
    """The one-layer DFlash v1 drafter."""

    def __init__(self, shape: NetworkShape = DRAFTER_SHAPE, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        assert shape.layers == 1
        self.shape, self.dtype = shape, dtype
        self.fc = _matrix(shape.hidden, len(TAP_LAYERS) * shape.hidden, 0.5)
        self.hidden_norm = nn.Parameter(torch.ones(shape.hidden))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self.layer = Layer(shape, qk_norm=True)
        self.cos, self.sin = rotary_table(shape.head_dim)

    def forward(self, taps: Tensor, anchors: Tensor, embeddings: Tensor) -> Tensor:
        """Blocks of many anchors.

        Args:
            taps: (R, S, 3H), the tapped layers' outputs.
            anchors: (R, N), positions.
            embeddings: (R, N, B, H), the anchor's embedding followed by B-1 mask rows.

        Returns:
            Normed hidden states (R, N, B, H); row k predicts the token at position a + k.
        """
        rows, count, block, width = embeddings.shape
        x = embeddings.reshape(rows, count * block, width)
        x = x + self._attention(taps, anchors, x, block)
        x = x + self.layer.mlp(x, self.dtype)
        return _norm(x, self.norm).view(rows, count, block, width)

    def _attention(self, taps: Tensor, anchors: Tensor, x: Tensor, block: int) -> Tensor:
        rows, queries, _ = x.shape
        heads, dim, layer = self.shape.heads, self.shape.head_dim, self.layer
        positions = (anchors[:, :, None] + torch.arange(block)).flatten(1)  # (R, N * B)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]  # (R, 1, N * B, hd)
        context = _norm(_linear(taps, self.fc, self.dtype), self.hidden_norm)  # (R, S, H)
        tokens = context.shape[1]
        ctx_k, ctx_v = self._heads(_linear(context, layer.qkv[heads * dim :], self.dtype)).chunk(2, 1)
        q, blk_k, blk_v = self._heads(_linear(_norm(x, layer.input_layernorm), layer.qkv, self.dtype)).chunk(3, 1)
        q = rotate(_norm(q, layer.q_norm), cos, sin).to(self.dtype)
        blk_k = rotate(_norm(blk_k, layer.k_norm), cos, sin).to(self.dtype)
        ctx_k = rotate(_norm(ctx_k, layer.k_norm), self.cos[:tokens], self.sin[:tokens]).to(self.dtype)
        shape = (rows, heads, queries // block, block, dim)
        own = q.view(shape) @ blk_k.view(shape).transpose(-1, -2)  # (R, heads, N, B, B): each block sees all of itself
        unseen = torch.arange(tokens + block) >= anchors.repeat_interleave(block, 1)[:, None, :, None]
        unseen[..., tokens:] = False  # (R, 1, N * B, S + B)
        mask = torch.zeros(unseen.shape, dtype=self.dtype).masked_fill_(unseen, float("-inf"))
        products = torch.cat([q @ ctx_k.transpose(-1, -2), own.flatten(2, 3)], -1)
        weights = attention_weights(products, mask, dim)
        mixed = weights[..., :tokens] @ ctx_v + (weights[..., tokens:].reshape_as(own) @ blk_v.view(shape)).flatten(
            2, 3
        )
        return _linear(mixed.transpose(1, 2).reshape(rows, queries, heads * dim), layer.out, self.dtype)

    def _heads(self, x: Tensor) -> Tensor:
        """(R, T, n * hd) to (R, n, T, hd)."""
        return x.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)

    def tensors(self) -> dict[str, Tensor]:
        """Weights under their canonical DFlash names."""
        named = {"fc.weight": self.fc.detach(), "hidden_norm.weight": self.hidden_norm.detach()}
        named["norm.weight"] = self.norm.detach()
        return named | {f"layers.0.{name}": tensor for name, tensor in self.layer.tensors().items()}


def load_tensors(model: TargetNetwork | DrafterNetwork, stored: dict[str, Tensor]) -> None:
    """Give a network the weights of a checkpoint, through the views that it writes checkpoints from."""
    tensors = model.tensors()
    assert tensors.keys() == stored.keys()
    for name, tensor in tensors.items():
        tensor.copy_(stored[name])


def _matrix(rows: int, columns: int, gain: float) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * gain * columns**-0.5)


def _linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return functional.linear(x.to(dtype), weight.to(dtype))


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm in float32 over the last dimension."""
    return functional.rms_norm(x.float(), (x.shape[-1],), weight, NORM_EPSILON)

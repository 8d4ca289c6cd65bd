"""An independent v1 drafter in float64, one query row at a time, written from the forward's description alone.

It knows nothing of caches, chunks, masks as tensors or K/V layouts: for each anchor it builds the whole sequence of
context and block, and for each query row it lists the keys that the row may see.
"""

from __future__ import annotations

import math
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def turn(head: torch.Tensor, position: int, theta: float, width: int) -> torch.Tensor:
    """NEOX RoPE of one head vector: pairs (i, i + width / 2) as complex numbers."""
    half = width // 2
    angle = torch.tensor([position * theta ** (-2 * i / width) for i in range(half)], dtype=torch.float64)
    turned = torch.complex(head[:half], head[half:width]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag, head[width:]])


def sees(query: int, key: int, key_in_block: bool, causal: bool, window: int | None) -> bool:
    """Whether the block row at position `query` sees the key at position `key`."""
    if key_in_block and causal and key > query:
        return False
    return window is None or (query - key < window and key - query < window)


def reference_block(
    tensors: Tensors, config: dict[str, Any], taps: torch.Tensor, embeddings: torch.Tensor, anchor: int
) -> torch.Tensor:
    """Final normed hidden states (B, H), float64, of one block over context rows 0..anchor-1.

    `config` has the plain keys of `tests.tiny_models.tiny_config`; taps (S, K*Ht), embeddings (B, H).
    """
    w = {name: tensor.double() for name, tensor in tensors.items()}
    eps, theta, head_dim = config["rms_norm_eps"], config["rope_theta"], config["head_dim"]
    width = int(head_dim * config.get("partial_rotary_factor", 1.0))
    groups = config["num_attention_heads"] // config["num_key_value_heads"]
    context = norm(taps[:anchor].double() @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    x = embeddings.double()
    positions = [*range(anchor), *range(anchor, anchor + len(x))]

    def linear(name: str, rows: torch.Tensor) -> torch.Tensor:
        return rows @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(()).double())

    def heads(name: str, rows: torch.Tensor) -> torch.Tensor:
        return linear(name, rows).view(len(rows), -1, head_dim)

    for index, kind in enumerate(config["layer_types"]):
        layer, attention = f"layers.{index}", f"layers.{index}.self_attn"
        window = config["sliding_window"] if kind == "sliding_attention" else None
        causal = config.get("is_causal")
        causal = kind == "sliding_attention" if causal is None else causal
        n = norm(x, w[f"{layer}.input_layernorm.weight"], eps)
        both = torch.cat([context, n])
        queries = norm(heads(f"{attention}.q_proj", n), w[f"{attention}.q_norm.weight"], eps)
        keys = norm(heads(f"{attention}.k_proj", both), w[f"{attention}.k_norm.weight"], eps)
        values = heads(f"{attention}.v_proj", both)
        rows = []
        for i in range(len(x)):
            visible = [
                k for k, position in enumerate(positions) if sees(anchor + i, position, k >= anchor, causal, window)
            ]
            outputs = []
            for h in range(queries.shape[1]):
                query = turn(queries[i, h], anchor + i, theta, width)
                key_rows = torch.stack([turn(keys[k, h // groups], positions[k], theta, width) for k in visible])
                weights = torch.softmax(key_rows @ query / math.sqrt(head_dim), 0)
                outputs.append(weights @ values[visible, h // groups])
            rows.append(torch.cat(outputs))
        x = x + linear(f"{attention}.o_proj", torch.stack(rows))
        m = norm(x, w[f"{layer}.post_attention_layernorm.weight"], eps)
        gate = linear(f"{layer}.mlp.gate_proj", m)
        x = x + linear(f"{layer}.mlp.down_proj", gate * torch.sigmoid(gate) * linear(f"{layer}.mlp.up_proj", m))
    return norm(x, w["norm.weight"], eps)

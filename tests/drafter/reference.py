"""An independent drafter in float64, one query row at a time, written from the forward's description alone.

It knows nothing of caches, chunks, masks as tensors or K/V layouts: for each anchor it builds the whole sequence of
context and block, and for each query row it lists the keys that the row may see. What a dialect adds is done where its
tensors are there; nothing is read from a table of dialects.
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


def convolved(z: torch.Tensor, side: int, n: torch.Tensor, w: Tensors, name: str) -> torch.Tensor:
    """DFlash 2: conv(z, side) with the weights that the sublayer's normed input n (B, H) gives, feature by feature."""
    base = w[f"{name}.base_kernel"][side]  # (k, H)
    kernel, width = base.shape
    dynamic = (n @ w[f"{name}.kernel_projection.weight"].T).view(len(n), 2, kernel, -1)[:, side]  # (B, k, H / g)
    group = width // dynamic.shape[-1]
    out = torch.zeros_like(z)
    for t in range(len(z)):
        for o in range(min(kernel, t + 1)):
            for c in range(width):
                out[t, c] += (base[o, c] + dynamic[t, o, c // group]) * z[t - o, c]
    return out


def selected(w: Tensors, logits: torch.Tensor, hidden: torch.Tensor, anchor: int, top_k: int) -> list[int]:
    """DFlash 2: the greedy path of the selector over logits (R, V) and hidden states (R, H)."""
    before, after = (w[f"candidate_selector.{side}_codebook"].double() for side in ("predecessor", "successor"))
    path, token = [], anchor
    for row, h in zip(logits.double(), hidden.double(), strict=True):
        gate = w["candidate_selector.hidden_projection.weight"].double() @ h
        best = sorted(range(len(row)), key=lambda token: -float(row[token]))[:top_k]
        token = max(best, key=lambda c: float(row[c] + (before[token] * gate) @ after[c]))
        path.append(token)
    return path


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
    value_scale = config.get("attention_value_scale", 1.0)
    features = taps[:anchor].double()
    laguna = "aux_hidden_norms.0.weight" in w
    if laguna:
        parts = features.chunk(sum(name.startswith("aux_hidden_norms") for name in w), dim=-1)
        features = torch.cat([norm(part, w[f"aux_hidden_norms.{i}.weight"], eps) for i, part in enumerate(parts)], -1)
    context = norm(features @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
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
        first_norm = w[f"{layer}.input_layernorm.weight"]
        unmixed = n = norm(x, first_norm, eps)
        convolutions = f"{layer}.attention_conv.base_kernel" in w
        if convolutions:
            n = convolved(n, 0, unmixed, w, f"{layer}.attention_conv")
        both = torch.cat([norm(context, first_norm, eps) if laguna else context, n])
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
                weights = torch.exp(key_rows @ query / math.sqrt(head_dim))
                sink = w.get(f"{attention}.attention_sink_bias")
                total = weights.sum() + (0 if sink is None else torch.exp(sink[h]))
                output = value_scale * (weights / total) @ values[visible, h // groups]
                if laguna:
                    output = output * torch.log1p(torch.exp(w[f"{attention}.g_proj.weight"][h] @ n[i]))
                outputs.append(output)
            rows.append(torch.cat(outputs))
        attended = linear(f"{attention}.o_proj", torch.stack(rows))
        x = x + (convolved(attended, 1, unmixed, w, f"{layer}.attention_conv") if convolutions else attended)
        unmixed = m = norm(x, w[f"{layer}.post_attention_layernorm.weight"], eps)
        if convolutions:
            m = convolved(m, 0, unmixed, w, f"{layer}.mlp_conv")
        gate = linear(f"{layer}.mlp.gate_proj", m)
        fed = linear(f"{layer}.mlp.down_proj", gate * torch.sigmoid(gate) * linear(f"{layer}.mlp.up_proj", m))
        x = x + (convolved(fed, 1, unmixed, w, f"{layer}.mlp_conv") if convolutions else fed)
    return norm(x, w["norm.weight"], eps)

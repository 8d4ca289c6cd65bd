"""Tiny seeded DFlash v1 drafters as Hugging Face directories, made in a few milliseconds.

`make_tiny_drafter(directory, **overrides)` writes config.json and model.safetensors; overrides are config keys (None
removes one), and the keyword arguments below choose what is in the files. By default it fits the tiny targets of
`tests.tiny_targets`: hidden size 32, 4 target layers, 288 rows in the vocabulary, mask id 260.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

DEFAULT_CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "block_size": 4,
    "dflash_config": {"mask_token_id": 260, "target_layer_ids": [0, 2, 3]},
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 4,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 288,
}


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """The default config with keys replaced; a value of None removes the key; dflash_config is replaced as a whole.

    Where num_hidden_layers changes and layer_types is not given, all layers are full ones.
    """
    config = {**json.loads(json.dumps(DEFAULT_CONFIG)), **overrides}
    if "layer_types" not in overrides:
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    return {key: value for key, value in config.items() if value is not None}


def tiny_tensors(
    config: dict[str, Any],
    *,
    seed: int = 0,
    target_hidden_size: int | None = None,
    optional: Iterable[str] = (),
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, torch.Tensor]:
    """Random weights of a config under their canonical names.

    Args:
        config: from `tiny_config`.
        seed: of the weights.
        target_hidden_size: width of one tap, hidden_size by default.
        optional: of "embed_tokens.weight", "lm_head.weight", "mask_embedding".
        dtype: stored type.
    """
    hidden, middle, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    nested = config.get("dflash_config", {})
    taps = len(nested.get("target_layer_ids") or config["target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps * (target_hidden_size or hidden)),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_norm.weight": (head_dim,),
            "self_attn.k_norm.weight": (head_dim,),
            "self_attn.q_proj.weight": (query, hidden),
            "self_attn.k_proj.weight": (key, hidden),
            "self_attn.v_proj.weight": (key, hidden),
            "self_attn.o_proj.weight": (hidden, query),
            "mlp.gate_proj.weight": (middle, hidden),
            "mlp.up_proj.weight": (middle, hidden),
            "mlp.down_proj.weight": (hidden, middle),
        }
        if config.get("attention_bias"):
            layer |= {
                f"self_attn.{n}_proj.bias": (size,) for n, size in zip("qkvo", (query, key, key, hidden), strict=True)
            }
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    extra = {"embed_tokens.weight": (config.get("vocab_size", 0), hidden), "mask_embedding": (hidden,)}
    extra["lm_head.weight"] = extra["embed_tokens.weight"]
    shapes |= {name: extra[name] for name in optional}
    generator = torch.Generator().manual_seed(seed)
    return {name: _random(name, shape, generator).to(dtype) for name, shape in shapes.items()}


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.2 * noise
    if name.endswith(".bias"):
        return 0.3 * noise
    return noise if name.startswith(("embed", "mask")) else noise * shape[-1] ** -0.5 * 1.5


def write_drafter(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """Write config.json and model.safetensors; returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def make_tiny_drafter(
    directory: Path,
    *,
    seed: int = 0,
    target_hidden_size: int | None = None,
    optional: Iterable[str] = (),
    dtype: torch.dtype = torch.bfloat16,
    **overrides: Any,
) -> Path:
    """Write a random drafter; see the module's docstring, `tiny_config` and `tiny_tensors`."""
    config = tiny_config(**overrides)
    tensors = tiny_tensors(config, seed=seed, target_hidden_size=target_hidden_size, optional=optional, dtype=dtype)
    return write_drafter(directory, config, tensors)


class FakeTarget:
    """An embedding and a head, all that a drafter asks of its target.

    Args:
        hidden_size, vocab_size: of both matrices.
        seed: of their values.
    """

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, hidden_size: int = 32, vocab_size: int = 288, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(vocab_size, hidden_size, generator=generator)
        self.head_weight = torch.randn(vocab_size, hidden_size, generator=generator)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (...) to (..., H)."""
        return self.table[ids]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (..., H) to logits (..., V)."""
        return hidden @ self.head_weight.to(hidden.dtype).T

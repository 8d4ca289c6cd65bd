"""Small random DFlash drafters: a config, its tensors, and the directory that our writer makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quantize.checkpoint import CheckpointWriter, QuantizationConfig
from quantize.hadamard import padded_features
from quantize.linear import QuantizedLinear, QuantSettings, quantize_linear


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a tiny drafter with full attention."""

    hidden: int = 128
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 128
    taps: int = 2
    layers: int = 1
    bias: bool = False

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": 4,
            "dflash_config": {"mask_token_id": 5, "target_layer_ids": list(range(self.taps))},
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "num_hidden_layers": self.layers,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "attention_bias": self.bias,
            "max_position_embeddings": 256,
            "vocab_size": 64,
        }

    def linears(self) -> dict[str, tuple[int, int]]:
        """(in, out) of every linear layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {"fc": (self.taps * self.hidden, self.hidden)}
        for layer in range(self.layers):
            shapes |= {
                f"layers.{layer}.self_attn.q_proj": (self.hidden, queries),
                f"layers.{layer}.self_attn.k_proj": (self.hidden, keys),
                f"layers.{layer}.self_attn.v_proj": (self.hidden, keys),
                f"layers.{layer}.self_attn.o_proj": (queries, self.hidden),
                f"layers.{layer}.mlp.gate_proj": (self.hidden, self.intermediate),
                f"layers.{layer}.mlp.up_proj": (self.hidden, self.intermediate),
                f"layers.{layer}.mlp.down_proj": (self.intermediate, self.hidden),
            }
        return shapes

    def norms(self) -> dict[str, int]:
        widths = {"hidden_norm": self.hidden, "norm": self.hidden}
        for layer in range(self.layers):
            widths |= {
                f"layers.{layer}.{name}": self.hidden for name in ("input_layernorm", "post_attention_layernorm")
            }
            widths |= {f"layers.{layer}.self_attn.{name}": self.head_dim for name in ("q_norm", "k_norm")}
        return widths

    def tensors(self, seed: int = 0) -> dict[str, torch.Tensor]:
        """The unquantized checkpoint, in BF16."""
        random = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, (rows, columns) in self.linears().items():
            tensors[f"{name}.weight"] = torch.randn(columns, rows, generator=random) * rows**-0.5
            if self.bias and "self_attn" in name:
                tensors[f"{name}.bias"] = torch.randn(columns, generator=random) * 0.1
        for name, width in self.norms().items():
            tensors[f"{name}.weight"] = 1 + 0.2 * torch.randn(width, generator=random)
        return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def save_source(folder: Path, sizes: Sizes, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(sizes.config()))
    return folder


def quantize_tensors(
    tensors: dict[str, torch.Tensor], names: Iterable[str], settings: QuantSettings
) -> dict[str, QuantizedLinear]:
    """Quantize the layers `names` without calibration."""
    layers = {}
    for name in names:
        weight = tensors[f"{name}.weight"].float().T
        layers[name] = quantize_linear(weight, None, settings, bias=tensors.get(f"{name}.bias"))
    return layers


def random_layers(tensors: dict[str, torch.Tensor], shapes: dict[str, tuple[int, int]]) -> dict[str, QuantizedLinear]:
    """Layers of the right form with random content, 8 bits, mul1: for tests that look at files and not at weights."""
    random = torch.Generator().manual_seed(1)
    layers = {}
    for name, (rows, columns) in shapes.items():
        size = padded_features(rows) // 16, padded_features(columns) // 16, 128
        trellis = torch.randint(-(2**15), 2**15, size, generator=random).to(torch.int16)
        suh, svh = ((torch.randn(side * 16, generator=random) * side**-0.5).half() for side in size[:2])
        suh[rows:], svh[columns:] = 0.0, 0.0
        bias = tensors[f"{name}.bias"].half() if f"{name}.bias" in tensors else None
        layers[name] = QuantizedLinear(trellis, suh, svh, bias, "mul1", 8, rows, columns, 0.0, 0.0, None, 0.0)
    return layers


def write_quantized(
    out: Path, sizes: Sizes, tensors: dict[str, torch.Tensor], layers: dict[str, QuantizedLinear], **options: Any
) -> Path:
    """The directory that our writer makes: `layers` quantized, every other tensor copied."""
    replaced = {f"{name}.{part}" for name in layers for part in ("weight", "bias")}
    bits = next(iter(layers.values())).bits
    with CheckpointWriter(out, **options) as writer:
        for name, layer in layers.items():
            for full, tensor in layer.tensors(name).items():
                writer.add(full, tensor)
        for name, tensor in tensors.items():
            if name not in replaced:
                writer.add(name, tensor)
        writer.set_config(sizes.config(), QuantizationConfig(bits, 8, "mul1", "auto", 0, 0).to_dict())
        return writer.finish()

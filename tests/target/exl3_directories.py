"""EXL3 targets without an encoder: random codes are valid codes, and what they decode to is the reference."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from quantize.codebook import codebook_marker
from quantize.hadamard import padded_features
from quantize.linear import decode_tensors


def write_exl3_pair(
    source: Path, plain: Path, exl3: Path, quantized: Callable[[str], bool], bits: int = 4, codebook: str = "mul1"
) -> None:
    """From the plain target in `source` write two targets with the same weights: EXL3, and plain with decoded ones.

    quantized says of a tensor's name whether its layer is quantized. A head that is missing in `source` (tied) gets a
    quantized tensor of its own if quantized("lm_head.weight").
    """
    tensors = load_file(source / "model.safetensors")
    if "lm_head.weight" not in tensors and quantized("lm_head.weight"):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    decoded, stored = {}, {}
    generator = torch.Generator().manual_seed(3)
    for name, weight in tensors.items():
        if name.endswith(".bias") and quantized(name.replace(".bias", ".weight")):
            decoded[name] = weight.half().float()
            stored[name] = torch.nn.functional.pad(weight.half(), (0, padded_features(len(weight)) - len(weight)))
            continue
        if weight.dim() != 2 or not quantized(name):
            decoded[name] = stored[name] = weight
            continue
        out_features, in_features = weight.shape
        layer = random_layer(in_features, out_features, bits, codebook, generator)
        decoded[name] = decode_tensors(layer, in_features, out_features).T.contiguous()
        stored |= {f"{name.removesuffix('.weight')}.{suffix}": tensor for suffix, tensor in layer.items()}
    for directory, contents in ((plain, decoded), (exl3, stored)):
        shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(contents, directory / "model.safetensors")
    config = json.loads((exl3 / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "exl3", "version": "0.0.1", "bits": bits, "head_bits": bits}
    (exl3 / "config.json").write_text(json.dumps(config))


def random_layer(
    in_features: int, out_features: int, bits: int, codebook: str, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """The stored tensors of a random quantized layer, scaled like a usual weight."""
    rows, columns = padded_features(in_features), padded_features(out_features)
    trellis = torch.randint(-(2**15), 2**15, (rows // 16, columns // 16, 16 * bits), generator=generator)

    def signs(count: int) -> torch.Tensor:
        return torch.randint(0, 2, (count,), generator=generator).float() * 2 - 1

    layer = {
        "trellis": trellis.to(torch.int16),
        "suh": (signs(rows) * in_features**-0.5).half(),
        "svh": signs(columns).half(),
    }
    marker = codebook_marker(codebook)
    return layer if marker is None else layer | {codebook: marker}

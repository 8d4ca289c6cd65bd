"""EXL3 targets as plain weights: every quantized linear layer decoded, under the names that transformers reads.

The decoded tensors (`<layer>.weight` (out, in), `<layer>.bias`) take the place of the stored ones in a state
dictionary, which then goes through transformers' own loading: renamed and fused layouts (experts, for example) are
its business, and whatever it finds missing or left over is an error in `load.py`.

Decoding needs the sizes before padding to 128. They come from the model's own parameters, matched by the longest common
end of the name (a text model inside a multimodal checkpoint has another prefix); layers that have no parameter of
their own (experts that transformers fuses) keep their stored size, which is right where no padding was needed and an
error else.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from tqdm import tqdm

from exl3_dflash.errors import Exl3DflashError
from quantize.checkpoint import StoredLinear, TensorDirectory, layer_tensors, linear_names, mean_bits, read_linear
from quantize.linear import decode_linear

HEAD = "lm_head"


def describe(directory: TensorDirectory) -> str:
    """For example "exl3 4.00bpw": mean bits per weight of the quantized layers, the head apart."""
    body = [stored for name, stored in linear_names(directory).items() if not _is_head(name)]
    return f"exl3 {mean_bits(body):.2f}bpw"


def untied_config(directory: TensorDirectory, config: Any) -> Any:
    """A copy of `config` without its quantization, and without a tied head where the checkpoint stores a head."""
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if any(_is_head(name.rpartition(".")[0]) for name in directory.names()):
        for part in (config, config.get_text_config(decoder=True)):
            part.tie_word_embeddings = False
    return config


def decode_state_dict(
    directory: TensorDirectory,
    parameter_shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """The state dictionary of an EXL3 checkpoint, in the CPU's memory.

    Args:
        directory: the opened checkpoint.
        parameter_shapes: shape of every parameter of the model it belongs to.
        dtype: of the decoded weights; other tensors stay as stored.
        device: where layers are decoded (a GPU decodes large targets many times faster).

    Raises:
        Exl3DflashError: no layer is quantized, or one is damaged or of another size than the model's.
    """
    linears = linear_names(directory)
    if not linears:
        raise Exl3DflashError(
            f"{directory.path} says quant_method exl3, but has no quantized layer",
            expected="layers stored as .trellis, .suh and .svh",
            fix="remove quantization_config from config.json if the weights are plain",
        )
    parts = {part for name in linears for part in layer_tensors(directory, name)}
    state = {name: directory.get(name) for name in directory.names() if name not in parts}
    for name, stored in tqdm(linears.items(), desc="decoding the EXL3 target", unit="layer", leave=False, disable=None):
        in_features, out_features = _features(name, stored, parameter_shapes)
        quantized = read_linear(directory, name, in_features, out_features)
        on_device = dataclasses.replace(
            quantized,
            trellis=quantized.trellis.to(device),
            suh=quantized.suh.to(device),
            svh=quantized.svh.to(device),
        )
        state[f"{name}.weight"] = decode_linear(on_device).T.to(dtype).contiguous().cpu()
        if quantized.bias is not None:
            state[f"{name}.bias"] = quantized.bias.to(dtype)
    return state


def _features(name: str, stored: StoredLinear, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Unpadded (in, out) of a layer."""
    shape = _matching_shape(f"{name}.weight", shapes)
    if shape is None or len(shape) != 2:
        return stored.in_features, stored.out_features
    return shape[1], shape[0]


def _matching_shape(name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape of the one parameter whose name ends like `name` (the longest end that any has)."""
    parts = name.split(".")
    for start in range(len(parts) - 1):
        tail = ".".join(parts[start:])
        found = [shape for key, shape in shapes.items() if key == tail or key.endswith(f".{tail}")]
        if found:
            return found[0] if len(found) == 1 else None
    return None


def _is_head(name: str) -> bool:
    return name == HEAD or name.endswith(f".{HEAD}")

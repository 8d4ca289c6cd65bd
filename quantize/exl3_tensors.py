"""The tensors of a quantized linear layer inside a checkpoint: found, checked and read.

A linear layer called `name` of `in x out` weights, both padded to multiples of 128, is stored as

- `name.trellis` int16 (in/16, out/16, 16 * bits);
- `name.suh` fp16 (in,) and `name.svh` fp16 (out,), scales with signs. Files of early ExLlamaV3 versions have `name.su`
  and `name.sv` instead: int16, one sign bit per feature, least significant bit first, set for -1;
- `name.mul1` or `name.mcg`, int32 without axes, whose presence names the codebook (neither: 3inst);
- `name.bias` (out,), where the layer has one. ExLlamaV3 adds it to the padded output, so it is stored padded.

Any file that ExLlamaV3 made reads this way, whatever the model is. Decoding lies in `quantize.linear`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from quantize.codebook import codebook_marker
from quantize.errors import Exl3DflashError
from quantize.hadamard import HADAMARD_SIZE, padded_features
from quantize.linear import QuantizedLinear
from quantize.tensor_directory import TensorDirectory
from quantize.trellis import SUPPORTED_BITS

TILE = 16
MARKERS = ("mul1", "mcg")
SCALES = (("suh", "su"), ("svh", "sv"))  # as stored today, and as packed signs
LAYER_SUFFIXES = ("trellis", *(suffix for pair in SCALES for suffix in pair), *MARKERS)
_SUPPORTED = ", ".join(f"{bits:g}" for bits in SUPPORTED_BITS)


class StoredLinear(NamedTuple):
    """A quantized linear layer as its stored shapes tell it; features are the padded ones."""

    bits: float
    codebook: str
    in_features: int
    out_features: int


def linear_names(directory: TensorDirectory) -> dict[str, StoredLinear]:
    """Every quantized linear layer of a checkpoint, in order of name; each is checked to be complete and consistent.

    Raises:
        Exl3DflashError: a layer lacks one of its tensors, or their shapes, types or markers do not fit together.
    """
    owners = {name.rpartition(".")[0] for name in directory if name.rpartition(".")[2] in LAYER_SUFFIXES}
    return {name: _inspect(directory, name) for name in sorted(owners)}


def layer_tensors(directory: TensorDirectory, name: str) -> tuple[str, ...]:
    """The full names of the tensors that belong to the quantized layer `name`."""
    return tuple(f"{name}.{suffix}" for suffix in (*LAYER_SUFFIXES, "bias") if f"{name}.{suffix}" in directory)


def read_linear(directory: TensorDirectory, name: str, in_features: int, out_features: int) -> QuantizedLinear:
    """Read the quantized layer `name`, whose unpadded weight is (in_features, out_features).

    The errors of its quantization are not in the file: `proxy_error` and `weight_error` are NaN.

    Raises:
        Exl3DflashError: the layer is absent or damaged, or the stored shapes are not these features padded to 128.
    """
    stored = _inspect(directory, name)
    wanted = padded_features(in_features), padded_features(out_features)
    if (stored.in_features, stored.out_features) != wanted:
        raise Exl3DflashError(
            f"{directory.path}: {name} is stored as {stored.in_features} x {stored.out_features}",
            f"{wanted[0]} x {wanted[1]} for {in_features} x {out_features} weights",
        )
    suh, svh = (_scales(directory, name, pair) for pair in SCALES)
    bias = directory.get(f"{name}.bias") if f"{name}.bias" in directory else None
    return QuantizedLinear(
        trellis=directory.get(f"{name}.trellis"),
        suh=suh,
        svh=svh,
        bias=None if bias is None else bias[:out_features].to(torch.float16),
        codebook=stored.codebook,
        bits=stored.bits,
        in_features=in_features,
        out_features=out_features,
        proxy_error=float("nan"),
        weight_error=float("nan"),
        fallback=None,
        seconds=0.0,
    )


def unpack_signs(packed: torch.Tensor) -> torch.Tensor:
    """Signs stored as bits, int16 (n/16,), to fp16 (n,): bit j of word i is feature 16 i + j, set for -1."""
    bits = (packed.to(torch.int32)[:, None] >> torch.arange(16, dtype=torch.int32)) & 1
    return (1 - 2 * bits).flatten().to(torch.float16)


def _inspect(directory: TensorDirectory, name: str) -> StoredLinear:
    """Check the tensors of one layer against each other and say what they hold."""
    bits, in_features, out_features = _trellis_facts(directory, name)
    for pair, features in zip(SCALES, (in_features, out_features), strict=True):
        _check_scales(directory, name, pair, features)
    codebook = _codebook(directory, name)
    if bits != int(bits) and codebook != "mul1":
        raise Exl3DflashError(f"{directory.path}: {name} has {bits:g} bits with {codebook}", "mul1 for half rates")
    bias = f"{name}.bias"
    if bias in directory and [padded_features(size) for size in directory.shape(bias)] != [out_features]:
        raise Exl3DflashError(
            f"{directory.path}: {bias} has shape {list(directory.shape(bias))}", f"[{out_features}] as the layer"
        )
    return StoredLinear(bits, codebook, in_features, out_features)


def _trellis_facts(directory: TensorDirectory, name: str) -> tuple[float, int, int]:
    """Bits per weight and padded features out of the shape of the trellis."""
    trellis = f"{name}.trellis"
    if trellis not in directory:
        have = ", ".join(layer_tensors(directory, name))
        raise Exl3DflashError(f"{directory.path}: {name} has {have}, but no trellis", "every tensor of the layer")
    shape, dtype = directory.shape(trellis), directory.dtype(trellis)
    whole = len(shape) == 3 and all(tiles and tiles * TILE % HADAMARD_SIZE == 0 for tiles in shape[:2])
    if dtype != torch.int16 or not whole:
        raise Exl3DflashError(
            f"{directory.path}: {trellis} is {dtype} of shape {list(shape)}",
            f"int16 [in/16, out/16, 16 * bits] with in and out multiples of {HADAMARD_SIZE}",
        )
    bits = shape[2] / TILE
    if bits not in SUPPORTED_BITS:
        raise Exl3DflashError(f"{directory.path}: {trellis} has {bits:g} bits per weight", f"one of {_SUPPORTED}")
    return bits, shape[0] * TILE, shape[1] * TILE


def _check_scales(directory: TensorDirectory, name: str, pair: tuple[str, str], features: int) -> None:
    """Exactly one of the two forms, with the layer's number of features."""
    forms = {pair[0]: (torch.float16, (features,)), pair[1]: (torch.int16, (features // 16,))}
    found = [suffix for suffix in pair if f"{name}.{suffix}" in directory]
    if len(found) != 1:
        raise Exl3DflashError(
            f"{directory.path}: {name} has {' and '.join(found) or 'no ' + pair[0]}", "one of the two"
        )
    full = f"{name}.{found[0]}"
    dtype, shape = forms[found[0]]
    if (directory.dtype(full), directory.shape(full)) != (dtype, shape):
        raise Exl3DflashError(
            f"{directory.path}: {full} is {directory.dtype(full)} {list(directory.shape(full))}",
            f"{dtype} {list(shape)}",
        )


def _scales(directory: TensorDirectory, name: str, pair: tuple[str, str]) -> torch.Tensor:
    if f"{name}.{pair[0]}" in directory:
        return directory.get(f"{name}.{pair[0]}")
    return unpack_signs(directory.get(f"{name}.{pair[1]}"))


def _codebook(directory: TensorDirectory, name: str) -> str:
    """The codebook that the layer's marker names; its value must be the codebook's own."""
    found = [marker for marker in MARKERS if f"{name}.{marker}" in directory]
    if not found:
        return "3inst"
    if len(found) > 1:
        raise Exl3DflashError(f"{directory.path}: {name} is marked both {' and '.join(found)}", "one codebook")
    marker, wanted = directory.get(f"{name}.{found[0]}"), codebook_marker(found[0])
    if wanted is None or marker.dtype != torch.int32 or marker.numel() != 1 or marker.item() != wanted.item():
        raise Exl3DflashError(
            f"{directory.path}: {name}.{found[0]} is not the marker of its codebook",
            f"int32 {wanted}",
            "download it again",
        )
    return found[0]

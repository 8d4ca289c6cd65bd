"""What an EXL3 checkpoint says about itself, as ExLlamaV3's converter writes it.

`config.json` gets `quantization_config` with the method, the version, the mean bits, the bits of the head, the size of
the calibration, the output scales and the codebook. `quantization_config.json` repeats it and adds `tensor_storage`:
for each module that owns tensors, what it stores, and for a quantized one its bits and the codebook's multiplier.
Download tools and inference servers read these instead of the weights.

Left out: ExLlamaV3's keys for parts that no drafter has (vision and MTP bits).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quantize.codebook import codebook_marker
from quantize.exl3_tensors import LAYER_SUFFIXES, MARKERS, StoredLinear

CONFIG_NAME = "config.json"
QUANTIZATION_NAME = "quantization_config.json"
FORMAT_VERSION = "1.6.5"  # the ExLlamaV3 version whose files these are

_MODULE_SUFFIXES = (*LAYER_SUFFIXES, "weight", "bias")


@dataclass(frozen=True)
class QuantizationConfig:
    """The facts that `quantization_config` states.

    Attributes:
        bits: mean bits per weight over the quantized tensors, the head apart.
        head_bits: bits of the head; says nothing where the model has none.
        codebook: `mul1`, `mcg` or `3inst`.
        out_scales: `always`, `never` or `auto`.
        calibration_rows, calibration_cols: token rows and their length; 0 where none was used.
    """

    bits: float
    head_bits: float
    codebook: str
    out_scales: str
    calibration_rows: int
    calibration_cols: int

    def to_dict(self) -> dict[str, Any]:
        """The keys in the converter's order."""
        return {
            "quant_method": "exl3",
            "version": FORMAT_VERSION,
            "bits": round(self.bits, 2),
            "head_bits": int(self.head_bits) if self.head_bits == int(self.head_bits) else self.head_bits,
            "calibration": {"rows": self.calibration_rows, "cols": self.calibration_cols},
            "out_scales": self.out_scales,
            "codebook": self.codebook,
        }


def mean_bits(linears: Iterable[StoredLinear]) -> float:
    """Mean bits per weight, padding included as ExLlamaV3 counts it; 0 where nothing is quantized."""
    sizes = [(linear.in_features * linear.out_features, linear.bits) for linear in linears]
    weights = sum(size for size, _ in sizes)
    return sum(size * bits for size, bits in sizes) / weights if weights else 0.0


def quantized_config(config: Mapping[str, Any], quantization: Mapping[str, Any]) -> dict[str, Any]:
    """The source model's `config.json` with `quantization_config` in it.

    The quantization the source came with, if any, is kept as `original_quantization_config`. A head is stored apart
    from the embedding, so `tie_word_embeddings` becomes false where the key exists.
    """
    result = dict(config)
    own = dict(quantization)
    original = result.get("quantization_config")
    if isinstance(original, Mapping) and original.get("quant_method") != "exl3":
        own["original_quantization_config"] = dict(original)
    if "tie_word_embeddings" in result:
        result["tie_word_embeddings"] = False
    result["quantization_config"] = own
    return result


def tensor_storage(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Any]:
    """`tensor_storage` for tensors given by full name as (shape, dtype), modules in the order of their first tensor.

    Tensors that belong to no leaf module (ExLlamaV3 keeps a few as attributes of larger ones) are not listed.
    """
    storage: dict[str, Any] = {}
    for name, (shape, dtype) in tensors.items():
        module, _, suffix = name.rpartition(".")
        if module and suffix in _MODULE_SUFFIXES:
            stored = {"shape": list(shape), "n_bytes": _nbytes(shape, dtype), "dtype": _storage_dtype(dtype)}
            storage.setdefault(module, {"stored_tensors": {}})["stored_tensors"][name] = stored
    for module, entry in storage.items():
        trellis = entry["stored_tensors"].get(f"{module}.trellis")
        if trellis:
            entry.update(_quantized_facts(module, entry["stored_tensors"], trellis["shape"][-1]))
    return storage


def _quantized_facts(module: str, stored: Mapping[str, Any], words: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"quant_format": "exl3", "bits_per_weight": words / 16 if words % 16 else words // 16}
    for codebook in MARKERS:
        marker = codebook_marker(codebook)
        if f"{module}.{codebook}" in stored and marker is not None:
            facts[f"{codebook}_multiplier"] = int(marker.item()) % 2**32
    return facts


def _nbytes(shape: Iterable[int], dtype: torch.dtype) -> int:
    size = dtype.itemsize
    for length in shape:
        size *= length
    return size


def _storage_dtype(dtype: torch.dtype) -> str:
    """The type as ExLlamaV3 spells it, for example `torch.int16`."""
    return str(dtype)

"""Where each canonical tensor of a drafter lies in its files, whatever it is called there.

    model.NAME                                 NAME
    encoder.fc, encoder.output_norm_enc        fc, hidden_norm                       (Muse-Glimmer)
    candidate_selector.X_codebook.weight       candidate_selector.X_codebook         (some DFlash 2 trainers)
    self_attn.qkv_proj                         q_proj, k_proj, v_proj, rows in this order (Laguna, fused exports)

A name that two tensors of the files claim is reported. Everything is written under the names that ExLlamaV3 reads:
canonical ones, but for the dialect's own prefixes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from exl3_dflash.drafter.config import DrafterConfig
from exl3_dflash.drafter.layout import CODEBOOKS
from quantize.checkpoint import TensorDirectory

PREFIX = "model."
FUSED = ".self_attn.qkv_proj."


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the files, or rows [start, stop) of one; stop None is the whole."""

    name: str
    start: int = 0
    stop: int | None = None


class StoredTensors:
    """The tensors of a directory under their canonical names.

    Attributes:
        problems: names that are claimed twice.
    """

    def __init__(self, config: DrafterConfig, directory: TensorDirectory) -> None:
        self.problems: list[str] = []
        self._config = config
        self._directory = directory
        self._places: dict[str, StoredTensor] = {}
        for stored in directory.names():
            for canonical, place in self._canonical(stored):
                if canonical in self._places:
                    self.problems.append(f"{canonical} is there twice, as {self._places[canonical].name} and {stored}")
                self._places[canonical] = place

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def canonical_name(self, stored: str) -> str:
        """The canonical name of a tensor or a linear of the files that is stored whole."""
        name = stored.removeprefix(PREFIX)
        for prefix, replacement in self._config.dialect.stored_prefixes:
            if name == prefix or name.startswith(f"{prefix}."):
                return replacement + name[len(prefix) :]
        if name.removesuffix(".weight") in CODEBOOKS:
            return name.removesuffix(".weight")
        return name

    def stored_name(self, name: str) -> str:
        """The name in the files."""
        return self._places[name].name

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, or of its rows of a fused one."""
        place = self._places[name]
        shape = self._directory.shape(place.name)
        if place.stop is None or not shape:
            return shape
        return (min(place.stop, shape[0]) - min(place.start, shape[0]), *shape[1:])

    def dtype(self, name: str) -> torch.dtype:
        """Stored type."""
        return self._directory.dtype(self._places[name].name)

    def nbytes(self, name: str) -> int:
        """Stored bytes."""
        place = self._places[name]
        whole = self._directory.nbytes(place.name)
        return whole if place.stop is None else whole * (place.stop - place.start) // self._fused_rows()

    def get(self, name: str) -> torch.Tensor:
        """Its values."""
        place = self._places[name]
        return (
            self._directory.get(place.name)[place.start : place.stop] if place.stop else self._directory.get(place.name)
        )

    def _canonical(self, stored: str) -> Iterator[tuple[str, StoredTensor]]:
        name = self.canonical_name(stored)
        layer, fused, kind = name.partition(FUSED)
        shape = self._directory.shape(stored)
        if not fused or kind not in ("weight", "bias") or not shape or shape[0] != self._fused_rows():
            yield name, StoredTensor(stored)
            return
        start = 0
        for projection, rows in self._fused_parts():
            yield f"{layer}.self_attn.{projection}.{kind}", StoredTensor(stored, start, start + rows)
            start += rows

    def _fused_parts(self) -> tuple[tuple[str, int], ...]:
        config = self._config
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return ("q_proj", query), ("k_proj", key), ("v_proj", key)

    def _fused_rows(self) -> int:
        return sum(rows for _, rows in self._fused_parts())


def output_name(config: DrafterConfig, name: str) -> str:
    """The name under which a canonical tensor or linear is written."""
    for stored, canonical in config.dialect.stored_prefixes:
        if name == canonical or name.startswith(f"{canonical}."):
            return stored + name[len(canonical) :]
    return name

"""How many layers are quantized at once on a GPU: their memory and their work, known before anything is moved.

Memory of one layer, with P = 4 bytes of in x out, I of in x in and O of out x out (padded; I and O only where that
side's Hessian is known). `quantize_linear` holds, at its four summits,

    factoring the inputs' metric    2 P + 3 I          weight, rotated weight; Hessian, metric, factor
    factoring the outputs' metric   2 P + 2 I + 3 O
    feeding errors back             4 P + 2 I + 2 O    weight; error, carried error, coded weight; Hessians, factors
    fitting the scales              5 P + I + O + 7/4 max(I, O)    three products of W's shape; one of a side's

counted operation by operation (`tests/quantize/memory_meter.py`). Beside them a GPU holds the encoder's scratch (for as
many tiles as it codes at once, within `SCRATCH_SHARE`), the tiles of one call, and what CUDA itself takes (`RESERVED`).

Work: a layer's error feedback codes it in steps, each of some tiles. Layers are joined in a batch (`cuda_batch`), in
the order in which they come, until its steps have `WAVES` times the tiles that the GPU codes at once, or its memory is
full. A layer that no GPU can hold is for the CPU. The result of a layer depends on none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from quantize.hadamard import padded_features
from quantize.trellis import TILE, TILE_WEIGHTS, position_bits

Layer = TypeVar("Layer")
RESERVED = 1 << 30  # CUDA context and libraries, tiles of one call, rounding of the allocator
SCRATCH_SHARE = 8  # the encoder's scratch takes at most one part in eight of a GPU's memory
WAVES = 2  # of tiles that a step of a batch should have, so that the idle blocks of the last one weigh little


@dataclass(frozen=True)
class LayerShape:
    """What memory and work of a layer depend on.

    Attributes:
        in_features, out_features: before padding.
        bits: bits per weight.
        inputs, outputs: whether that side's Hessian is known.
    """

    in_features: int
    out_features: int
    bits: float
    inputs: bool = False
    outputs: bool = False

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        return padded_features(self.in_features) // TILE, padded_features(self.out_features) // TILE

    @property
    def steps(self) -> int:
        """Calls of the encoder that follow one another, while errors are fed back."""
        down, across = self.tiles
        return down + across - 1 if self.outputs else down

    @property
    def tiles_per_step(self) -> float:
        """Tiles that the encoder gets at once, on average."""
        down, across = self.tiles
        return down * across / self.steps

    def peak_bytes(self) -> int:
        """Memory that `quantize_linear` needs on the layer's device, its arguments included (see above)."""
        rows, columns = padded_features(self.in_features), padded_features(self.out_features)
        weight, inputs, outputs = 4 * rows * columns, 4 * rows**2 * self.inputs, 4 * columns**2 * self.outputs
        return max(
            2 * weight + 3 * inputs,
            2 * weight + 2 * inputs + 3 * outputs,
            4 * weight + 2 * inputs + 2 * outputs,
            5 * weight + inputs + outputs + 7 * max(inputs, outputs) // 4,
        )


def scratch_bytes(bits: float, wave: int, dense: bool = False) -> int:
    """Bytes of scratch that the encoder takes for a wave of tiles, by the kind of kernel (see `cuda_encoder`)."""
    narrow = position_bits(bits)[0]
    nodes = 65536 >> narrow
    if dense:
        return 2 + wave * TILE_WEIGHTS * (nodes // 8 if narrow == 1 else nodes)
    return wave * (TILE_WEIGHTS + 2) * nodes * 2


@dataclass(frozen=True)
class BatchLimits:
    """What a batch may be on one GPU.

    Attributes:
        free_bytes, total_bytes: of its memory.
        wave: tiles that it codes at once.
    """

    free_bytes: int
    total_bytes: int
    wave: int

    def room(self, bits: float) -> int:
        """What layers of a rate may take of its memory."""
        scratch = min(scratch_bytes(bits, self.wave), self.total_bytes // SCRATCH_SHARE)
        return self.free_bytes - RESERVED - scratch

    def hold(self, layer: LayerShape) -> bool:
        """Whether a layer fits at all."""
        return layer.peak_bytes() <= self.room(layer.bits)

    def admit(self, batch: Sequence[LayerShape], layer: LayerShape) -> bool:
        """Whether a layer may join a batch: of its rate, within the memory, while a step has too few tiles."""
        if not batch:
            return True
        memory = sum(member.peak_bytes() for member in batch) + layer.peak_bytes()
        tiles = sum(member.tiles_per_step for member in batch)
        return batch[0].bits == layer.bits and memory <= self.room(layer.bits) and tiles < WAVES * self.wave


def join(
    layers: Iterable[Layer], shape_of: Callable[[Layer], LayerShape], limits: BatchLimits
) -> Iterator[list[Layer]]:
    """Join layers in batches, in their order and as they are needed; one that does not fit at all is alone."""
    batch: list[Layer] = []
    for layer in layers:
        if not limits.admit([shape_of(member) for member in batch], shape_of(layer)):
            yield batch
            batch = []
        batch.append(layer)
    if batch:
        yield batch

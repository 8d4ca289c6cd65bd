"""A calibration pass that is cut short and goes on: everything it has summed, as plain tensors and plain data.

What and why: large drafters are calibrated for hours. After any row the pass is fully described by its packed sums
(`quantize.hessian`), the states of its random generators and how far it has come, so a pass that continues from there
adds the same rows in the same order and ends with the same bytes, wherever it was cut.

Layout: `inputs.<group>.<stream>.<strip>` and `outputs.<linear>.<strip>` are packed sums, float32; `random.<use>` is a
generator's state, uint8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from quantize.hessian import HessianAccumulator


@dataclass(frozen=True)
class PassState:
    """A calibration pass between two rows: tensors by name, and facts (JSON)."""

    tensors: dict[str, torch.Tensor]
    facts: dict[str, Any]


class StateStore(Protocol):
    """Where a pass leaves its state, and finds an earlier one's."""

    def load(self) -> PassState | None:
        """What an earlier run of the same pass left; None where there is nothing."""
        ...

    def keep(self, state: Callable[[], PassState], last: bool) -> None:
        """Called after every row: asks for the state where it is time to keep it, and always after the last row."""
        ...


def pack_sums(prefix: str, sums: Mapping[str, HessianAccumulator]) -> PassState:
    """Accumulators by name as a state; `<prefix>.<name>.<strip>` are their tensors."""
    tensors = {f"{prefix}.{name}.{index}": strip for name in sums for index, strip in enumerate(sums[name].strips)}
    counts = {
        name: {"count": kept.count, "rows": kept.rows, "dropped_rows": kept.dropped_rows, "strips": len(kept.strips)}
        for name, kept in sums.items()
    }
    return PassState(tensors, {prefix: counts})


def unpack_sums(prefix: str, state: PassState, device: torch.device | str) -> dict[str, HessianAccumulator]:
    """The inverse of `pack_sums`, on `device`."""
    sums = {}
    for name, kept in state.facts[prefix].items():
        strips = [state.tensors[f"{prefix}.{name}.{index}"].to(device) for index in range(kept["strips"])]
        counts = {key: value for key, value in kept.items() if key != "strips"}
        sums[name] = HessianAccumulator.restored(strips, **counts)
    return sums

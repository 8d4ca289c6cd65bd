"""The steps of a job as tensors and plain facts, for the work directory, and back."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from exl3_dflash.calibration.capture import Calibration
from exl3_dflash.calibration.fisher import OutputHessians
from exl3_dflash.calibration.rowset import RowSet, TokenRow
from exl3_dflash.conversion.work_directory import StepResult
from quantize.hessian import Hessian, HessianAccumulator
from quantize.linear import QuantizedLinear

OUTPUT_SIDE = "outputs."
LINEAR_TENSORS = ("trellis", "suh", "svh", "bias")


def pack_rows(rows: RowSet) -> StepResult:
    """Rows of both sides, one after the other."""
    both = (*rows.rows, *rows.held_out)
    facts = {
        "lengths": [len(row.ids) for row in both],
        "prompt_lengths": [row.prompt_length for row in both],
        "kinds": [row.kind for row in both],
        "calibration_rows": len(rows.rows),
        "source": rows.source,
        "notes": list(rows.notes),
    }
    ids = torch.cat([row.ids for row in both]) if both else torch.zeros(0, dtype=torch.int64)
    return StepResult({"ids": ids}, facts)


def unpack_rows(result: StepResult) -> RowSet:
    """The inverse of `pack_rows`."""
    facts = result.facts
    parts = result.tensors["ids"].split(facts["lengths"])
    both = tuple(map(TokenRow, parts, facts["prompt_lengths"], facts["kinds"]))
    count = facts["calibration_rows"]
    return RowSet(both[:count], facts["source"], both[count:], tuple(facts["notes"]))


def pack_calibration(calibration: Calibration) -> StepResult:
    """Hessians by group, output-side ones (packed) by linear, and what calibration saw."""
    inputs, outputs = calibration.hessians, calibration.output_hessians.accumulators
    tensors = {group: hessian.matrix for group, hessian in inputs.items()}
    for name, accumulator in outputs.items():
        tensors |= {f"{OUTPUT_SIDE}{name}.{index}": strip for index, strip in enumerate(accumulator.strips)}
    facts = {
        "hessians": {group: _counts(hessian) for group, hessian in inputs.items()},
        "output_hessians": {name: _counts(outputs[name]) | {"strips": len(outputs[name].strips)} for name in outputs},
        "seen": {name: value for name, value in _scalars(calibration).items() if not name.endswith("hessians")},
    }
    return StepResult(tensors, facts)


def unpack_calibration(result: StepResult, device: torch.device) -> Calibration:
    """The inverse of `pack_calibration`."""
    hessians = {
        group: Hessian(matrix=result.tensors[group].to(device), **counts)
        for group, counts in result.facts["hessians"].items()
    }
    outputs = {}
    for name, counts in result.facts["output_hessians"].items():
        strips = [result.tensors[f"{OUTPUT_SIDE}{name}.{index}"].to(device) for index in range(counts.pop("strips"))]
        outputs[name] = HessianAccumulator.restored(strips, **counts)
    return Calibration(hessians=hessians, output_hessians=OutputHessians(outputs), **result.facts["seen"])


def _counts(sums: Hessian | HessianAccumulator) -> dict[str, Any]:
    return {"count": sums.count, "rows": sums.rows, "dropped_rows": sums.dropped_rows}


def pack_linear(linear: QuantizedLinear) -> StepResult:
    """A quantized linear."""
    tensors = {name: tensor for name in LINEAR_TENSORS if (tensor := getattr(linear, name)) is not None}
    return StepResult(tensors, {name: value for name, value in _scalars(linear).items() if name not in LINEAR_TENSORS})


def unpack_linear(result: StepResult) -> QuantizedLinear:
    """The inverse of `pack_linear`."""
    tensors: dict[str, Any] = {name: result.tensors.get(name) for name in LINEAR_TENSORS}
    return QuantizedLinear(**tensors, **result.facts)


def _scalars(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}

"""The steps of a job as tensors and plain facts, for the work directory, and back."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from exl3_dflash.calibration.rowset import RowSet, TokenRow
from exl3_dflash.conversion.work_directory import StepResult
from quantize.linear import QuantizedLinear

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

"""One drafter quantized in many ways, all compared on the same held-out anchors.

A variant is a bit rate and a calibration mode; the unquantized drafter is the reference. Beside the paired fidelity,
every variant reports the relative output error of each tensor on held-out inputs,
`tr(E^T H E) / tr(W^T H W)` with `E = decoded - W` and `H` the Hessian of the held-out rows, which no variant has seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from exl3_dflash.calibration.capture import calibrate
from exl3_dflash.calibration.rows import RowSet
from exl3_dflash.conversion.job import quantize_tensor
from exl3_dflash.conversion.plan import make_plan
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.measure.fidelity import DrafterFidelity, measure_fidelity
from exl3_dflash.progress import Reporter
from exl3_dflash.target.base import Target
from quantize.hessian import Hessian
from quantize.linear import QuantizedLinear, decode_linear

REFERENCE = "unquantized"


@dataclass(frozen=True)
class Variant:
    """One way to quantize: bits per weight and calibration mode (`target` or `none`)."""

    bits: float
    calibration: str

    @property
    def name(self) -> str:
        """For tables and JSON keys."""
        return f"{self.bits:g} bpw, {'calibrated' if self.calibration == 'target' else 'uncalibrated'}"


@dataclass(frozen=True)
class GridResult:
    """Fidelity of every variant, and held-out output errors by variant and tensor."""

    fidelity: list[DrafterFidelity]
    output_errors: dict[str, dict[str, float]]
    bpw: dict[str, float]
    anchors: int
    rows: int
    calibration_rows: int
    source: str

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def run_grid(
    checkpoint: DrafterCheckpoint,
    target: Target,
    rows: RowSet,
    variants: Sequence[Variant],
    settings: JobSettings,
    reporter: Reporter,
) -> GridResult:
    """Quantize the drafter once per variant and measure all of them on `rows.held_out`.

    Args:
        checkpoint: the unquantized drafter.
        target: its target.
        rows: calibration and held-out rows.
        variants: what to try; calibrated ones share one calibration.
        settings: everything else; its bits and calibration are overridden.
        reporter: progress.
    """
    drafter = DrafterModel.from_checkpoint(checkpoint, dtype=target.dtype, device=target.device)
    accept_length = measure_fidelity(target, {REFERENCE: drafter}, rows.held_out).drafters[0].accept_length
    hessians = _hessians(checkpoint, drafter, target, rows.rows, accept_length, settings.seed)
    held_out = _hessians(checkpoint, drafter, target, rows.held_out, accept_length, settings.seed)
    drafters, errors, bpw = {REFERENCE: drafter}, {}, {}
    with reporter.bar("quantize", len(variants), "variant") as advance:
        for variant in variants:
            chosen = replace(settings, bits=variant.bits, calibration=variant.calibration)
            linears = _quantize(checkpoint, chosen, hessians if variant.calibration == "target" else {})
            drafters[variant.name] = _with_linears(checkpoint, target, linears)
            errors[variant.name] = _output_errors(checkpoint, linears, held_out)
            bpw[variant.name] = make_plan(checkpoint, chosen).bpw
            advance(1)
    with reporter.bar("measure", len(rows.held_out), "row") as advance:
        result = measure_fidelity(target, drafters, rows.held_out, progress=lambda: advance(1))
    return GridResult(result.drafters, errors, bpw, result.anchors, result.rows, len(rows.rows), rows.source)


def _hessians(
    checkpoint: DrafterCheckpoint,
    drafter: DrafterModel,
    target: Target,
    rows: Iterable[Any],
    accept_length: float,
    seed: int,
) -> dict[str, Hessian]:
    return calibrate(drafter, checkpoint.linears, target, rows, accept_length=accept_length, seed=seed).hessians


def _quantize(
    checkpoint: DrafterCheckpoint, settings: JobSettings, hessians: Mapping[str, Hessian]
) -> dict[str, QuantizedLinear]:
    return {
        tensor.linear.name: quantize_tensor(settings, checkpoint, tensor, hessians.get(tensor.linear.group))
        for tensor in make_plan(checkpoint, settings).quantized
    }


def _with_linears(
    checkpoint: DrafterCheckpoint, target: Target, linears: Mapping[str, QuantizedLinear]
) -> DrafterModel:
    drafter = DrafterModel.from_checkpoint(checkpoint, dtype=target.dtype, device=target.device)
    for name, linear in linears.items():
        drafter.set_linear_weight(name, decode_linear(linear))
    return drafter


def _output_errors(
    checkpoint: DrafterCheckpoint, linears: Mapping[str, QuantizedLinear], hessians: Mapping[str, Hessian]
) -> dict[str, float]:
    group_of = {linear.name: linear.group for linear in checkpoint.linears}
    errors = {}
    for name, linear in linears.items():
        weight = checkpoint.load(f"{name}.weight").double().T  # (in, out)
        matrix = hessians[group_of[name]].matrix.double().cpu()
        errors[name] = _energy(decode_linear(linear).double() - weight, matrix) / _energy(weight, matrix)
    return errors


def _energy(weight: torch.Tensor, hessian: torch.Tensor) -> float:
    """`tr(weight^T H weight)` with weight `(in, out)`."""
    return float((weight * (hessian @ weight)).sum())

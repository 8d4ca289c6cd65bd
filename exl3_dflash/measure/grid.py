"""One drafter quantized in many ways, all compared on the same held-out anchors.

A variant is a bit rate and a method; the unquantized drafter is the reference. Methods:

- `uncalibrated`: no Hessian, no error feedback; what a converter without a target can do;
- `one-sided`: feedback along the inputs, by what they were on calibration rows;
- `two-sided`: along the outputs too, by the Fisher information, rows behind a rejected draft left out (the default);
- `two-sided-all-rows`: the same with all rows.

Beside the paired fidelity, every variant reports the relative output error of each tensor on held-out inputs,
`tr(E^T H E) / tr(W^T H W)` with `E = decoded - W` and `H` the Hessian of the held-out rows, which no variant has seen.
Methods are compared two by two at the same bits: the ratio of their accept lengths, paired.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from exl3_dflash.calibration.capture import Calibration, calibrate
from exl3_dflash.calibration.fisher import FisherSettings, OutputHessians
from exl3_dflash.calibration.rows import RowSet
from exl3_dflash.calibration.rowset import TokenRow
from exl3_dflash.conversion.encoding import quantize_tensor
from exl3_dflash.conversion.plan import make_plan
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.measure.fidelity import DrafterFidelity, TallyTable, measure_fidelity, summarize, tally_rows
from exl3_dflash.measure.statistics import Interval
from exl3_dflash.progress import Reporter
from exl3_dflash.target.base import Target
from quantize.hessian import Hessian
from quantize.linear import QuantizedLinear, decode_linear

REFERENCE = "unquantized"
METHODS = ("uncalibrated", "one-sided", "two-sided", "two-sided-all-rows")


@dataclass(frozen=True)
class Variant:
    """One way to quantize: bits per weight and one of `METHODS`."""

    bits: float
    method: str

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise Exl3DflashError(f"method {self.method!r}", expected=f"one of {', '.join(METHODS)}")

    @property
    def name(self) -> str:
        """For tables and JSON keys."""
        return f"{self.bits:g} bpw, {self.method}"


@dataclass(frozen=True)
class Comparison:
    """Accept length of `better` over that of `base`, two variants with the same bits, on the same anchors."""

    base: str
    better: str
    ratio: float
    ci95: Interval


@dataclass(frozen=True)
class GridResult:
    """Fidelity of every variant, methods compared at equal bits, and figures by variant: held-out output errors by
    tensor, stored bits per weight, seconds of quantization."""

    fidelity: list[DrafterFidelity]
    comparisons: list[Comparison]
    output_errors: dict[str, dict[str, float]]
    bpw: dict[str, float]
    seconds: dict[str, float]
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
    pair = _Pair(checkpoint, drafter, target, accept_length, settings.seed)
    calibrations = _calibrations(pair, rows.rows, {variant.method for variant in variants})
    held_out = pair.calibrate(rows.held_out, None).hessians
    drafters, errors, bpw, seconds = {REFERENCE: drafter}, {}, {}, {}
    with reporter.bar("quantize", len(variants), "variant") as advance:
        for variant in variants:
            chosen = replace(settings, bits=variant.bits)
            linears = _quantize(checkpoint, chosen, calibrations.get(variant.method))
            drafters[variant.name] = _with_linears(checkpoint, target, linears)
            errors[variant.name] = _output_errors(checkpoint, linears, held_out)
            bpw[variant.name] = make_plan(checkpoint, chosen).bpw
            seconds[variant.name] = sum(linear.seconds for linear in linears.values())
            advance(1)
    with reporter.bar("measure", len(rows.held_out), "row") as advance:
        table = tally_rows(target, drafters, rows.held_out, progress=lambda: advance(1))
    result = summarize(table)
    compared = _compare(table, variants)
    sizes = (result.anchors, result.rows, len(rows.rows))
    return GridResult(result.drafters, compared, errors, bpw, seconds, *sizes, rows.source)


@dataclass(frozen=True, eq=False)
class _Pair:
    checkpoint: DrafterCheckpoint
    drafter: DrafterModel
    target: Target
    accept_length: float
    seed: int

    def calibrate(self, rows: Iterable[TokenRow], fisher: FisherSettings | None) -> Calibration:
        return calibrate(
            self.drafter,
            self.checkpoint.linears,
            self.target,
            rows,
            accept_length=self.accept_length,
            fisher=fisher,
            seed=self.seed,
        )


def _calibrations(pair: _Pair, rows: Sequence[TokenRow], methods: Collection[str]) -> dict[str, Calibration]:
    """The calibration of every method that has one; inputs are the same for all of them."""
    fisher = {"two-sided": FisherSettings(), "two-sided-all-rows": FisherSettings(survival=False)}
    made = {name: pair.calibrate(rows, settings) for name, settings in fisher.items() if name in methods}
    if "one-sided" in methods:
        source = next(iter(made.values()), None) or pair.calibrate(rows, None)
        made["one-sided"] = replace(source, output_hessians=OutputHessians({}))
    return made


def _quantize(
    checkpoint: DrafterCheckpoint, settings: JobSettings, calibration: Calibration | None
) -> dict[str, QuantizedLinear]:
    inputs = calibration.hessians if calibration else {}
    outputs = calibration.output_hessians if calibration else OutputHessians({})
    return {
        tensor.linear.name: quantize_tensor(
            settings, checkpoint, tensor, inputs.get(tensor.linear.group), outputs.get(tensor.linear.name)
        )
        for tensor in make_plan(checkpoint, settings).quantized
    }


def _compare(table: TallyTable, variants: Sequence[Variant]) -> list[Comparison]:
    """Every variant against the previous one of the same bits, in the order in which they were asked for."""
    comparisons = []
    for bits in dict.fromkeys(variant.bits for variant in variants):
        names = [variant.name for variant in variants if variant.bits == bits]
        for base, better in pairwise(names):
            both = replace(table, tallies={name: table.tallies[name] for name in (base, better)})
            row = summarize(both).drafters[1]
            comparisons.append(Comparison(base, better, row.retention, row.retention_ci95))
    return comparisons


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

"""`--tune` as a step of a job: run it once, keep its result, and take it only where it is better.

Tuning is judged twice. Its own stopping rows choose the state (`conversion.tuning`); the held-out rows of the report,
which nothing was fitted to, then decide between the tuned and the untuned drafter: a tuned one that accepts less there
is dropped, and the report says so. So the reported accept length is never below that of the same job without `--tune`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from exl3_dflash.calibration.capture import Calibration
from exl3_dflash.calibration.rowset import TokenRow
from exl3_dflash.conversion.tunable import TunedTensors, coded_weight
from exl3_dflash.conversion.tuning import TuningSettings, tune
from exl3_dflash.conversion.work_directory import WorkDirectory
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.measure.tallies import FidelityResult, TallyTable, summarize
from exl3_dflash.progress import Reporter
from exl3_dflash.target.base import Target
from quantize.encoder import default_threads
from quantize.hessian import Hessian
from quantize.linear import QuantizedLinear, decode_linear
from quantize.refit import Metric, ScaleFit
from quantize.workers import Workers

STEP = "tuning"
UNTUNED = "untuned"
_PARTS = ("suh", "svh", "norms")


@dataclass(frozen=True)
class Drafted:
    """What is to be written: quantized linears, norms that differ from the source's, and what tuning did, if it ran."""

    linears: dict[str, QuantizedLinear]
    norms: dict[str, torch.Tensor]
    tuning: dict[str, Any] | None = None

    def model(self, checkpoint: DrafterCheckpoint, dtype: torch.dtype, device: torch.device) -> DrafterModel:
        """The drafter that these tensors stand for."""
        model = DrafterModel.from_checkpoint(checkpoint, dtype=dtype, device=device)
        for name, linear in self.linears.items():
            model.set_linear_weight(name, decode_linear(linear))
        for name, weight in self.norms.items():
            module = model.get_submodule(name.removesuffix(".weight"))
            assert isinstance(module.weight, torch.Tensor)
            module.weight = weight.to(module.weight)
        return model


def tuned_drafter(
    checkpoint: DrafterCheckpoint,
    drafter: DrafterModel,
    target: Target,
    rows: Sequence[TokenRow],
    quantized: Mapping[str, QuantizedLinear],
    calibration: Calibration,
    settings: TuningSettings,
    reporter: Reporter,
    work: WorkDirectory | None = None,
    threads: int = 0,
) -> Drafted:
    """Tune a quantized drafter, or take the result of an earlier run from `work`.

    Args:
        checkpoint, drafter: the unquantized drafter, on disk and loaded.
        target: its target.
        rows: calibration rows.
        quantized: the quantized linears.
        calibration: whose Hessians the reported errors are measured with.
        settings: how to tune.
        reporter: progress.
        work: where the finished step is kept.
        threads: for the errors.
    """
    stored = work.load(STEP) if work is not None else None
    if stored is not None:
        tensors, facts = _unpacked(stored.tensors), stored.facts
    else:
        teacher = _in_float32(checkpoint, drafter)
        result = tune(checkpoint, quantized, teacher, target, rows, settings, reporter)
        tensors, facts = result.tensors, result.facts.to_json()
        if work is not None:
            work.save(STEP, _packed(tensors), facts)
    reporter.note(_line(facts))
    if tensors is None:
        return Drafted(dict(quantized), {}, facts)
    linears = dict(quantized)
    with Workers(threads or default_threads()) as workers:
        for name in tensors.suh:
            linears[name] = _rescaled(checkpoint, linears[name], tensors, calibration, name, workers)
    return Drafted(linears, tensors.norms, facts)


def choose(table: TallyTable, tuned: Drafted, untuned: Drafted, name: str) -> tuple[FidelityResult, Drafted]:
    """Of a tuned and the untuned drafter the one that accepts more.

    Args:
        table: tallies of the reference, of `name` (the tuned drafter) and of `UNTUNED`.
        tuned, untuned: the two.
        name: of the chosen one in the result.

    Returns:
        The fidelity of reference and chosen drafter, and the chosen drafter with the comparison in its facts.
    """
    assert tuned.tuning is not None
    compared = replace(table, tallies={key: table.tallies[key] for key in (UNTUNED, name)})
    before, after = summarize(compared).drafters
    facts = tuned.tuning | {
        "held_out": {
            "accept_length_untuned": before.accept_length,
            "accept_length_tuned": after.accept_length,
            "ratio": after.retention,
            "ratio_ci95": after.retention_ci95,
        }
    }
    chosen = replace(tuned, tuning=facts)
    tallies = table.tallies[name]
    if after.accept_length < before.accept_length:
        reason = "the tuned drafter accepts less than the untuned one on the held-out rows"
        chosen = replace(untuned, tuning=facts | {"kept": False, "reason": reason})
        tallies = table.tallies[UNTUNED]
    reference = next(iter(table.tallies))
    both = replace(table, tallies={reference: table.tallies[reference], name: tallies})
    return summarize(both), chosen


def _in_float32(checkpoint: DrafterCheckpoint, drafter: DrafterModel) -> DrafterModel:
    if drafter.dtype == torch.float32:
        return drafter
    return DrafterModel.from_checkpoint(checkpoint, dtype=torch.float32, device=drafter.device)


def _rescaled(
    checkpoint: DrafterCheckpoint,
    linear: QuantizedLinear,
    tensors: TunedTensors,
    calibration: Calibration,
    name: str,
    workers: Workers,
) -> QuantizedLinear:
    """A linear with other scales, and with the errors that it then has."""
    group = next(spec.group for spec in checkpoint.linears if spec.name == name)
    inputs, outputs = calibration.hessians.get(group), calibration.output_hessians.get(name)
    fit = ScaleFit(
        checkpoint.load(f"{name}.weight").float().T.contiguous(),
        coded_weight(linear),
        _metric(inputs if linear.damping is not None else None),
        workers,
        _metric(outputs if linear.output_damping is not None else None),
    )
    suh, svh = tensors.suh[name], tensors.svh[name]
    error = fit.error(suh[: linear.in_features].float(), svh[: linear.out_features].float())
    return replace(linear, suh=suh, svh=svh, proxy_error=error.output, weight_error=error.weight)


def _metric(hessian: Hessian | None) -> Metric:
    return Metric(None if hessian is None else hessian.matrix.float().cpu())


def _packed(tensors: TunedTensors | None) -> dict[str, torch.Tensor]:
    if tensors is None:
        return {}
    return {f"{part}:{name}": value for part in _PARTS for name, value in getattr(tensors, part).items()}


def _unpacked(stored: Mapping[str, torch.Tensor]) -> TunedTensors | None:
    if not stored:
        return None
    parts: dict[str, dict[str, torch.Tensor]] = {part: {} for part in _PARTS}
    for key, value in stored.items():
        part, _, name = key.partition(":")
        parts[part][name] = value
    return TunedTensors(**parts)


def _line(facts: Mapping[str, Any]) -> str:
    if not facts["kept"]:
        return f"note: not tuned: {facts['reason']}"
    return (
        f"tuned {facts['parameters']} scales and norm weights on {facts['rows']} rows; on {facts['stopping_rows']} "
        f"other rows accept length {facts['accept_length_before']:.3f} -> {facts['accept_length_after']:.3f}"
    )

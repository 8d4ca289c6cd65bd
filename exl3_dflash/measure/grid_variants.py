"""The variants of a grid (`measure.grid`), made one by one; what several of them need is made once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch

from exl3_dflash.calibration.capture import Calibration, calibrate
from exl3_dflash.calibration.fisher import FisherSettings, OutputHessians
from exl3_dflash.calibration.rows import RowSet
from exl3_dflash.calibration.rowset import TokenRow
from exl3_dflash.conversion.deciding import Pair, decide
from exl3_dflash.conversion.encoding import quantize_tensor
from exl3_dflash.conversion.plan import QuantizationPlan, make_plan
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.conversion.tuning import TuningSettings
from exl3_dflash.conversion.tuning_step import Drafted, tuned_drafter
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.layout import HEAD
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.measure.gguf_baseline import GGUF_BITS, check_gguf, gguf_weights
from exl3_dflash.progress import Reporter
from exl3_dflash.target.base import Target
from quantize.hessian import Hessian
from quantize.linear import QuantizedLinear, decode_linear

TUNED, MIXED = "-tuned", "mixed"
ERROR_ROWS = 32  # held-out rows on whose inputs output errors are measured
FISHER = {"two-sided": FisherSettings(), "two-sided-all-rows": FisherSettings(survival=False)}


@dataclass(frozen=True, eq=False)
class MadeVariant:
    """A drafter made in one way, and what that says about it (see `grid_store.Cell`)."""

    drafter: DrafterModel
    bpw: float
    seconds: float
    output_errors: dict[str, float]
    tuning: dict[str, Any] | None = None


class VariantMaker:
    """Makes variants of one drafter.

    Args:
        checkpoint, drafter: the unquantized drafter, on disk and loaded.
        target: its target.
        rows: calibration rows, and held-out rows for output errors.
        settings: everything but bits and method.
        accept_length: of the unquantized drafter, for calibration.
        reporter: progress.
    """

    def __init__(
        self,
        checkpoint: DrafterCheckpoint,
        drafter: DrafterModel,
        target: Target,
        rows: RowSet,
        settings: JobSettings,
        accept_length: float,
        reporter: Reporter,
    ) -> None:
        self._checkpoint = checkpoint
        self._drafter = drafter
        self._target = target
        self._rows = rows
        self._settings = settings
        self._accept_length = accept_length
        self._reporter = reporter
        self._calibration = cache(self._calibrate)
        self._plan = cache(self._make_plan)
        self._linears = cache(self._quantize)

    def make(self, bits: float, method: str) -> MadeVariant:
        """One variant."""
        if method in GGUF_BITS:
            check_gguf(self._checkpoint.linears)
            weights = gguf_weights(self._checkpoint, method)
            return self._made(Drafted({}, {}), weights, bits, 0.0)
        linears = self._linears(bits, method.removesuffix(TUNED))
        drafted = Drafted(linears, {})
        if method.endswith(TUNED):
            drafted = self._tune(linears, method.removesuffix(TUNED))
        weights = {name: decode_linear(linear) for name, linear in drafted.linears.items()}
        seconds = sum(linear.seconds for linear in linears.values())
        return self._made(drafted, weights, effective_bpw(self._plan(bits, method.removesuffix(TUNED))), seconds)

    def _made(self, drafted: Drafted, weights: Mapping[str, torch.Tensor], bpw: float, seconds: float) -> MadeVariant:
        model = drafted.model(self._checkpoint, self._target.dtype, self._target.device)
        for name, weight in weights.items():
            model.set_linear_weight(name, weight)
        return MadeVariant(model, bpw, seconds, self._output_errors(weights), drafted.tuning)

    def _make_plan(self, bits: float, method: str) -> QuantizationPlan:
        settings = replace(self._settings, bits=bits, plan=MIXED if method == MIXED else "uniform")
        plan = make_plan(self._checkpoint, settings)
        if method != MIXED:
            return plan
        rows = replace(self._rows, held_out=())  # nothing is predicted here
        pair = Pair(self._target, self._drafter, rows, self._calibration(method))
        return decide(settings, self._checkpoint, plan, pair, self._reporter)

    def _quantize(self, bits: float, method: str) -> dict[str, QuantizedLinear]:
        calibration = None if method == "uncalibrated" else self._calibration(method)
        settings = replace(self._settings, bits=bits)
        quantized = {}
        tensors = self._plan(bits, method).quantized
        with self._reporter.bar(f"quantize {bits:g} bpw, {method}", len(tensors), "tensor") as advance:
            for tensor in tensors:
                name = tensor.linear.name
                inputs = calibration.hessians.get(tensor.linear.group) if calibration else None
                outputs = calibration.output_hessians.get(name) if calibration else None
                quantized[name] = quantize_tensor(settings, self._checkpoint, tensor, inputs, outputs)
                advance(1)
        return quantized

    def _tune(self, linears: dict[str, QuantizedLinear], method: str) -> Drafted:
        return tuned_drafter(
            self._checkpoint,
            self._drafter,
            self._target,
            self._rows.rows,
            linears,
            self._calibration(method),
            TuningSettings(seed=self._settings.seed),
            self._reporter,
            threads=self._settings.threads,
        )

    def _calibrate(self, method: str) -> Calibration:
        """The calibration of a method; the inputs are the same for all of them."""
        if method == MIXED:
            return self._calibration("two-sided")
        if method == "one-sided":
            return replace(self._calibration("two-sided"), output_hessians=OutputHessians({}))
        return self._pass(self._rows.rows, FISHER[method])

    def _pass(self, rows: tuple[TokenRow, ...], fisher: FisherSettings | None) -> Calibration:
        with self._reporter.bar("calibrate" if fisher else "held-out inputs", len(rows), "row") as advance:
            return calibrate(
                self._drafter,
                self._checkpoint.linears,
                self._target,
                rows,
                accept_length=self._accept_length,
                fisher=fisher,
                seed=self._settings.seed,
                progress=lambda: advance(1),
            )

    @cached_property
    def _held_out_inputs(self) -> dict[str, Hessian]:
        return self._pass(self._rows.held_out[:ERROR_ROWS], None).hessians

    def _output_errors(self, weights: Mapping[str, torch.Tensor]) -> dict[str, float]:
        group_of = {linear.name: linear.group for linear in self._checkpoint.linears}
        errors = {}
        for name, decoded in weights.items():
            weight = self._checkpoint.load(f"{name}.weight").double().T  # (in, out)
            matrix = self._held_out_inputs[group_of[name]].matrix.double().cpu()
            size = _energy(weight, matrix)
            errors[name] = _energy(decoded.double() - weight, matrix) / size if size > 0.0 else 0.0
        return errors


def effective_bpw(plan: QuantizationPlan) -> float:
    """Stored bits per weight of all linears but the head: scales, padding and linears that are only copied included."""
    linears = [tensor for tensor in plan.tensors if tensor.linear.name != HEAD]
    return 8 * sum(tensor.stored_bytes for tensor in linears) / sum(tensor.weights for tensor in linears)


def _energy(weight: torch.Tensor, hessian: torch.Tensor) -> float:
    """`tr(weight^T H weight)` with weight `(in, out)`."""
    return float((weight * (hessian @ weight)).sum())

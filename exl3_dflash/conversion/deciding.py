"""The step between calibration and encoding: what coding will cost, which bits follow from it, and what will remain.

1. The error that coding leaves in each tensor is drawn with its expected size and shape (`quantize.expected_error`);
   the shape is that of the Hessians, so it is what calibrated coding leaves, one- or two-sided.
2. For a mixed plan the errors of each group of tensors, at `PROBE_BITS`, are added to the drafter and measured on a few
   calibration rows (`measure.simulation`); the cost at other rates follows from the expected sizes. The budget is then
   divided so that the predicted loss of accept length is least (`conversion.allocation`).
3. The retention of the plan is predicted by adding the expected errors of all tensors, and measuring on the held-out
   rows, the same anchors on which the result will be measured. Held-out rows decide nothing: bits come from
   calibration rows.

Without calibration nothing is known about what matters: a mixed plan then takes every tensor's relative error for
equally costly. Linears behind the drafter's own forward (a DFlash 2 selector's) do not show in the divergence; they
keep the rate below the budget.

The decision is kept in the work directory, so that a resumed job follows the plan it began with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from exl3_dflash.calibration.anchors import valid_anchors
from exl3_dflash.calibration.capture import Calibration
from exl3_dflash.calibration.rowset import RowSet
from exl3_dflash.conversion.allocation import BitGroup, allocate, bit_groups, plan_rates
from exl3_dflash.conversion.encoding import make_task
from exl3_dflash.conversion.estimate import estimate_seconds
from exl3_dflash.conversion.measuring import anchors_per_row
from exl3_dflash.conversion.plan import QuantizationPlan, describe, make_plan
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.conversion.work_directory import WorkDirectory
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.layout import output_linears
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.measure.simulation import measure_costs, simulated_retention
from exl3_dflash.progress import Reporter
from exl3_dflash.target.base import Target
from quantize.expected_error import TILE_ERRORS, ExpectedError, expect_error
from quantize.hessian import Hessian

PLAN = "plan"
PROBE_BITS = 3
PROBE_ROWS = 16
LEAST_COST = 1e-9  # of the largest: a group without a measurable effect still improves with its bits


@dataclass(frozen=True, eq=False)
class Pair:
    """What a decision is measured with: the exact drafter, its target, rows, and what calibration saw of them."""

    target: Target
    drafter: DrafterModel
    rows: RowSet
    calibration: Calibration | None


class DrawnErrors(Mapping[str, torch.Tensor]):
    """Errors (in, out) of linears at given bits; each is drawn when it is asked for, and not kept."""

    def __init__(self, errors: Mapping[str, ExpectedError], bits: Mapping[str, float]) -> None:
        self._errors = errors
        self._bits = bits

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._errors[name].draw(self._bits[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._bits)

    def __len__(self) -> int:
        return len(self._bits)


def decide_plan(
    settings: JobSettings,
    checkpoint: DrafterCheckpoint,
    plan: QuantizationPlan,
    pair: Pair | None,
    work: WorkDirectory,
    reporter: Reporter,
) -> QuantizationPlan:
    """`decide`, with the decision kept in the work directory and shown; a decided plan that nothing can be predicted
    of was shown before."""
    stored = work.load(PLAN)
    if stored is not None:
        decided = plan if plan.decided else make_plan(checkpoint, settings, stored.facts["bits"])
        return replace(decided, predicted_retention=stored.facts["predicted_retention"])
    decided = decide(settings, checkpoint, plan, pair, reporter)
    if decided == plan:
        return plan
    bits = {tensor.linear.name: tensor.bits for tensor in decided.quantized}
    work.save(PLAN, {}, {"bits": bits, "predicted_retention": decided.predicted_retention})
    reporter.note(describe(decided, settings, estimate_seconds(decided, settings)))
    return decided


def decide(
    settings: JobSettings,
    checkpoint: DrafterCheckpoint,
    plan: QuantizationPlan,
    pair: Pair | None,
    reporter: Reporter,
) -> QuantizationPlan:
    """The plan with all bits decided, and with its retention predicted where there are held-out rows.

    Args:
        settings, checkpoint, plan: of the job.
        pair: None without a target.
        reporter: progress.
    """
    measurable = pair is not None and bool(pair.rows.held_out)
    if plan.decided and not measurable:
        return plan
    errors = _expected_errors(settings, checkpoint, plan, pair, reporter) if pair is not None else {}
    if not plan.decided:
        plan = make_plan(checkpoint, settings, _choose_bits(settings, checkpoint, plan, pair, errors, reporter))
    if pair is not None and measurable:
        plan = replace(plan, predicted_retention=_predict(plan, pair, errors, reporter))
    return plan


def _expected_errors(
    settings: JobSettings, checkpoint: DrafterCheckpoint, plan: QuantizationPlan, pair: Pair, reporter: Reporter
) -> dict[str, ExpectedError]:
    """By linear, for all that the plan quantizes."""
    hessians = pair.calibration.hessians if pair.calibration else {}
    outputs: Mapping[str, Hessian] = pair.calibration.output_hessians if pair.calibration else {}
    errors = {}
    with reporter.bar("expect errors", len(plan.quantized), "tensor") as advance:
        for tensor in plan.quantized:
            name = tensor.linear.name
            task = make_task(settings, checkpoint, tensor, hessians.get(tensor.linear.group), outputs.get(name))
            errors[name] = expect_error(task.weight, task.hessian, task.output_hessian, task.settings)
            advance(1)
    return errors


def _choose_bits(
    settings: JobSettings,
    checkpoint: DrafterCheckpoint,
    plan: QuantizationPlan,
    pair: Pair | None,
    errors: Mapping[str, ExpectedError],
    reporter: Reporter,
) -> dict[str, float]:
    """Bits by linear of the plan's body."""
    sizes = {tensor.linear.name: tensor.stored_weights for tensor in plan.body}
    members = bit_groups(sizes)
    rates = plan_rates(settings.codebook)
    behind = output_linears(checkpoint.config, has_head=True)
    if pair is not None and pair.calibration is not None:
        costs = _measured_costs(members, pair, errors, rates, reporter)
    else:
        relative = TILE_ERRORS[settings.codebook]
        costs = {names: {rate: len(names) * relative[rate] for rate in rates} for names in members}
    groups = []
    for names in members:
        allowed = rates
        if any(name in behind for name in names):
            allowed = (max(rate for rate in rates if rate <= settings.bits),)
        weights = sum(sizes[name] for name in names)
        groups.append(BitGroup(names, weights, {rate: costs[names][rate] for rate in allowed}))
    return allocate(groups, settings.bits)


def _measured_costs(
    members: list[tuple[str, ...]],
    pair: Pair,
    errors: Mapping[str, ExpectedError],
    rates: tuple[float, ...],
    reporter: Reporter,
) -> dict[tuple[str, ...], dict[float, float]]:
    """The cost of each group at each rate, from its cost at `PROBE_BITS`."""
    span = pair.drafter.config.block_size - 1
    rows = [row for row in pair.rows.rows if valid_anchors(len(row.ids), row.prompt_length, span)][:PROBE_ROWS]
    with reporter.bar("weigh tensors", len(rows), "row") as advance:
        at_probe = measure_costs(
            pair.target,
            pair.drafter,
            {names[0]: DrawnErrors(errors, dict.fromkeys(names, PROBE_BITS)) for names in members},
            rows,
            anchors_per_row=anchors_per_row(pair.drafter, pair.target),
            progress=_tick(advance),
        )
    least = LEAST_COST * (max(at_probe.values()) or 1.0)
    costs = {}
    for names in members:
        cost = max(at_probe[names[0]], least)
        size = {rate: sum(errors[name].residual(rate) for name in names) for rate in (*rates, PROBE_BITS)}
        costs[names] = {rate: cost * size[rate] / size[PROBE_BITS] for rate in rates}
    return costs


def _predict(plan: QuantizationPlan, pair: Pair, errors: Mapping[str, ExpectedError], reporter: Reporter) -> float:
    """Retained accept length on the held-out rows with the errors that the plan will leave."""
    drawn = DrawnErrors(errors, {tensor.linear.name: tensor.bits or 0 for tensor in plan.quantized})
    with reporter.bar("predict", len(pair.rows.held_out), "row") as advance:
        return simulated_retention(
            pair.target,
            pair.drafter,
            drawn,
            pair.rows.held_out,
            anchors_per_row=anchors_per_row(pair.drafter, pair.target),
            progress=_tick(advance),
        )


def _tick(advance: Callable[[float], None]) -> Callable[[], None]:
    return lambda: advance(1)

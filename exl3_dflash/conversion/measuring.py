"""How well a job's drafter predicts its target on the held-out rows, before and after."""

from __future__ import annotations

from collections.abc import Mapping

from exl3_dflash.calibration.rows import RowSet
from exl3_dflash.conversion.work_directory import WorkDirectory
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.measure.fidelity import FidelityResult, measure_fidelity
from exl3_dflash.progress import Reporter
from exl3_dflash.target.base import Target
from quantize.linear import QuantizedLinear, decode_linear

MIN_ANCHORS_PER_ROW = 32
HEAD_OPERATIONS_PER_ROW = 5e10  # about a second of a CPU
UNQUANTIZED, QUANTIZED = "unquantized", "quantized"


def accept_length(
    target: Target, drafter: DrafterModel, rows: RowSet, work: WorkDirectory, reporter: Reporter
) -> float:
    """Teacher-forced accept length of the unquantized drafter; 1 (a step per token) where nothing is measured."""
    if not rows.held_out:
        return 1.0
    stored = work.load(UNQUANTIZED)
    if stored is not None:
        measured: float = stored.facts["accept_length"]
        return measured
    with reporter.bar("measure unquantized", len(rows.held_out), "row") as advance:
        result = measure_fidelity(
            target,
            {UNQUANTIZED: drafter},
            rows.held_out,
            anchors_per_row=anchors_per_row(drafter, target),
            progress=lambda: advance(1),
        )
    measured = result.drafters[0].accept_length
    reporter.note(f"unquantized: accept length {measured:.3f} over {result.anchors} held-out anchors")
    work.save(UNQUANTIZED, {}, {"accept_length": measured})
    return measured


def measure_pair(
    checkpoint: DrafterCheckpoint,
    target: Target,
    drafter: DrafterModel,
    quantized: Mapping[str, QuantizedLinear],
    rows: RowSet,
    reporter: Reporter,
) -> FidelityResult | None:
    """Unquantized against quantized on the held-out rows; None where there are none."""
    if not rows.held_out:
        return None
    other = DrafterModel.from_checkpoint(checkpoint, dtype=target.dtype, device=target.device)
    for name, linear in quantized.items():
        other.set_linear_weight(name, decode_linear(linear))
    with reporter.bar("measure quantized", len(rows.held_out), "row") as advance:
        return measure_fidelity(
            target,
            {UNQUANTIZED: drafter, QUANTIZED: other},
            rows.held_out,
            anchors_per_row=anchors_per_row(drafter, target),
            progress=lambda: advance(1),
        )


def anchors_per_row(drafter: DrafterModel, target: Target) -> int:
    """Anchors measured per held-out row: as many as keep the head, by far the largest part, within bounds."""
    config = drafter.config
    head_operations = 2 * (config.block_size - 1) * target.facts.head_size * config.hidden_size
    return max(MIN_ANCHORS_PER_ROW, int(HEAD_OPERATIONS_PER_ROW // head_operations))

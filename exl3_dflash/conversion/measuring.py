"""How well a job's drafter predicts its target on the held-out rows, before and after."""

from __future__ import annotations

from collections.abc import Mapping

from exl3_dflash.calibration.rows import RowSet
from exl3_dflash.conversion.tuning_step import UNTUNED, Drafted, choose
from exl3_dflash.conversion.work_directory import WorkDirectory
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.measure.fidelity import FidelityResult, measure_fidelity, tally_rows
from exl3_dflash.measure.tallies import summarize
from exl3_dflash.progress import Reporter
from exl3_dflash.target.base import Target
from quantize.linear import QuantizedLinear

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
    drafted: Drafted,
    quantized: Mapping[str, QuantizedLinear],
    rows: RowSet,
    reporter: Reporter,
) -> tuple[FidelityResult | None, Drafted]:
    """Unquantized against what is to be written, on the held-out rows.

    Args:
        checkpoint, drafter: the unquantized drafter, on disk and loaded.
        target: its target.
        drafted: what is to be written.
        quantized: the linears before tuning.
        rows: whose held-out side is measured on.
        reporter: progress.

    Returns:
        The figures, None where there are no held-out rows, and what is to be written: untuned where that accepts more.
    """
    if not rows.held_out:
        return None, drafted
    untuned = Drafted(dict(quantized), {})
    drafters = {UNQUANTIZED: drafter, QUANTIZED: drafted.model(checkpoint, target.dtype, target.device)}
    if drafted.tuning is not None and drafted.tuning["kept"]:
        drafters[UNTUNED] = untuned.model(checkpoint, target.dtype, target.device)
    with reporter.bar("measure quantized", len(rows.held_out), "row") as advance:
        table = tally_rows(
            target,
            drafters,
            rows.held_out,
            anchors_per_row=anchors_per_row(drafter, target),
            progress=lambda: advance(1),
        )
    if UNTUNED in drafters:
        return choose(table, drafted, untuned, QUANTIZED)
    return summarize(table), drafted


def anchors_per_row(drafter: DrafterModel, target: Target) -> int:
    """Anchors measured per held-out row: as many as keep the head, by far the largest part, within bounds."""
    config = drafter.config
    head_operations = 2 * (config.block_size - 1) * target.facts.head_size * config.hidden_size
    return max(MIN_ANCHORS_PER_ROW, int(HEAD_OPERATIONS_PER_ROW // head_operations))

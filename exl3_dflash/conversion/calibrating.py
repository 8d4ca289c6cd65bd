"""Calibration as a step of a job: kept in the work directory while it runs, and told about where it fell short."""

from __future__ import annotations

import time
from collections.abc import Callable

from exl3_dflash.calibration.capture import Calibration, calibrate
from exl3_dflash.calibration.fisher import FisherSettings
from exl3_dflash.calibration.rows import RowSet
from exl3_dflash.calibration.state import PassState
from exl3_dflash.conversion.measuring import accept_length
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.conversion.work_directory import WorkDirectory
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.progress import Reporter
from exl3_dflash.target.base import Target

CALIBRATION = "calibration"
KEEP_SECONDS = 60.0  # between two copies of the running sums on the disk, at the least
KEEP_SHARE = 0.05  # of the time, at most, for writing them: the sums of a large drafter are gigabytes


class KeptPass:
    """The calibration pass in the work directory: one file, replaced from time to time and after the last row."""

    def __init__(self, work: WorkDirectory) -> None:
        self._work = work
        self._last_end = time.monotonic()
        self._last_cost = 0.0

    def load(self) -> PassState | None:
        """What an earlier run left."""
        stored = self._work.load(CALIBRATION)
        return None if stored is None else PassState(stored.tensors, stored.facts)

    def keep(self, state: Callable[[], PassState], last: bool) -> None:
        """Write the state where it is time to."""
        start = time.monotonic()
        if not last and start - self._last_end < max(KEEP_SECONDS, self._last_cost / KEEP_SHARE):
            return
        now = state()
        self._work.save(CALIBRATION, now.tensors, now.facts)
        self._last_end = time.monotonic()
        self._last_cost = self._last_end - start


def calibrate_job(
    settings: JobSettings,
    checkpoint: DrafterCheckpoint,
    target: Target,
    drafter: DrafterModel,
    rows: RowSet,
    work: WorkDirectory,
    reporter: Reporter,
) -> Calibration:
    """Run the calibration pass, or what is missing of it.

    Raises:
        Exl3DflashError: no row could be used.
    """
    tokens_per_step = accept_length(target, drafter, rows, work, reporter)
    with reporter.bar("calibrate", len(rows.rows), "row") as advance:
        calibration = calibrate(
            drafter,
            checkpoint.linears,
            target,
            rows.rows,
            accept_length=tokens_per_step,
            fisher=FisherSettings() if settings.method == "two-sided" else None,
            seed=settings.seed,
            progress=lambda: advance(1),
            store=KeptPass(work),
        )
    if calibration.rows == 0:
        raise Exl3DflashError(
            f"none of {len(rows.rows)} calibration rows could be used, {calibration.dropped_rows} were not finite",
            expected="rows with at least two tokens and finite target features",
            fix="try --dtype float32 or other --cal-data",
        )
    if calibration.dropped_rows or calibration.dropped_inputs or calibration.dropped_gradients:
        reporter.note(
            f"note: {calibration.dropped_rows} rows, {calibration.dropped_inputs} single inputs and "
            f"{calibration.dropped_gradients} single gradients were not finite and were dropped"
        )
    return calibration

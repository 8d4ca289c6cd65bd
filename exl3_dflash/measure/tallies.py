"""Sums per token row of what drafters got right, and the figures made of them (definitions in `measure.fidelity`).

Everything measured is a ratio of sums over rows, so a table of per-row sums is all that has to be kept: any subset of
the rows (a kind of prompt, thinking on or off) can be summarized from it later without another forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exl3_dflash.calibration.rowset import TokenRow
from exl3_dflash.measure.statistics import Interval, ratio_interval, resample_weights


@dataclass(frozen=True)
class RowTally:
    """Sums of one drafter over one row's anchors; arrays are per draft position `(B - 1,)`.

    label_nats is the drafter's surprise -ln p at the target's greedy token: smoother than right or wrong, so it tells
    settings apart on fewer rows.
    """

    anchors: int
    emitted: float
    reached: NDArray[np.float64]
    accepted: NDArray[np.float64]
    agreed: NDArray[np.float64]
    divergence: NDArray[np.float64]
    label_nats: NDArray[np.float64]


@dataclass(frozen=True)
class DrafterFidelity:
    """Figures of one drafter (definitions in `measure.fidelity`)."""

    name: str
    accept_length: float
    ci95: Interval
    retention: float
    retention_ci95: Interval
    position_acceptance: list[float]
    top1_agreement: float
    top1_agreement_ci95: Interval
    kl: float


@dataclass(frozen=True)
class FidelityResult:
    """A paired comparison; the first drafter is the reference."""

    drafters: list[DrafterFidelity]
    anchors: int
    rows: int
    dropped_rows: int
    block_size: int

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return asdict(self)


@dataclass(frozen=True)
class TallyTable:
    """Every measured row's tally of every drafter.

    Attributes:
        rows: the rows that were measured, in order.
        tallies: by drafter, one per row; the first drafter is the reference.
        dropped_rows: rows left out because the target's features were not finite.
        block_size: B of all drafters.
    """

    rows: tuple[TokenRow, ...]
    tallies: dict[str, list[RowTally]]
    dropped_rows: int
    block_size: int

    def select(self, indices: Sequence[int]) -> TallyTable:
        """The table of these rows only."""
        tallies = {name: [column[index] for index in indices] for name, column in self.tallies.items()}
        return TallyTable(tuple(self.rows[index] for index in indices), tallies, 0, self.block_size)


def add_tallies(tallies: Sequence[RowTally]) -> RowTally:
    """The sum of tallies."""
    return RowTally(
        anchors=sum(tally.anchors for tally in tallies),
        emitted=sum(tally.emitted for tally in tallies),
        reached=np.sum([tally.reached for tally in tallies], axis=0),
        accepted=np.sum([tally.accepted for tally in tallies], axis=0),
        agreed=np.sum([tally.agreed for tally in tallies], axis=0),
        divergence=np.sum([tally.divergence for tally in tallies], axis=0),
        label_nats=np.sum([tally.label_nats for tally in tallies], axis=0),
    )


def position_acceptance(tally: RowTally) -> list[float]:
    """Share of anchors where draft k is right among those where 1..k-1 are, per position; 0 where none got so far."""
    return [
        float(accepted / reached) if reached else 0.0
        for accepted, reached in zip(tally.accepted, tally.reached, strict=True)
    ]


def anchors_and_emitted(tallies: Sequence[RowTally]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Anchors and emitted tokens of each row, `(rows,)` both: what intervals of the accept length are made of."""
    return (
        np.array([tally.anchors for tally in tallies], dtype=np.float64),
        np.array([tally.emitted for tally in tallies], dtype=np.float64),
    )


def summarize(table: TallyTable) -> FidelityResult:
    """Figures of every drafter with 95 % bootstrap intervals over rows, the same resamples for all."""
    anchors, reference_emitted = anchors_and_emitted(next(iter(table.tallies.values())))
    weights = resample_weights(len(anchors))
    drafters = []
    for name, rows in table.tallies.items():
        _, emitted = anchors_and_emitted(rows)
        total = add_tallies(rows)
        agreed = np.array([tally.agreed.mean() for tally in rows])
        drafters.append(
            DrafterFidelity(
                name=name,
                accept_length=total.emitted / total.anchors,
                ci95=ratio_interval(emitted, anchors, weights),
                retention=float(emitted.sum() / reference_emitted.sum()),
                retention_ci95=ratio_interval(emitted, reference_emitted, weights),
                position_acceptance=position_acceptance(total),
                top1_agreement=float(agreed.sum() / anchors.sum()),
                top1_agreement_ci95=ratio_interval(agreed, anchors, weights),
                kl=float(total.divergence.mean() / total.anchors),
            )
        )
    return FidelityResult(drafters, int(anchors.sum()), len(anchors), table.dropped_rows, table.block_size)

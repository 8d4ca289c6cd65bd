"""One drafter under several settings, teacher-forced on the same anchors: which setting was it trained with?

A wrong setting (taps one layer off, another RoPE base, a lost window) never shows in the text, only in the acceptance,
and most of them can be told by trying the others. The target runs once per row, for all tapped layers that any setting
needs; each setting then costs one forward of the drafter. Settings are compared in pairs on the same anchors:

    gain = (emitted of the candidate - emitted of the base) / anchors
    nats = (surprise of the base - surprise of the candidate) / anchors, surprise = -ln p at the target's greedy tokens

both with a bootstrap interval over rows. The gain is what a user feels; the nats tell settings apart that differ
little.

Weights are read and decoded once and shared by all settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from exl3_dflash.calibration.anchors import sample_anchors
from exl3_dflash.calibration.rowset import TokenRow
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.config import DrafterConfig
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.drafter.taps import tap_layer_indices
from exl3_dflash.measure.fidelity import LabelledRow, label_row, no_usable_rows, tally_row
from exl3_dflash.measure.statistics import Interval, ratio_interval, resample_weights
from exl3_dflash.measure.tallies import RowTally, add_tallies, anchors_and_emitted, position_acceptance
from exl3_dflash.target.base import Target


@dataclass(frozen=True)
class Candidate:
    """A drafter's settings under a name of their own."""

    name: str
    config: DrafterConfig


@dataclass(frozen=True)
class CandidateFigures:
    """What a candidate accepts, as in `measure.fidelity`."""

    name: str
    accept_length: float
    ci95: Interval
    position_acceptance: list[float]


@dataclass(frozen=True)
class Gain:
    """A candidate less the base, paired, with intervals at `level`: accept length, and nats per block of labels."""

    value: float
    interval: Interval
    nats: float
    nats_interval: Interval
    level: float


class ReconfiguredCheckpoint(DrafterCheckpoint):
    """A checkpoint under another config; `tensors` keeps what was read and decoded for the next one."""

    def __init__(self, source: DrafterCheckpoint, config: DrafterConfig, tensors: dict[str, torch.Tensor]) -> None:
        self.__dict__.update(source.__dict__)
        self.config = config
        self._tensors = tensors

    def load(self, name: str) -> torch.Tensor:
        """As `DrafterCheckpoint.load`, from memory the second time."""
        if name not in self._tensors:
            self._tensors[name] = super().load(name)
        return self._tensors[name]


class CandidateProbe:
    """Measures candidates of one drafter. Make it with `label`.

    Attributes:
        rows: labelled rows that all candidates see.
        token_rows: the same rows as they were given.
        dropped_rows: rows left out because the target's features were not finite.
    """

    def __init__(
        self,
        checkpoint: DrafterCheckpoint,
        target: Target,
        rows: Sequence[LabelledRow],
        token_rows: Sequence[TokenRow],
        dropped_rows: int,
    ) -> None:
        self._checkpoint = checkpoint
        self._target = target
        self.rows = tuple(rows)
        self.token_rows = tuple(token_rows)
        self.dropped_rows = dropped_rows
        self._tensors: dict[str, torch.Tensor] = {}
        self._tallies: dict[str, list[RowTally]] = {}
        self._weights = resample_weights(len(rows))

    @classmethod
    @torch.inference_mode()
    def label(
        cls,
        checkpoint: DrafterCheckpoint,
        target: Target,
        rows: Iterable[TokenRow],
        layers: tuple[int, ...],
        *,
        anchors_per_row: int | None = None,
        seed: int = 0,
    ) -> CandidateProbe:
        """Run the target over the rows.

        Args:
            checkpoint: the drafter.
            target: its target.
            rows: rows that the target wrote.
            layers: every target layer that a candidate may tap.
            anchors_per_row: anchors drawn per row; None takes all.
            seed: of the anchor choice.

        Raises:
            Exl3DflashError: no row is long enough and finite.
        """
        block_size = checkpoint.config.block_size
        generator = torch.Generator().manual_seed(seed)
        labelled: list[LabelledRow] = []
        kept: list[TokenRow] = []
        dropped = 0
        for row in rows:
            anchors = sample_anchors(len(row.ids), row.prompt_length, block_size - 1, anchors_per_row, generator)
            if len(anchors):
                found = label_row(target, row, layers, anchors)
                if found is None:
                    dropped += 1
                else:
                    labelled.append(found)
                    kept.append(row)
        if not labelled:
            raise no_usable_rows(block_size)
        return cls(checkpoint, target, labelled, kept, dropped)

    @property
    def anchors(self) -> int:
        """Anchors of all rows."""
        return sum(len(row.anchors) for row in self.rows)

    def model(self, candidate: Candidate) -> DrafterModel:
        """The drafter under a candidate's config."""
        checkpoint = ReconfiguredCheckpoint(self._checkpoint, candidate.config, self._tensors)
        return DrafterModel.from_checkpoint(checkpoint, dtype=self._target.dtype, device=self._target.device)

    def tallies(self, candidate: Candidate) -> list[RowTally]:
        """One tally per row; measured once per name."""
        if candidate.name not in self._tallies:
            self._tallies[candidate.name] = self.tally(self.rows, candidate)
        return self._tallies[candidate.name]

    @torch.inference_mode()
    def tally(self, rows: Sequence[LabelledRow], candidate: Candidate) -> list[RowTally]:
        """One tally per row of `rows`, which may have other anchors than those of the probe."""
        drafter = self.model(candidate)
        return [tally_row(self._target, [drafter], self._tapped(row, candidate))[0] for row in rows]

    def figures(self, candidate: Candidate) -> CandidateFigures:
        """Accept length with its interval, and position-wise acceptance."""
        tallies = self.tallies(candidate)
        anchors, emitted = anchors_and_emitted(tallies)
        return CandidateFigures(
            name=candidate.name,
            accept_length=float(emitted.sum() / anchors.sum()),
            ci95=ratio_interval(emitted, anchors, self._weights),
            position_acceptance=position_acceptance(add_tallies(tallies)),
        )

    def gain(self, candidate: Candidate, base: Candidate, level: float = 0.95) -> Gain:
        """How many tokens more per step the candidate accepts than the base on the same anchors."""
        ours, theirs = self.tallies(candidate), self.tallies(base)
        anchors, emitted = anchors_and_emitted(ours)
        longer = emitted - anchors_and_emitted(theirs)[1]
        likelier = _surprise(theirs) - _surprise(ours)
        return Gain(
            value=float(longer.sum() / anchors.sum()),
            interval=ratio_interval(longer, anchors, self._weights, level),
            nats=float(likelier.sum() / anchors.sum()),
            nats_interval=ratio_interval(likelier, anchors, self._weights, level),
            level=level,
        )

    def _tapped(self, row: LabelledRow, candidate: Candidate) -> LabelledRow:
        return row.with_layers(tap_layer_indices(candidate.config))


def _surprise(tallies: Sequence[RowTally]) -> NDArray[np.float64]:
    """-ln p at the labels, summed over the positions and anchors of each row, `(rows,)`."""
    return np.array([tally.label_nats.sum() for tally in tallies])

"""`--tune`: a short gradient pass over the scales and norms of a quantized drafter, its trellises fixed.

Why. Each tensor was quantized on its own, its scales fitted to its own outputs. What the errors of all tensors together
do to the drafts is seen only at the end of the drafter, and a few thousand scales can take part of it back. The file
stays an ordinary EXL3 file of the same size.

How. The usable calibration rows are dealt by prompt: one part in eight is only watched (stopping rows), the others give
gradients (Adam, a cosine from the learning rate to zero, a few rows per step, fresh anchors in every epoch; the loss is
that of `conversion.tuning_loss`). After each epoch the scales are rounded as they will be stored and measured on the
stopping rows; the best such state is the result. Where none is better than the untuned one there, in loss and not worse
in accept length, the untuned state is kept, and `TuningFacts.kept` says so.

Memory: two drafters in FP32, and the target's features of as many rows as fit in `FEATURE_BYTES`; the target runs again
over the others in every epoch. Deterministic for the same rows, seed and number of threads.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from exl3_dflash.calibration.anchors import sample_anchors
from exl3_dflash.calibration.rowset import TokenRow
from exl3_dflash.conversion.tunable import State, TunableDrafter, TunedTensors
from exl3_dflash.conversion.tuning_loss import LossSums, TeacherRow, TuningLoss
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.drafter.taps import tap_layer_indices
from exl3_dflash.progress import Reporter
from exl3_dflash.target.base import Target
from quantize.linear import QuantizedLinear

STOPPING_PART = 8  # one prompt in this many is only watched
LEAST_PROMPTS = 4  # fewer give no honest stopping rows
FEATURE_BYTES = 2 << 30
WARMUP_STEPS = 5
BETAS = (0.9, 0.99)


@dataclass(frozen=True)
class TuningSettings:
    """How long and how fast; the defaults are measured (docs/tuning.md).

    Attributes:
        epochs: passes over the gradient rows.
        learning_rate: of the factors of scales and norms, at its highest.
        rows_per_step: rows whose gradients make a step.
        anchors_per_row: blocks drawn per row and epoch.
        divergence_weight: of the divergence from the unquantized drafter, per nat, against a lost token.
        seed: of the dealing, the order and the anchors.
    """

    epochs: int = 10
    learning_rate: float = 1e-2
    rows_per_step: int = 4
    anchors_per_row: int = 32
    divergence_weight: float = 0.3
    seed: int = 0


@dataclass(frozen=True)
class TuningFacts:
    """What tuning did, for the report.

    Attributes:
        kept: whether the tuned state is better on the stopping rows than the untuned one, and was taken.
        reason: why it was not; empty otherwise.
        parameters: scales and norm weights that were trained.
        rows, stopping_rows: rows that gave gradients, and rows that were only watched.
        epochs, steps: that were run.
        best_epoch: whose state is the best on the stopping rows; 0 is the untuned state.
        loss_before, loss_after: per anchor on the stopping rows (`tuning_loss`), untuned and in the best epoch.
        accept_length_before, accept_length_after: likewise.
    """

    kept: bool
    reason: str
    parameters: int
    rows: int
    stopping_rows: int
    epochs: int
    steps: int
    best_epoch: int
    loss_before: float
    loss_after: float
    accept_length_before: float
    accept_length_after: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class TuningResult:
    """Tuned tensors, None where the untuned state is kept, and the facts."""

    tensors: TunedTensors | None
    facts: TuningFacts


def tune(
    checkpoint: DrafterCheckpoint,
    quantized: Mapping[str, QuantizedLinear],
    teacher: DrafterModel,
    target: Target,
    rows: Sequence[TokenRow],
    settings: TuningSettings,
    reporter: Reporter,
) -> TuningResult:
    """Tune scales and norms of a quantized drafter.

    Args:
        checkpoint: the unquantized drafter.
        quantized: its quantized linears by name.
        teacher: the unquantized drafter, loaded.
        target: its target.
        rows: calibration rows; none of them may be a row on which the result is reported.
        settings: how long and how fast.
        reporter: progress.
    """
    tunable = TunableDrafter(checkpoint, quantized, teacher.device)
    loss = TuningLoss(tunable.model, teacher, target, settings.divergence_weight)
    gradient_rows, stopping_rows = deal_rows(rows, teacher.config.block_size, settings.seed)
    if not stopping_rows:
        reason = f"{len(gradient_rows)} usable rows of fewer than {LEAST_PROMPTS} prompts"
        return TuningResult(None, _facts(tunable, reason, (len(gradient_rows), 0)))
    features = _Features(target, tap_layer_indices(teacher.config))
    run = _Run(tunable, loss, features, gradient_rows, stopping_rows, settings)
    with reporter.bar("tune", settings.epochs * len(gradient_rows), "row") as advance:
        for epoch in range(1, settings.epochs + 1):
            for _ in run.train_epoch():
                advance(1)
            run.judge(epoch)
    return run.result()


def deal_rows(rows: Sequence[TokenRow], block_size: int, seed: int) -> tuple[list[TokenRow], list[TokenRow]]:
    """Rows that give gradients and rows that are only watched; all rows of one prompt are on one side.

    Rows without a labelled anchor are left out. With fewer than `LEAST_PROMPTS` prompts nothing is watched.
    """
    prompts: dict[tuple[int, ...], list[TokenRow]] = {}
    for row in rows:
        if len(row.ids) > max(row.prompt_length, 1) + block_size:
            prompts.setdefault(tuple(row.ids[: row.prompt_length or None].tolist()), []).append(row)
    groups = list(prompts.values())
    random.Random(seed).shuffle(groups)
    watched = max(1, len(groups) // STOPPING_PART) if len(groups) >= LEAST_PROMPTS else 0
    return [r for group in groups[watched:] for r in group], [r for group in groups[:watched] for r in group]


class _Features:
    """The target's features and greedy tokens of rows, kept up to `FEATURE_BYTES`."""

    def __init__(self, target: Target, tap_ids: tuple[int, ...]) -> None:
        self._target = target
        self._tap_ids = tap_ids
        self._kept: dict[int, TeacherRow | None] = {}
        self._bytes = 0

    def get(self, row: TokenRow) -> TeacherRow | None:
        """The row with what the target makes of it; None where that is not finite."""
        if id(row) in self._kept:
            return self._kept[id(row)]
        output = self._target.tap_rows(row.ids, self._tap_ids, want_logits=True)
        assert output.logits is not None
        made = None
        if torch.isfinite(output.taps).all():
            made = TeacherRow(row, output.taps, output.logits.argmax(-1).cpu())
        if self._bytes + output.taps.nbytes <= FEATURE_BYTES:
            self._kept[id(row)] = made
            self._bytes += output.taps.nbytes
        return made

    def all(self, rows: Sequence[TokenRow]) -> Iterator[TeacherRow]:
        """Every usable row."""
        for row in rows:
            made = self.get(row)
            if made is not None:
                yield made


class _Run:
    """One run of gradient descent and the best state seen."""

    def __init__(
        self,
        tunable: TunableDrafter,
        loss: TuningLoss,
        features: _Features,
        rows: list[TokenRow],
        stopping_rows: list[TokenRow],
        settings: TuningSettings,
    ) -> None:
        self._tunable, self._loss, self._features = tunable, loss, features
        self._rows, self._stopping_rows = rows, stopping_rows
        self._settings = settings
        self._generator = torch.Generator().manual_seed(settings.seed)
        self._optimizer = torch.optim.Adam(tunable.factors.values(), lr=settings.learning_rate, betas=BETAS)
        self._steps, self._epochs, self._best_epoch = 0, 0, 0
        self._best: State = tunable.state()
        tunable.rounded()
        self._before = self._after = loss.measure(features.all(stopping_rows))

    def train_epoch(self) -> Iterator[TokenRow]:
        """Pass over the gradient rows once; yields each row when it is done."""
        order = torch.randperm(len(self._rows), generator=self._generator).tolist()
        for batch in torch.tensor(order).split(self._settings.rows_per_step):
            chosen = [self._rows[index] for index in batch.tolist()]
            self._step(list(self._features.all(chosen)))
            yield from chosen
        self._epochs += 1

    def _step(self, rows: Sequence[TeacherRow]) -> None:
        """One step of the optimizer on the mean loss per anchor of `rows`."""
        drawn = [self._draw(row.row) for row in rows]
        total = sum(map(len, drawn))
        if not total:
            return
        self._tunable.apply()
        for row, anchors in zip(rows, drawn, strict=True):
            self._loss.backward(row, anchors, 1.0 / total, LossSums())
        self._tunable.collect()
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate()
        self._optimizer.step()
        self._steps += 1

    def _draw(self, row: TokenRow) -> torch.Tensor:
        return sample_anchors(len(row.ids), row.prompt_length, 1, self._settings.anchors_per_row, self._generator)

    def _learning_rate(self) -> float:
        """A short rise, then a cosine to zero at the end of the last epoch."""
        steps = self._settings.epochs * -(-len(self._rows) // self._settings.rows_per_step)
        rise = min(1.0, (self._steps + 1) / WARMUP_STEPS)
        return self._settings.learning_rate * rise * 0.5 * (1.0 + math.cos(math.pi * self._steps / steps))

    def judge(self, epoch: int) -> None:
        """Measure the state as it would be stored; keep it if it is the best so far."""
        self._tunable.rounded()
        now = self._loss.measure(self._features.all(self._stopping_rows))
        better = now.mean < self._after.mean and now.accept_length >= self._before.accept_length
        if better and math.isfinite(now.mean):
            self._best, self._best_epoch, self._after = self._tunable.state(), epoch, now

    def result(self) -> TuningResult:
        """The best state."""
        counts = (len(self._rows), len(self._stopping_rows), self._epochs, self._steps, self._best_epoch)
        measured = (self._before, self._after)
        if self._best_epoch == 0:
            reason = "no epoch was better than the untuned state on the stopping rows"
            return TuningResult(None, _facts(self._tunable, reason, counts, measured))
        self._tunable.restore(self._best)
        return TuningResult(self._tunable.rounded(), _facts(self._tunable, "", counts, measured))


def _facts(
    tunable: TunableDrafter,
    reason: str,
    counts: tuple[int, ...],
    measured: tuple[LossSums, LossSums] = (LossSums(), LossSums()),
) -> TuningFacts:
    rows, stopping_rows, epochs, steps, best_epoch = (*counts, 0, 0, 0)[:5]
    before, after = measured
    return TuningFacts(
        kept=not reason,
        reason=reason,
        parameters=sum(factor.numel() for factor in tunable.factors.values()),
        rows=rows,
        stopping_rows=stopping_rows,
        epochs=epochs,
        steps=steps,
        best_epoch=best_epoch,
        loss_before=before.mean,
        loss_after=after.mean,
        accept_length_before=before.accept_length,
        accept_length_after=after.accept_length,
    )

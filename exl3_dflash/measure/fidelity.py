"""Teacher-forced fidelity: how well drafters predict their target, anchor by anchor, without generating.

Over token rows that the target wrote, every anchor `a` gives one block. Draft token k (k = 1..B-1) is right if it
equals the target's greedy token after the true prefix `ids[:a+k]`. Definitions:

- accept length: leading right draft tokens + 1 (the target's own token), mean over anchors.
- position acceptance a_k: share of anchors where draft k is right among those where 1..k-1 are.
- retention: accept length over the reference drafter's on the same anchors.
- top-1 agreement and KL(reference || drafter): draft against the reference drafter's draft, mean over all positions.

All drafters see the same anchors and the same target pass; intervals are 95 % bootstraps over rows
(`exl3_dflash.measure.statistics`). Memory is bounded by one row: logits exist for a chunk of anchors at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from exl3_dflash.calibration.anchors import sample_anchors
from exl3_dflash.calibration.rowset import TokenRow
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.drafter.taps import tap_layer_indices
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.measure.statistics import Interval, ratio_interval, resample_weights
from exl3_dflash.target.base import Target

LOGIT_CHUNK_ELEMENTS = 1 << 26  # 256 MiB of FP32 logits at a time


@dataclass(frozen=True)
class LabelledRow:
    """One held-out row with everything a drafter is measured against.

    Attributes:
        ids: int64 `(S,)`.
        taps: `(S, K * Ht)` as the drafter's `fc` takes them.
        greedy: int64 `(S,)`, the target's greedy token after `ids[: i + 1]`.
        anchors: int64 `(N,)`.
    """

    ids: torch.Tensor
    taps: torch.Tensor
    greedy: torch.Tensor
    anchors: torch.Tensor


@dataclass(frozen=True)
class RowTally:
    """Sums of one drafter over one row's anchors; arrays are per draft position `(B - 1,)`."""

    anchors: int
    emitted: float
    reached: NDArray[np.float64]
    accepted: NDArray[np.float64]
    agreed: NDArray[np.float64]
    divergence: NDArray[np.float64]


@dataclass(frozen=True)
class DrafterFidelity:
    """Figures of one drafter (definitions in the module's docstring)."""

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


@torch.inference_mode()
def measure_fidelity(
    target: Target,
    drafters: Mapping[str, DrafterModel],
    rows: Iterable[TokenRow],
    *,
    anchors_per_row: int | None = None,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> FidelityResult:
    """Measure drafters of one target on the same anchors.

    Args:
        target: the target.
        drafters: by name; the first is the reference of retention, agreement and KL. All share block size and taps.
        rows: rows that the target wrote.
        anchors_per_row: anchors drawn per row; None means every position with a whole block of labels.
        seed: of the anchor choice.
        progress: called after each row.

    Raises:
        Exl3DflashError: no row is long enough for a block, or the drafters do not share block size and taps.
    """
    config = _common_config(drafters)
    generator = torch.Generator().manual_seed(seed)
    tallies: dict[str, list[RowTally]] = {name: [] for name in drafters}
    dropped = 0
    for row in rows:
        anchors = sample_anchors(len(row.ids), row.prompt_length, config.block_size - 1, anchors_per_row, generator)
        if len(anchors):
            labelled = label_row(target, row, tap_layer_indices(config), anchors)
            if labelled is None:
                dropped += 1
            else:
                for name, tally in zip(drafters, tally_row(target, list(drafters.values()), labelled), strict=True):
                    tallies[name].append(tally)
        progress()
    if not next(iter(tallies.values())):
        raise Exl3DflashError(
            "no held-out row can be measured",
            expected=f"rows with at least {config.block_size} tokens written by the target and finite features",
            fix="give longer or more rows",
        )
    return _summarize(tallies, dropped, config.block_size)


def _common_config(drafters: Mapping[str, DrafterModel]) -> Any:
    first, *others = (drafter.config for drafter in drafters.values())
    for name, config in zip(list(drafters)[1:], others, strict=True):
        if config.block_size != first.block_size or tap_layer_indices(config) != tap_layer_indices(first):
            raise Exl3DflashError(
                f"drafter {name} has block size {config.block_size} and taps {config.target_layer_ids}",
                expected=f"those of the first drafter, {first.block_size} and {first.target_layer_ids}",
                fix="compare drafters of one family",
            )
    return first


def label_row(target: Target, row: TokenRow, tap_ids: tuple[int, ...], anchors: torch.Tensor) -> LabelledRow | None:
    """Run the target over one row; None if its features or logits are not finite."""
    ids = torch.as_tensor(row.ids, dtype=torch.int64)
    output = target.tap_rows(ids, tap_ids, want_logits=True)
    assert output.logits is not None
    if not (torch.isfinite(output.taps).all() and torch.isfinite(output.logits).all()):
        return None
    return LabelledRow(ids.to(target.device), output.taps, output.logits.argmax(-1), anchors)


def tally_row(target: Target, drafters: list[DrafterModel], row: LabelledRow) -> list[RowTally]:
    """Sums of every drafter over one row's anchors."""
    block_size = drafters[0].config.block_size
    anchor_ids = row.ids[row.anchors.to(row.ids.device)]
    hidden = [
        drafter.forward_anchors(row.taps, drafter.block_embeddings(target, anchor_ids), row.anchors)[:, 1:]
        for drafter in drafters
    ]  # each (N, B - 1, H)
    steps = torch.arange(block_size - 1)
    labels = row.greedy[(row.anchors[:, None] + steps).to(row.greedy.device)]  # (N, B - 1)
    parts: list[list[RowTally]] = [[] for _ in drafters]
    chunk = max(1, LOGIT_CHUNK_ELEMENTS // ((block_size - 1) * target.facts.head_size))
    for chosen in torch.arange(len(labels)).split(chunk):
        reference: torch.Tensor | None = None
        for index, drafter in enumerate(drafters):
            log_probs = drafter.logits(target, hidden[index][chosen]).float().log_softmax(-1)  # (n, B - 1, V)
            reference = log_probs if reference is None else reference
            parts[index].append(_tally_chunk(log_probs, reference, labels[chosen.to(labels.device)]))
    return [_add(tallies) for tallies in parts]


def _tally_chunk(log_probs: torch.Tensor, reference: torch.Tensor, labels: torch.Tensor) -> RowTally:
    drafts = log_probs.argmax(-1)  # (n, B - 1)
    accepted = (drafts == labels).long().cumprod(-1)
    reached = torch.cat([torch.ones_like(accepted[:, :1]), accepted[:, :-1]], dim=-1)
    divergence = (reference.exp() * (reference - log_probs)).nan_to_num(0.0).sum(-1)

    def total(values: torch.Tensor) -> NDArray[np.float64]:
        return values.double().sum(0).cpu().numpy()

    return RowTally(
        anchors=len(labels),
        emitted=float(accepted.sum().item() + len(labels)),
        reached=total(reached),
        accepted=total(accepted),
        agreed=total(drafts == reference.argmax(-1)),
        divergence=total(divergence),
    )


def _add(tallies: list[RowTally]) -> RowTally:
    return RowTally(
        anchors=sum(tally.anchors for tally in tallies),
        emitted=sum(tally.emitted for tally in tallies),
        reached=np.sum([tally.reached for tally in tallies], axis=0),
        accepted=np.sum([tally.accepted for tally in tallies], axis=0),
        agreed=np.sum([tally.agreed for tally in tallies], axis=0),
        divergence=np.sum([tally.divergence for tally in tallies], axis=0),
    )


def _summarize(tallies: Mapping[str, list[RowTally]], dropped: int, block_size: int) -> FidelityResult:
    reference = next(iter(tallies.values()))
    weights = resample_weights(len(reference))
    anchors = np.array([tally.anchors for tally in reference], dtype=np.float64)
    reference_emitted = np.array([tally.emitted for tally in reference])
    drafters = []
    for name, rows in tallies.items():
        emitted = np.array([tally.emitted for tally in rows])
        total = _add(rows)
        agreed = np.array([tally.agreed.mean() for tally in rows])
        drafters.append(
            DrafterFidelity(
                name=name,
                accept_length=total.emitted / total.anchors,
                ci95=ratio_interval(emitted, anchors, weights),
                retention=float(emitted.sum() / reference_emitted.sum()),
                retention_ci95=ratio_interval(emitted, reference_emitted, weights),
                position_acceptance=[
                    float(accepted / reached) if reached else 0.0
                    for accepted, reached in zip(total.accepted, total.reached, strict=True)
                ],
                top1_agreement=float(agreed.sum() / anchors.sum()),
                top1_agreement_ci95=ratio_interval(agreed, anchors, weights),
                kl=float(total.divergence.mean() / total.anchors),
            )
        )
    return FidelityResult(drafters, int(anchors.sum()), len(reference), dropped, block_size)

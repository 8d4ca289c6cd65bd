"""Teacher-forced fidelity: how well drafters predict their target, anchor by anchor, without generating.

Over token rows that the target wrote, every anchor `a` gives one block. Draft token k (k = 1..B-1) is right if it
equals the target's greedy token after the true prefix `ids[:a+k]`. Definitions:

- accept length: leading right draft tokens + 1 (the target's own token), mean over anchors.
- position acceptance a_k: share of anchors where draft k is right among those where 1..k-1 are.
- retention: accept length over the reference drafter's on the same anchors.
- top-1 agreement: share of all positions where the drafter proposes what the reference drafter proposes.
- KL(reference || drafter): of the two distributions over the drafter's vocabulary, mean over all positions.

A DFlash 2 drafter is judged by what its selector proposes; KL alone looks at the logits before the selector, since a
greedy path has no distribution.

All drafters see the same anchors and the same target pass, each with its own taps; intervals are 95 % bootstraps over
rows (`exl3_dflash.measure.statistics`). Memory is bounded by one row: logits exist for a chunk of anchors at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from exl3_dflash.calibration.anchors import sample_anchors
from exl3_dflash.calibration.rowset import TokenRow
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.drafter.selector import Proposal
from exl3_dflash.drafter.taps import tap_layer_indices
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.measure.tallies import (
    DrafterFidelity,
    FidelityResult,
    RowTally,
    TallyTable,
    add_tallies,
    summarize,
)
from exl3_dflash.target.base import Target

__all__ = [
    "DrafterFidelity",
    "FidelityResult",
    "LabelledRow",
    "label_row",
    "measure_fidelity",
    "tally_row",
    "tally_rows",
]

LOGIT_CHUNK_ELEMENTS = 1 << 26  # 256 MiB of FP32 logits at a time


@dataclass(frozen=True)
class LabelledRow:
    """One held-out row with everything a drafter is measured against.

    Attributes:
        ids: int64 `(S,)`.
        taps: `(S, K * Ht)`, the outputs of `layers` side by side.
        greedy: int64 `(S,)`, the target's greedy token after `ids[: i + 1]`.
        anchors: int64 `(N,)`.
        layers: target layers in `taps`, in their order there.
    """

    ids: torch.Tensor
    taps: torch.Tensor
    greedy: torch.Tensor
    anchors: torch.Tensor
    layers: tuple[int, ...]

    def with_layers(self, layers: tuple[int, ...]) -> LabelledRow:
        """The same row with the taps of `layers`, all of which must be there."""
        if layers == self.layers:
            return self
        width = self.taps.shape[1] // len(self.layers)
        parts = [self.taps[:, index * width : (index + 1) * width] for index in map(self.layers.index, layers)]
        return replace(self, taps=torch.cat(parts, dim=1), layers=layers)


def measure_fidelity(
    target: Target,
    drafters: Mapping[str, DrafterModel],
    rows: Iterable[TokenRow],
    *,
    anchors_per_row: int | None = None,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> FidelityResult:
    """Measure drafters of one target on the same anchors: `tally_rows`, summarized over all rows."""
    table = tally_rows(target, drafters, rows, anchors_per_row=anchors_per_row, seed=seed, progress=progress)
    return summarize(table)


@torch.inference_mode()
def tally_rows(
    target: Target,
    drafters: Mapping[str, DrafterModel],
    rows: Iterable[TokenRow],
    *,
    anchors_per_row: int | None = None,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> TallyTable:
    """What every drafter got right on the same anchors, row by row.

    Args:
        target: the target.
        drafters: by name; the first is the reference of retention, agreement and KL. All share the block size.
        rows: rows that the target wrote.
        anchors_per_row: anchors drawn per row; None means every position with a whole block of labels.
        seed: of the anchor choice.
        progress: called after each row.

    Raises:
        Exl3DflashError: no row is long enough for a block, or the drafters do not share the block size.
    """
    block_size = _common_block_size(drafters)
    layers = all_layers([tap_layer_indices(drafter.config) for drafter in drafters.values()])
    generator = torch.Generator().manual_seed(seed)
    kept: list[TokenRow] = []
    tallies: dict[str, list[RowTally]] = {name: [] for name in drafters}
    dropped = 0
    for row in rows:
        anchors = sample_anchors(len(row.ids), row.prompt_length, block_size - 1, anchors_per_row, generator)
        if len(anchors):
            labelled = label_row(target, row, layers, anchors)
            if labelled is None:
                dropped += 1
            else:
                kept.append(row)
                for name, tally in zip(drafters, tally_row(target, list(drafters.values()), labelled), strict=True):
                    tallies[name].append(tally)
        progress()
    if not kept:
        raise no_usable_rows(block_size)
    return TallyTable(tuple(kept), tallies, dropped, block_size)


def no_usable_rows(block_size: int) -> Exl3DflashError:
    """The error for rows of which none can be measured."""
    return Exl3DflashError(
        "none of the rows can be measured",
        expected=f"rows with at least {block_size} tokens written by the target and finite features",
        fix="give longer or more rows",
    )


def all_layers(choices: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Every layer of several tap lists once, the first list's order first."""
    return tuple(dict.fromkeys(layer for layers in choices for layer in layers))


def _common_block_size(drafters: Mapping[str, DrafterModel]) -> int:
    sizes = {name: drafter.config.block_size for name, drafter in drafters.items()}
    first = next(iter(sizes.values()))
    for name, size in sizes.items():
        if size != first:
            raise Exl3DflashError(
                f"drafter {name} has block size {size}",
                expected=f"that of the first drafter, {first}",
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
    return LabelledRow(ids.to(target.device), output.taps, output.logits.argmax(-1), anchors, tap_ids)


def tally_row(target: Target, drafters: list[DrafterModel], row: LabelledRow) -> list[RowTally]:
    """Sums of every drafter over one row's anchors."""
    block_size = drafters[0].config.block_size
    anchor_ids = row.ids[row.anchors.to(row.ids.device)]
    hidden = [
        drafter.forward_anchors(
            row.with_layers(tap_layer_indices(drafter.config)).taps,
            drafter.block_embeddings(target, anchor_ids),
            row.anchors,
        )[:, 1:]
        for drafter in drafters
    ]  # each (N, B - 1, H)
    steps = torch.arange(block_size - 1)
    labels = row.greedy[(row.anchors[:, None] + steps).to(row.greedy.device)]  # (N, B - 1)
    parts: list[list[RowTally]] = [[] for _ in drafters]
    chunk = max(1, LOGIT_CHUNK_ELEMENTS // ((block_size - 1) * target.facts.head_size))
    for chosen in torch.arange(len(labels)).split(chunk):
        reference: Proposal | None = None
        for index, drafter in enumerate(drafters):
            anchors = anchor_ids[chosen.to(anchor_ids.device)]
            ids, logits, token_ids = drafter.propose(target, anchors, hidden[index][chosen])
            proposal = Proposal(ids.to(labels.device), logits.float().log_softmax(-1), token_ids)  # (n, B - 1[, D])
            reference = proposal if reference is None else reference
            parts[index].append(_tally_chunk(proposal, reference, labels[chosen.to(labels.device)]))
    return [add_tallies(tallies) for tallies in parts]


def _tally_chunk(proposal: Proposal, reference: Proposal, labels: torch.Tensor) -> RowTally:
    """Sums over labels (n, B - 1); the proposals' logits are log-probabilities here."""
    accepted = (proposal.ids == labels).long().cumprod(-1)
    reached = torch.cat([torch.ones_like(accepted[:, :1]), accepted[:, :-1]], dim=-1)
    divergence = (reference.logits.exp() * (reference.logits - proposal.logits)).nan_to_num(0.0).sum(-1)

    def total(values: torch.Tensor) -> NDArray[np.float64]:
        return values.double().sum(0).cpu().numpy()

    return RowTally(
        anchors=len(labels),
        emitted=float(accepted.sum().item() + len(labels)),
        reached=total(reached),
        accepted=total(accepted),
        agreed=total(proposal.ids == reference.ids),
        divergence=total(divergence),
        label_nats=total(_label_nats(proposal, labels)),
    )


def _label_nats(proposal: Proposal, labels: torch.Tensor) -> torch.Tensor:
    """-ln p at labels (n, B - 1); 0 at tokens that are not in the drafter's vocabulary, whatever its settings."""
    columns = proposal.columns(labels)
    nats = -proposal.logits.gather(-1, columns.clamp(min=0).to(proposal.logits.device)[..., None])[..., 0]
    return nats.nan_to_num(0.0).masked_fill(columns.to(nats.device) < 0, 0.0)

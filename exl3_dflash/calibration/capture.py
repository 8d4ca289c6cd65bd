"""What each linear layer of a drafter really receives, as one Hessian per distinct input.

For every calibration row the target yields its taps, anchors are sampled, and one many-anchors forward of the drafter
feeds the accumulators; nothing but the Hessians (FP32, features x features) outlives a row, so a pass can stop and go
on between any two rows (`calibration.state`). With `fisher` the same forward is followed by backward passes that give
the output side (`calibration.fisher`).

k_proj and v_proj read two streams: the context (each token once) and the block (B rows for each verify step). At run
time a step advances by the accept length tau, so per token they occur as 1 : B / tau; their Hessian is that mixture of
the two streams' means (DFlash calibration layout). All other linears read one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from exl3_dflash.calibration.anchors import sample_anchors
from exl3_dflash.calibration.fisher import FisherCapture, FisherSettings, OutputHessians
from exl3_dflash.calibration.rowset import TokenRow
from exl3_dflash.calibration.state import PassState, StateStore, pack_sums, unpack_sums
from exl3_dflash.drafter.checkpoint import LinearSpec
from exl3_dflash.drafter.layout import output_linears
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.drafter.modules import BLOCK, CONTEXT
from exl3_dflash.drafter.taps import tap_layer_indices
from exl3_dflash.target.base import TapRows, Target
from quantize.hessian import Hessian, HessianAccumulator


class HessianCapture:
    """Accumulates the inputs of a drafter's linears, by input group and stream.

    Args:
        linears: the drafter's linears; those of one group share an input, which is accumulated once.
        device: where the Hessians are kept.
    """

    def __init__(self, linears: Iterable[LinearSpec], device: torch.device | str = "cpu") -> None:
        self._device = device
        self._group_of_leader: dict[str, str] = {}
        self._features: dict[str, int] = {}
        for linear in linears:
            if linear.group not in self._features:
                self._features[linear.group] = linear.in_features
                self._group_of_leader[linear.name] = linear.group
        self._streams: dict[tuple[str, str], HessianAccumulator] = {}

    def __call__(self, name: str, stream: str, inputs: torch.Tensor) -> None:
        """Add `inputs (..., in_features)` of linear `name`; callback of `DrafterModel.observe`."""
        group = self._group_of_leader.get(name)
        if group is None:
            return
        key = (group, stream)
        if key not in self._streams:
            self._streams[key] = HessianAccumulator(self._features[group], self._device)
        self._streams[key].add(inputs)

    def state(self) -> PassState:
        """Everything summed so far."""
        return pack_sums("inputs", {f"{group}.{stream}": sums for (group, stream), sums in self._streams.items()})

    def restore(self, state: PassState) -> None:
        """Go on from what `state` gave."""
        streams = unpack_sums("inputs", state, self._device)
        self._streams = {(name.rpartition(".")[0], name.rpartition(".")[2]): sums for name, sums in streams.items()}

    def finish(self, block_weight: float) -> dict[str, Hessian]:
        """One Hessian per group.

        Args:
            block_weight: weight of the block stream's mean where a group has both streams, against 1 for the
                context's: block_size / accept_length.
        """
        hessians: dict[str, Hessian] = {}
        for group in self._features:
            parts = {s: self._streams.pop((group, s)).finish() for s in (CONTEXT, BLOCK) if (group, s) in self._streams}
            if len(parts) == 2:
                hessians[group] = mix_streams(parts[CONTEXT], parts[BLOCK], block_weight)
            elif parts:
                hessians[group] = next(iter(parts.values()))
        return hessians


def mix_streams(context: Hessian, block: Hessian, block_weight: float) -> Hessian:
    """Weighted mean of two streams' Hessians: `(context + w * block) / (1 + w)`; an empty stream is left out."""
    if context.count == 0:
        return block
    if block.count == 0:
        return context
    matrix = (context.matrix + block_weight * block.matrix) / (1.0 + block_weight)
    return Hessian(
        matrix=matrix,
        count=context.count + block.count,
        rows=context.rows + block.rows,
        dropped_rows=context.dropped_rows + block.dropped_rows,
    )


@dataclass(frozen=True)
class Calibration:
    """What calibration saw.

    Attributes:
        hessians: by input group (see `LinearSpec.group`).
        rows, tokens, anchors: token rows used, their tokens, and drafted blocks.
        dropped_rows: token rows left out because the target's features were not finite.
        dropped_inputs: single input vectors of linears left out for the same reason, summed over groups.
        output_hessians: by linear name, empty for one-sided calibration.
        dropped_gradients: gradient rows left out because they were not finite, summed over linears.
    """

    hessians: dict[str, Hessian]
    rows: int
    tokens: int
    anchors: int
    dropped_rows: int
    dropped_inputs: int
    output_hessians: OutputHessians = field(default_factory=lambda: OutputHessians({}))
    dropped_gradients: int = 0


@torch.no_grad()
def calibrate(
    drafter: DrafterModel,
    linears: Iterable[LinearSpec],
    target: Target,
    rows: Iterable[TokenRow],
    *,
    accept_length: float,
    anchors_per_row: int | None = None,
    fisher: FisherSettings | None = None,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
    store: StateStore | None = None,
) -> Calibration:
    """Run the drafter as it runs in generation and collect its linear inputs.

    Args:
        drafter: the unquantized drafter.
        linears: its linears (`DrafterCheckpoint.linears`).
        target: the target it was trained for.
        rows: calibration rows.
        accept_length: mean tokens per verify step, for the mixture of k/v streams.
        anchors_per_row: blocks per row; by default as many block rows as context rows (length / block_size).
        fisher: also collect output-side Hessians; None for one-sided calibration.
        seed: of the anchor choice, and of the labels drawn for the output side.
        progress: called after each row.
        store: where the pass is kept while it runs and from where it goes on, with the same result; it must belong to
            this drafter, target and seed, to these rows and to this `fisher`.
    """
    calibration = _Pass(drafter, tuple(linears), target, anchors_per_row, fisher, seed)
    stored = store.load() if store is not None else None
    if stored is not None:
        calibration.restore(stored)
    finished = calibration.seen["rows_done"]
    for number, row in enumerate(rows):
        if number >= finished:
            calibration.add_row(row)
            if store is not None:
                store.keep(calibration.state, last=False)
        progress()
    if store is not None and calibration.seen["rows_done"] > finished:
        store.keep(calibration.state, last=True)
    return calibration.finish(accept_length)


class _Pass:
    """The accumulators of one pass over the rows; `seen` counts what `Calibration` reports, and rows of any kind."""

    def __init__(
        self,
        drafter: DrafterModel,
        linears: tuple[LinearSpec, ...],
        target: Target,
        anchors_per_row: int | None,
        fisher: FisherSettings | None,
        seed: int,
    ) -> None:
        self._drafter = drafter
        self._target = target
        self._anchors_per_row = anchors_per_row
        self._anchor_generator = torch.Generator().manual_seed(seed)
        self._inputs = HessianCapture(linears, target.device)
        inner = [linear for linear in linears if linear.name not in output_linears(drafter.config, has_head=True)]
        self._outputs = None if fisher is None else FisherCapture(inner, target.device, fisher, seed)
        self.seen = dict.fromkeys(("rows_done", "rows", "tokens", "anchors", "dropped_rows"), 0)

    def add_row(self, row: TokenRow) -> None:
        """Run one row past the accumulators."""
        config = self._drafter.config
        ids = torch.as_tensor(row.ids, dtype=torch.int64)
        count = self._anchors_per_row or max(1, len(ids) // config.block_size)
        anchors = sample_anchors(len(ids), row.prompt_length, 1, count, self._anchor_generator)
        features = self._target.tap_rows(ids, tap_layer_indices(config), want_logits=self._outputs is not None)
        self.seen["rows_done"] += 1
        if not torch.isfinite(features.taps).all():
            self.seen["dropped_rows"] += 1
        elif len(anchors):
            hidden = _run_row(self._drafter, self._target, features, ids[anchors], anchors, self._inputs, self._outputs)
            for name in output_linears(config, self._drafter.lm_head is not None):
                self._inputs(name, BLOCK, hidden[:, 1:])  # what they would read, without the head's (large) output
            for count_of, more in (("rows", 1), ("tokens", len(ids)), ("anchors", len(anchors))):
                self.seen[count_of] += more

    def state(self) -> PassState:
        """The pass after the rows added so far."""
        parts = [self._inputs.state()] + ([self._outputs.state()] if self._outputs is not None else [])
        tensors = {"random.anchors": self._anchor_generator.get_state()}
        facts: dict[str, Any] = {"seen": dict(self.seen)}
        for part in parts:
            tensors |= part.tensors
            facts |= part.facts
        return PassState(tensors, facts)

    def restore(self, state: PassState) -> None:
        """Go on from what `state` gave."""
        self._inputs.restore(state)
        if self._outputs is not None:
            self._outputs.restore(state)
        self._anchor_generator.set_state(state.tensors["random.anchors"])
        self.seen = dict(state.facts["seen"])

    def finish(self, accept_length: float) -> Calibration:
        """What the pass saw; it cannot go on afterwards."""
        hessians = self._inputs.finish(self._drafter.config.block_size / max(accept_length, 1.0))
        outputs = self._outputs.finish() if self._outputs is not None else OutputHessians({})
        counts = {name: count for name, count in self.seen.items() if name != "rows_done"}
        return Calibration(
            hessians,
            **counts,
            dropped_inputs=sum(hessian.dropped_rows for hessian in hessians.values()),
            output_hessians=outputs,
            dropped_gradients=outputs.dropped_rows,
        )


def _run_row(
    drafter: DrafterModel,
    target: Target,
    features: TapRows,
    anchor_ids: torch.Tensor,
    anchors: torch.Tensor,
    capture: HessianCapture,
    outputs: FisherCapture | None,
) -> torch.Tensor:
    """One row's blocks past the accumulators; returns the final hidden states (N, B, H) in any order."""
    if outputs is None:
        with drafter.observe(capture):
            return drafter.forward_anchors(features.taps, drafter.block_embeddings(target, anchor_ids), anchors)
    assert features.logits is not None
    greedy = features.logits.argmax(-1)
    return outputs.run_row(drafter, target, features.taps, greedy, anchor_ids, anchors, capture)

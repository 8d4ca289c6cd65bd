"""One drafter quantized in many ways, all compared on the same held-out anchors.

A variant is a bit rate and a method; the unquantized drafter is the reference. Methods:

- `uncalibrated`: no Hessian, no error feedback; what ExLlamaV3's converter, which has no target, makes;
- `one-sided`: feedback along the inputs, by what they were on calibration rows;
- `two-sided`: along the outputs too, by the Fisher information, rows behind a rejected draft left out (the default);
- `two-sided-all-rows`: the same with all rows;
- `two-sided-tuned`: two-sided, then `--tune`;
- `mixed`: two-sided with bits where they count (`--plan mixed`) and `bits` on average;
- `gguf-q4_0`, `gguf-q8_0`: another format, at its own 4.5 and 8.5 bits (`measure.gguf_baseline`).

Beside the paired fidelity, every variant reports the relative output error of each tensor on held-out inputs,
`tr(E^T H E) / tr(W^T H W)` with `E = decoded - W` and `H` the Hessian of the first held-out rows, which no variant has
seen. Methods are compared two by two at the same bits: the ratio of their accept lengths, paired.

Every variant is kept as soon as it is measured (`measure.grid_store`). All variants of one bit rate are measured
together, so that the reference runs once for them. The held-out rows with the target's features stay in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch

from exl3_dflash.calibration.anchors import sample_anchors
from exl3_dflash.calibration.rows import RowSet
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.drafter.taps import tap_layer_indices
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.measure.fidelity import DrafterFidelity, LabelledRow, label_row, no_usable_rows, tally_row
from exl3_dflash.measure.gguf_baseline import GGUF_BITS
from exl3_dflash.measure.grid_store import Cell, GridStore
from exl3_dflash.measure.grid_variants import VariantMaker
from exl3_dflash.measure.statistics import Interval
from exl3_dflash.measure.tallies import RowTally, TallyTable, add_tallies, summarize
from exl3_dflash.progress import Reporter
from exl3_dflash.target.base import Target

REFERENCE = "unquantized"
METHODS = ("uncalibrated", "one-sided", "two-sided", "two-sided-all-rows", "two-sided-tuned", "mixed", *GGUF_BITS)


@dataclass(frozen=True)
class Variant:
    """One way to quantize: bits per weight and one of `METHODS`."""

    bits: float
    method: str

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise Exl3DflashError(f"method {self.method!r}", expected=f"one of {', '.join(METHODS)}")
        if GGUF_BITS.get(self.method, self.bits) != self.bits:
            raise Exl3DflashError(f"{self.method} at {self.bits:g} bits", expected=f"{GGUF_BITS[self.method]:g}")

    @property
    def name(self) -> str:
        """For tables and JSON keys."""
        return f"{self.bits:g} bpw, {self.method}"


@dataclass(frozen=True)
class Comparison:
    """Accept length of `better` over that of `base`, two variants with the same bits, on the same anchors."""

    base: str
    better: str
    ratio: float
    ci95: Interval


@dataclass(frozen=True)
class GridResult:
    """Fidelity of every variant, methods compared at equal bits, and figures by variant: held-out output errors by
    tensor, stored bits per weight of all linears, seconds of quantization, what tuning did."""

    fidelity: list[DrafterFidelity]
    comparisons: list[Comparison]
    output_errors: dict[str, dict[str, float]]
    bpw: dict[str, float]
    seconds: dict[str, float]
    tuning: dict[str, dict[str, Any]]
    anchors: int
    rows: int
    calibration_rows: int
    source: str
    block_size: int

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def run_grid(
    checkpoint: DrafterCheckpoint,
    target: Target,
    rows: RowSet,
    variants: Sequence[Variant],
    settings: JobSettings,
    reporter: Reporter,
    store: GridStore | None = None,
    anchors_per_row: int | None = None,
) -> GridResult:
    """Quantize the drafter once per variant and measure all of them on `rows.held_out`.

    Args:
        checkpoint: the unquantized drafter.
        target: its target.
        rows: calibration and held-out rows.
        variants: what to try; calibrated ones share one calibration.
        settings: everything else; its bits and calibration are overridden.
        reporter: progress.
        store: where finished variants are kept and taken from.
        anchors_per_row: anchors measured per row; every one by default.
    """
    drafter = DrafterModel.from_checkpoint(checkpoint, dtype=target.dtype, device=target.device)
    cells = {name: store.load(name) if store else None for name in (REFERENCE, *(v.name for v in variants))}
    if not all(cells.values()):
        labelled = _label(target, drafter, rows, anchors_per_row, reporter)
        if cells[REFERENCE] is None:
            tallies = [tally_row(target, [drafter], row)[0] for row in labelled]
            measured = Cell(REFERENCE, 16.0, REFERENCE, 16.0, 0.0, {}, None, tallies)
            _keep(store, [measured])
            cells[REFERENCE] = measured
        reference = cells[REFERENCE]
        assert reference is not None
        total = add_tallies(reference.tallies)
        maker = VariantMaker(checkpoint, drafter, target, rows, settings, total.emitted / total.anchors, reporter)
        for bits in dict.fromkeys(variant.bits for variant in variants):
            missing = [v for v in variants if v.bits == bits and cells[v.name] is None]
            made = _measure(maker, missing, target, drafter, labelled, reporter)
            _keep(store, made)
            cells |= {cell.name: cell for cell in made}
    return _result([cell for cell in cells.values() if cell is not None], variants, rows, checkpoint.config.block_size)


def _keep(store: GridStore | None, cells: Sequence[Cell]) -> None:
    if store is not None:
        store.save(cells)


@torch.inference_mode()
def _label(
    target: Target, drafter: DrafterModel, rows: RowSet, anchors_per_row: int | None, reporter: Reporter
) -> list[LabelledRow]:
    """The held-out rows with what the target says about them."""
    block_size = drafter.config.block_size
    generator = torch.Generator().manual_seed(0)
    labelled = []
    with reporter.bar("label held-out rows", len(rows.held_out), "row") as advance:
        for row in rows.held_out:
            anchors = sample_anchors(len(row.ids), row.prompt_length, block_size - 1, anchors_per_row, generator)
            made = label_row(target, row, tap_layer_indices(drafter.config), anchors) if len(anchors) else None
            labelled += [made] if made is not None else []
            advance(1)
    if not labelled:
        raise no_usable_rows(block_size)
    return labelled


def _measure(
    maker: VariantMaker,
    variants: Sequence[Variant],
    target: Target,
    drafter: DrafterModel,
    labelled: Sequence[LabelledRow],
    reporter: Reporter,
) -> list[Cell]:
    """Make and measure variants of one bit rate."""
    if not variants:
        return []
    made = [maker.make(variant.bits, variant.method) for variant in variants]
    drafters = [drafter, *(item.drafter for item in made)]
    tallies: list[list[RowTally]] = [[] for _ in made]
    with reporter.bar(f"measure {variants[0].bits:g} bpw", len(labelled), "row") as advance, torch.inference_mode():
        for row in labelled:
            for column, tally in zip(tallies, tally_row(target, drafters, row)[1:], strict=True):
                column.append(tally)
            advance(1)
    return [
        Cell(v.name, v.bits, v.method, item.bpw, item.seconds, item.output_errors, item.tuning, column)
        for v, item, column in zip(variants, made, tallies, strict=True)
    ]


def _result(cells: Sequence[Cell], variants: Sequence[Variant], rows: RowSet, block_size: int) -> GridResult:
    by_name = {cell.name: cell for cell in cells}
    table = TallyTable((), {cell.name: cell.tallies for cell in cells}, 0, block_size)
    result = summarize(table)
    quantized = [by_name[variant.name] for variant in variants]
    return GridResult(
        fidelity=result.drafters,
        comparisons=_compare(table.tallies, variants, block_size),
        output_errors={cell.name: cell.output_errors for cell in quantized},
        bpw={cell.name: cell.bpw for cell in quantized},
        seconds={cell.name: cell.seconds for cell in quantized},
        tuning={cell.name: cell.tuning for cell in quantized if cell.tuning is not None},
        anchors=result.anchors,
        rows=result.rows,
        calibration_rows=len(rows.rows),
        source=rows.source,
        block_size=block_size,
    )


def _compare(tallies: Mapping[str, list[RowTally]], variants: Sequence[Variant], block_size: int) -> list[Comparison]:
    """Every variant against the previous one of the same bits, in the order in which they were asked for."""
    comparisons = []
    for bits in dict.fromkeys(variant.bits for variant in variants):
        names = [variant.name for variant in variants if variant.bits == bits]
        for base, better in pairwise(names):
            table = TallyTable((), {name: tallies[name] for name in (base, better)}, 0, block_size)
            row = summarize(table).drafters[1]
            comparisons.append(Comparison(base, better, row.retention, row.retention_ci95))
    return comparisons

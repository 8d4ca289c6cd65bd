"""Several drafters of one target on the same anchors: `exl3-dflash eval` (definitions in `measure.fidelity`).

The first drafter is the reference. Rows are written by the target (or come from a file), every drafter is measured on
the same anchors of them, and one table of per-row sums gives the figures over all rows, by kind of prompt, and with
thinking on and off. A tap shift that a drafter does not pin is probed as `quantize` does it, so that a source and what
was made of it read the same taps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from exl3_dflash.calibration.rows import CHAT, RowSet, check_source, load_rows
from exl3_dflash.calibration.rowset import THINKING, TokenRow, check_thinking
from exl3_dflash.conversion.probing import probe_checkpoint
from exl3_dflash.conversion.report import package_versions
from exl3_dflash.doctor.papers import quantize_report, require_papers, stored_bits
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.hub.resolve import ResolvedModel, resolve
from exl3_dflash.measure.fidelity import tally_rows
from exl3_dflash.measure.tallies import DrafterFidelity, TallyTable, summarize
from exl3_dflash.progress import Reporter
from exl3_dflash.runtime.load import choose_torch_dtype
from exl3_dflash.target.base import Target
from exl3_dflash.target.load import load_target, sketch_target
from quantize.encoder import default_threads

THINKING_NAMES = {None: "template's default", True: "on", False: "off"}
DEFINITION = (
    "accept_length: leading draft tokens equal to the target's greedy token after the true prefix, plus 1, mean over "
    "anchors; retention: over the first drafter's on the same anchors; position_acceptance[k]: share of anchors where "
    "draft k+1 is right among those where all before it are; kl: KL(first drafter || this) in nats per draft token; "
    "top1_agreement: draft token equal to the first drafter's; intervals: 95 % bootstrap over rows, paired"
)


@dataclass(frozen=True)
class EvalSettings:
    """What to measure on; the options of `exl3-dflash eval`.

    Attributes:
        target, drafters: names; the first drafter is the reference.
        rows, cols: held-out rows and most tokens of one.
        data: `chat`, `default` or a path (see `calibration.rows`).
        thinking: `default`, `on`, `off` or `both` (rows of either kind).
        anchors_per_row: anchors drawn per row; None takes every one.
        seed: of rows and anchors.
        device, dtype, threads: where and in which type everything runs.
        block_size: of drafters whose config does not say it.
    """

    target: str
    drafters: tuple[str, ...]
    rows: int = 32
    cols: int = 1024
    data: str = CHAT
    thinking: str = "default"
    anchors_per_row: int | None = None
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0
    block_size: int | None = None

    def __post_init__(self) -> None:
        check_thinking(self.thinking)
        if not self.drafters:
            raise Exl3DflashError("no drafter", "at least one --drafter", "give --drafter")


@dataclass(frozen=True)
class EvaluatedDrafter(DrafterFidelity):
    """A drafter's figures, and what it is: bits are the mean of its quantized linears, None where it has none."""

    source: str
    revision: str | None
    sha256: str
    bits: float | None
    calibration: str | None
    tap_shift: int | None


@dataclass(frozen=True)
class GroupFidelity:
    """The same figures over some of the rows."""

    anchors: int
    rows: int
    drafters: list[DrafterFidelity]


@dataclass(frozen=True)
class EvalResult:
    """Everything `eval` shows; see DEFINITION."""

    drafters: list[EvaluatedDrafter]
    anchors: int
    rows: int
    dropped_rows: int
    block_size: int
    by_kind: dict[str, GroupFidelity]
    by_thinking: dict[str, GroupFidelity]
    target: dict[str, Any]
    settings: dict[str, Any]
    definition: str = DEFINITION
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class _Opened:
    """A drafter whose files are in order."""

    name: str
    source: ResolvedModel
    checkpoint: DrafterCheckpoint


def evaluate(settings: EvalSettings, reporter: Reporter | None = None) -> EvalResult:
    """Measure drafters of one target.

    Args:
        settings: what to measure.
        reporter: where to tell; silent by default.

    Raises:
        Exl3DflashError: a name, a file, a pairing, the rows or the block sizes are wrong; before any long work where
            files tell.
    """
    reporter = reporter or Reporter(quiet=True)
    start = time.perf_counter()
    torch.set_num_threads(settings.threads or default_threads())
    check_source(settings.data)
    target_source = resolve(settings.target, "target")
    sketch = sketch_target(target_source.path, target_source.name)
    opened = _open_drafters(settings.drafters, settings.block_size)
    for item in opened:
        for note in require_papers(item.checkpoint, sketch):
            reporter.note(f"note: {item.name}: {note}")
    check_thinking(settings.thinking, sketch.supports_thinking, sketch.name)
    reporter.note(f"loading the target {target_source.name}")
    target = load_target(
        target_source.path,
        device=settings.device,
        dtype=choose_torch_dtype(settings.dtype),
        name=target_source.name,
    )
    rows, switches, notes = _rows(settings, target, target_source.path, reporter)
    notes += _calibrated_on(settings, opened)
    opened = [_probed(item, target, rows, target_source.path, settings.seed, reporter) for item in opened]
    for note in notes:
        reporter.note(f"note: {note}")
    models = {
        item.name: DrafterModel.from_checkpoint(item.checkpoint, dtype=target.dtype, device=target.device)
        for item in opened
    }
    with reporter.bar("measure", len(rows), "row") as advance:
        table = tally_rows(
            target,
            models,
            rows,
            anchors_per_row=settings.anchors_per_row,
            seed=settings.seed,
            progress=lambda: advance(1),
        )
    result = summarize(table)
    switch_of = {id(row): switch for row, switch in zip(rows, switches, strict=True)}
    return EvalResult(
        drafters=[_described(item, figures) for item, figures in zip(opened, result.drafters, strict=True)],
        anchors=result.anchors,
        rows=result.rows,
        dropped_rows=result.dropped_rows,
        block_size=result.block_size,
        by_kind=_groups(table, lambda row: row.kind),
        by_thinking=_groups(table, lambda row: switch_of[id(row)]) if sketch.supports_thinking else {},
        target=asdict(target.facts) | {"revision": target_source.revision, "device": str(target.device)},
        settings=asdict(settings) | {"dtype": str(target.dtype).removeprefix("torch.")},
        notes=notes,
        versions=package_versions(),
        seconds=round(time.perf_counter() - start, 2),
    )


def _open_drafters(names: Sequence[str], block_size: int | None) -> list[_Opened]:
    """Every drafter's files; names that several share are replaced by what the user gave."""
    sources = [resolve(name, "drafter") for name in names]
    short = [source.name for source in sources]
    unique = short if len(set(short)) == len(short) else list(names)
    if len(set(unique)) < len(unique):
        twice = next(name for name in unique if unique.count(name) > 1)
        raise Exl3DflashError(f"--drafter {twice} is given twice", "different drafters", "remove one of them")
    return [
        _Opened(name, source, DrafterCheckpoint.open(source.path, block_size))
        for name, source in zip(unique, sources, strict=True)
    ]


def _rows(
    settings: EvalSettings, target: Target, directory: Path, reporter: Reporter
) -> tuple[list[TokenRow], list[str], list[str]]:
    """The rows, how each stands to thinking, and notes."""
    rows: list[TokenRow] = []
    switches: list[str] = []
    notes: list[str] = []
    for thinking in THINKING[settings.thinking]:
        found = load_rows(
            settings.data,
            target,
            rows=0,
            cols=settings.cols,
            seed=settings.seed,
            held_out=settings.rows,
            progress=reporter,
            thinking=thinking,
            target_directory=directory,
        )
        rows += found.held_out
        switches += [THINKING_NAMES[thinking]] * len(found.held_out)
        notes += found.notes
    return rows, switches, notes


def _calibrated_on(settings: EvalSettings, opened: Sequence[_Opened]) -> list[str]:
    """Which drafters may have been calibrated on some of the rows, as their reports tell."""
    notes = []
    for item in opened:
        report = quantize_report(item.checkpoint.directory.path)
        held_out = (report.get("fidelity") or {}).get("rows", 0)
        calibrated = (report.get("calibration") or {}).get("mode") == "target"
        if calibrated and settings.rows > held_out:
            notes.append(f"{item.name} was measured on {held_out} held-out rows: others may be calibration rows of it")
    return notes


def _probed(
    item: _Opened, target: Target, rows: Sequence[TokenRow], directory: Path, seed: int, reporter: Reporter
) -> _Opened:
    if item.checkpoint.config.tap_shift is not None:
        return item
    held_out = RowSet((), CHAT, tuple(rows))
    return replace(item, checkpoint=probe_checkpoint(item.checkpoint, target, held_out, directory, seed, reporter)[0])


def _described(item: _Opened, figures: DrafterFidelity) -> EvaluatedDrafter:
    ours = item.checkpoint.config.raw.get("exl3_dflash")
    return EvaluatedDrafter(
        **asdict(figures),
        source=item.source.name,
        revision=item.source.revision,
        sha256=item.checkpoint.sha256,
        bits=stored_bits(item.checkpoint),
        calibration=ours.get("calibration") if isinstance(ours, dict) else None,
        tap_shift=item.checkpoint.config.tap_shift,
    )


def _groups(table: TallyTable, group_of: Callable[[TokenRow], str]) -> dict[str, GroupFidelity]:
    """Figures of every group of rows, in order of name; one group alone is all rows again and left out."""
    members: dict[str, list[int]] = {}
    for index, row in enumerate(table.rows):
        members.setdefault(group_of(row), []).append(index)
    if len(members) < 2:
        return {}
    groups = {}
    for name, indices in sorted(members.items()):
        result = summarize(table.select(indices))
        groups[name] = GroupFidelity(result.anchors, result.rows, result.drafters)
    return groups

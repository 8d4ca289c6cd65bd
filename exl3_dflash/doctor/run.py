"""`diagnose`: all checks of a pair in the order of their cost, then the verdict.

Checks stop where going on makes no sense: a drafter that cannot be opened is not paired, and a pair that does not fit
is not run. Files are opened once, the target's weights are read once, and its answers serve every measured check.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from exl3_dflash.calibration.rows import CHAT, DEFAULT, load_rows
from exl3_dflash.calibration.rowset import TokenRow
from exl3_dflash.conversion.report import package_versions
from exl3_dflash.doctor import measured
from exl3_dflash.doctor.alternatives import alternatives, base_candidate, tapped_layers
from exl3_dflash.doctor.checks import FAIL, PASS, Acceptance, Check, Diagnosis
from exl3_dflash.doctor.papers import check_papers, open_drafter
from exl3_dflash.doctor.verdict import reach_verdict
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.hub.resolve import resolve
from exl3_dflash.measure.candidates import CandidateProbe
from exl3_dflash.progress import Reporter
from exl3_dflash.runtime.load import choose_torch_dtype
from exl3_dflash.target.base import Target
from exl3_dflash.target.load import TargetSketch, load_target, sketch_target
from quantize.encoder import default_threads

T = TypeVar("T")
BLOCKING = ("config", "files", "tensors", "target", "dimensions", "layers", "vocabulary", "mask token")


@dataclass(frozen=True)
class DoctorSettings:
    """How thoroughly to look.

    Attributes:
        rows: rows that the target writes for the measured checks; 0 looks at files only.
        cols: most tokens of a row.
        anchors_per_row: anchors drawn per row; None takes all.
        seed: of rows and anchors.
        device, dtype, threads: where and in which type the pair runs.
        block_size: of a drafter whose config does not say it.
    """

    rows: int = 16
    cols: int = 512
    anchors_per_row: int | None = 64
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0
    block_size: int | None = None


@dataclass(frozen=True)
class ThinkingRow:
    """A row and whether it was written with the thinking switch on (None where there is none)."""

    row: TokenRow
    thinking: bool | None = None


@dataclass(frozen=True)
class PreparedTarget:
    """A loaded target with the rows it has written: what several diagnoses against one target can share."""

    target: Target
    rows: list[ThinkingRow]
    notes: list[str]


def diagnose(
    drafter: str,
    target: str,
    settings: DoctorSettings | None = None,
    reporter: Reporter | None = None,
    prepared: PreparedTarget | None = None,
) -> Diagnosis:
    """Look at a drafter and its target.

    Args:
        drafter, target: directories, Hugging Face ids or `demo`.
        settings: how thoroughly.
        reporter: where to tell; silent by default.
        prepared: what `prepare` made of this target before.

    Returns:
        What was found. A fault of the drafter, of the target or of the pair is a finding, never an exception.
    """
    settings, reporter = settings or DoctorSettings(), reporter or Reporter(quiet=True)
    start = time.perf_counter()
    torch.set_num_threads(settings.threads or default_threads())
    checks, checkpoint, sketch, path = _read_papers(drafter, target, settings.block_size)
    found = Diagnosis(drafter, target, reach_verdict(checks), checks)
    blocked = any(check.status == FAIL and check.name in BLOCKING for check in checks)
    if settings.rows and not blocked and checkpoint is not None and sketch is not None and path is not None:
        ready = prepared or _attempt("target weights", lambda: prepare(path, sketch, settings, reporter), checks)
        if ready is not None:
            found = examine(found, checkpoint, ready, sketch, settings)
    return replace(
        found,
        verdict=reach_verdict(found.checks),
        versions=package_versions(),
        seconds=round(time.perf_counter() - start, 2),
    )


def _read_papers(
    drafter: str, target: str, block_size: int | None
) -> tuple[list[Check], DrafterCheckpoint | None, TargetSketch | None, Path | None]:
    """Every cheap check, and what was opened on the way."""
    checks: list[Check] = []
    source = _attempt("files", lambda: resolve(drafter, "drafter"), checks)
    checkpoint = None
    if source is not None:
        opened, checkpoint = open_drafter(source.path, block_size)
        checks += opened
    path = _attempt("target", lambda: resolve(target, "target"), checks)
    sketch = None if path is None else _attempt("target", lambda: sketch_target(path.path, path.name), checks)
    if sketch is not None:
        facts = f"{sketch.num_layers} layers of width {sketch.hidden_size}, {sketch.vocab_size} rows"
        checks.append(Check("target", PASS, facts))
    if checkpoint is not None and sketch is not None:
        checks += check_papers(checkpoint, sketch)
    return checks, checkpoint, sketch, path.path if path is not None else None


def _attempt(name: str, step: Callable[[], T], checks: list[Check]) -> T | None:
    """The step's result, or None with a failed check."""
    try:
        return step()
    except Exl3DflashError as error:
        text = error.what if error.expected is None else f"{error.what}; expected {error.expected}"
        checks.append(Check(name, FAIL, text, error.fix or ""))
        return None


def prepare(path: Path, sketch: TargetSketch, settings: DoctorSettings, reporter: Reporter) -> PreparedTarget:
    """Load the target and let it write rows, half of them with thinking on where its template has the switch."""
    reporter.note(f"loading the target {sketch.name}")
    dtype = choose_torch_dtype(settings.dtype)
    target = load_target(path, device=settings.device, dtype=dtype, name=sketch.name)
    switches: tuple[bool | None, ...] = (True, False) if sketch.supports_thinking else (None,)
    rows: list[ThinkingRow] = []
    notes: list[str] = []
    for switch in switches:
        found = load_rows(
            CHAT if sketch.has_chat_template else DEFAULT,
            target,
            rows=0,
            cols=settings.cols,
            seed=settings.seed,
            held_out=max(1, settings.rows // len(switches)),
            progress=reporter,
            thinking=switch,
            target_directory=path,
        )
        rows += [ThinkingRow(row, switch) for row in found.held_out]
        notes += found.notes
    return PreparedTarget(target, rows, notes)


def examine(
    found: Diagnosis,
    checkpoint: DrafterCheckpoint,
    prepared: PreparedTarget,
    sketch: TargetSketch,
    settings: DoctorSettings,
) -> Diagnosis:
    """Every measured check of a pair whose papers are in order, added to `found`."""
    checks, target = list(found.checks), prepared.target
    tried = alternatives(checkpoint, target, sketch)
    base = base_candidate(checkpoint.config)
    layers = tapped_layers(checkpoint.config, tried)
    token_rows = [item.row for item in prepared.rows]
    probe = _attempt(
        "features",
        lambda: CandidateProbe.label(
            checkpoint, target, token_rows, layers, anchors_per_row=settings.anchors_per_row, seed=settings.seed
        ),
        checks,
    )
    if probe is None or _attempt("weights", lambda: probe.model(base), checks) is None:
        return replace(found, checks=checks, notes=prepared.notes)
    figures = probe.figures(base)
    results = measured.try_alternatives(probe, base, tried)
    tallies = probe.tallies(base)
    checks += [
        Check("weights", PASS, "every weight is finite"),
        measured.check_features(probe),
        measured.check_acceptance(figures),
        *measured.check_alternatives(results, figures),
        measured.check_decay(tallies),
        measured.check_long_context(probe, base),
    ]
    if sketch.supports_thinking:
        switch_of = {id(item.row): bool(item.thinking) for item in prepared.rows}
        checks.append(measured.check_thinking(tallies, [switch_of[id(row)] for row in probe.token_rows]))
    acceptance = Acceptance(
        figures.accept_length, figures.ci95, figures.position_acceptance, probe.anchors, len(probe.rows)
    )
    others = [item.figures for item in results]
    return replace(found, checks=checks, acceptance=acceptance, alternatives=others, notes=prepared.notes)

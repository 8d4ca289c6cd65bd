"""The quantization job, from a drafter's directory to an audited EXL3 directory.

Order: everything that can be refused is refused first (names, files, config, pairing, output directory), then the plan
is shown, then rows -> probe -> accept length of the unquantized drafter -> Hessians -> bits and predicted retention ->
one tensor after the other -> paired measurement -> files -> audit -> one rename. Nothing of the output exists under its
final name before it is complete, and every finished step is kept in the work directory, from where an interrupted job
goes on.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from exl3_dflash.calibration.rows import CHAT, RowSet, check_source, load_rows
from exl3_dflash.calibration.rowset import THINKING, check_thinking
from exl3_dflash.conversion.calibrating import calibrate_job
from exl3_dflash.conversion.deciding import Pair, decide_plan
from exl3_dflash.conversion.device_executor import DeviceExecutor
from exl3_dflash.conversion.encoding import encode_tensors
from exl3_dflash.conversion.estimate import estimate_seconds
from exl3_dflash.conversion.executor import Executor, make_executor
from exl3_dflash.conversion.identity import UnchangedFiles, job_manifest
from exl3_dflash.conversion.kept_answers import KeptAnswers
from exl3_dflash.conversion.measuring import measure_pair
from exl3_dflash.conversion.output import audit_output, write_output
from exl3_dflash.conversion.plan import QuantizationPlan, describe, make_plan
from exl3_dflash.conversion.probing import probe_checkpoint
from exl3_dflash.conversion.report import QuantizeReport
from exl3_dflash.conversion.reporting import build_report
from exl3_dflash.conversion.settings import AUTO, JobSettings
from exl3_dflash.conversion.space import require_job_space
from exl3_dflash.conversion.steps import pack_rows, unpack_rows
from exl3_dflash.conversion.tuning import TuningSettings
from exl3_dflash.conversion.tuning_step import Drafted, tuned_drafter
from exl3_dflash.conversion.work_directory import WorkDirectory
from exl3_dflash.doctor.papers import require_papers
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.hub.resolve import ResolvedModel, resolve
from exl3_dflash.measure.probe import ProbeResult
from exl3_dflash.progress import Reporter
from exl3_dflash.runtime.load import choose_torch_dtype
from exl3_dflash.target.base import Target
from exl3_dflash.target.load import load_target, sketch_target
from quantize.checkpoint import CheckpointWriter, check_destination
from quantize.encoder import default_threads
from quantize.linear import QuantizedLinear

REPORT, REPORT_FILE = "report", "quantize_report.json"


@dataclass(frozen=True)
class _Inputs:
    """What a job works on, all checked; `target` is there once it is loaded."""

    source: ResolvedModel
    checkpoint: DrafterCheckpoint
    plan: QuantizationPlan
    unchanged: UnchangedFiles
    executor: Executor
    target_source: ResolvedModel | None
    target: Target | None = None

    @property
    def target_path(self) -> Path | None:
        """The target's directory."""
        return self.target_source.path if self.target_source else None


def quantize_drafter(settings: JobSettings, reporter: Reporter | None = None) -> QuantizeReport:
    """Quantize a DFlash drafter to EXL3.

    Args:
        settings: what to do.
        reporter: where to tell; silent by default.

    Returns:
        The report that is also written into the output directory.

    Raises:
        Exl3DflashError: an input or the output directory is unusable; raised before long work where possible.
    """
    reporter = reporter or Reporter(quiet=True)
    start = time.perf_counter()
    torch.set_num_threads(settings.threads or default_threads())
    settings.check_places()
    if not settings.resume:
        check_destination(settings.out_dir, settings.force)
    with WorkDirectory(
        settings.work_path, resume=settings.resume, restart=settings.restart, note=reporter.note
    ) as work:
        inputs = _open_inputs(settings, reporter)
        work.begin(job_manifest(settings, inputs.checkpoint, inputs.target_path))
        report = _report_of_finished(settings, work)
        if report is None:
            with work.resumable(), CheckpointWriter(settings.out_dir, force=settings.force) as writer:
                writer.discard_leftovers()
                require_job_space(inputs.plan, inputs.checkpoint, settings)
                report = _make_output(settings, inputs, work, writer, reporter, start)
        work.remove()
    return report


def _make_output(
    settings: JobSettings,
    inputs: _Inputs,
    work: WorkDirectory,
    writer: CheckpointWriter,
    reporter: Reporter,
    start: float,
) -> QuantizeReport:
    """All steps up to the finished output directory; `start` is when the job began."""
    inputs = _with_target(settings, inputs, reporter)
    report, drafted = _run_steps(settings, inputs, work, reporter)
    write_output(writer, inputs.checkpoint, drafted.linears, report, drafted.norms)
    report = replace(report, size_bytes=writer.tensor_bytes, seconds=round(time.perf_counter() - start, 2))
    writer.add_file(REPORT_FILE, report.to_json_text() + "\n")
    inputs.unchanged.check()
    writer.finish(check=lambda path: audit_output(path, inputs.checkpoint, drafted.linears))
    return report


def _report_of_finished(settings: JobSettings, work: WorkDirectory) -> QuantizeReport | None:
    """The report of a job that was stopped between its last two steps: its output is complete and in place."""
    stored, file = work.load(REPORT), settings.out_dir / REPORT_FILE
    if stored is None or not file.is_file():
        return None
    written = json.loads(file.read_text("utf-8"))
    last = {key: written.get(key) for key in ("size_bytes", "seconds", "out_dir")}
    return QuantizeReport.from_json(written) if {**stored.facts, **last} == written else None


def _run_steps(
    settings: JobSettings, inputs: _Inputs, work: WorkDirectory, reporter: Reporter
) -> tuple[QuantizeReport, Drafted]:
    """Everything between the checked inputs and the files."""
    inputs, pair, probe = _prepare(settings, inputs, work, reporter)
    calibration = pair.calibration if pair else None
    quantized = encode_tensors(
        settings, inputs.checkpoint, inputs.plan, calibration, inputs.executor, work, reporter, inputs.unchanged.check
    )
    drafted = Drafted(quantized, {})
    if settings.tune:
        assert pair is not None
        drafted = _tune(settings, inputs, pair, quantized, work, reporter)
    stored = work.load(REPORT)
    if stored is not None:
        report = replace(QuantizeReport.from_json(stored.facts), out_dir=str(settings.out_dir))
        return report, drafted if (report.tuning or {}).get("kept") else Drafted(quantized, {})
    fidelity = None
    if pair is not None:
        fidelity, drafted = measure_pair(
            inputs.checkpoint, pair.target, pair.drafter, drafted, quantized, pair.rows, reporter
        )
    found = (pair.rows if pair else None, probe, calibration, drafted, fidelity)
    report = build_report(settings, inputs.source, inputs.checkpoint, inputs.target, inputs.plan, *found)
    if isinstance(inputs.executor, DeviceExecutor):
        report = replace(report, encoder=DeviceExecutor.encoder)
    work.save(REPORT, {}, report.to_json())
    return report, drafted


def _prepare(
    settings: JobSettings, inputs: _Inputs, work: WorkDirectory, reporter: Reporter
) -> tuple[_Inputs, Pair | None, ProbeResult | None]:
    """Everything before encoding: the inputs with what was left open and all bits decided; what that was decided with,
    None without a target; and what the probe found."""
    pair, probe = None, None
    if inputs.target is not None:
        target = inputs.target
        drafter = DrafterModel.from_checkpoint(inputs.checkpoint, dtype=target.dtype, device=target.device)
        rows = _load_rows(settings, target, inputs.target_path, work, reporter)
        checkpoint, probe = probe_checkpoint(
            inputs.checkpoint, target, rows, inputs.target_path, settings.seed, reporter
        )
        inputs = replace(inputs, checkpoint=checkpoint)
        drafter.config = checkpoint.config
        calibration = None
        if settings.calibration == "target":
            calibration = calibrate_job(settings, checkpoint, target, drafter, rows, work, reporter)
        pair = Pair(target, drafter, rows, calibration)
    plan = decide_plan(settings, inputs.checkpoint, inputs.plan, pair, work, reporter)
    return replace(inputs, plan=plan), pair, probe


def _tune(
    settings: JobSettings,
    inputs: _Inputs,
    pair: Pair,
    quantized: dict[str, QuantizedLinear],
    work: WorkDirectory,
    reporter: Reporter,
) -> Drafted:
    """The quantized drafter with its scales and norms tuned on the calibration rows."""
    assert pair.calibration is not None
    return tuned_drafter(
        inputs.checkpoint,
        pair.drafter,
        pair.target,
        pair.rows.rows,
        quantized,
        pair.calibration,
        TuningSettings(seed=settings.seed),
        reporter,
        work,
        settings.threads,
    )


def _open_inputs(settings: JobSettings, reporter: Reporter) -> _Inputs:
    """Everything that can be checked before the target is loaded."""
    executor = make_executor(settings.executor, settings.workers, settings.threads, settings.device)
    source = resolve(settings.source, "drafter")
    checkpoint = DrafterCheckpoint.open(source.path, settings.block_size)
    _ = checkpoint.config.block_size  # raises where nobody has said it
    if checkpoint.is_exl3:
        raise Exl3DflashError(
            f"{source.name} is quantized to EXL3 already",
            expected="the original drafter in BF16, FP16 or FP32",
            fix="quantize the drafter it was made from",
        )
    unchanged = UnchangedFiles([*checkpoint.directory.files, checkpoint.directory.path / "config.json"])
    plan = make_plan(checkpoint, settings)
    target_source = None
    if settings.target is not None:
        if settings.cal_data != AUTO:
            check_source(settings.cal_data)
        target_source = resolve(settings.target, "target")
        sketch = sketch_target(target_source.path, target_source.name)
        check_thinking(settings.thinking, sketch.supports_thinking, sketch.name)
        for note in require_papers(checkpoint, sketch):
            reporter.note(f"note: {note}")
    return _Inputs(source, checkpoint, plan, unchanged, executor, target_source)


def _with_target(settings: JobSettings, inputs: _Inputs, reporter: Reporter) -> _Inputs:
    """The inputs with their target loaded, and the plan shown."""
    if inputs.target_source is not None:
        resolved = inputs.target_source
        reporter.note(f"loading the target {resolved.name}")
        dtype = choose_torch_dtype(settings.dtype)
        target = load_target(resolved.path, device=settings.device, dtype=dtype, name=resolved.name)
        inputs = replace(inputs, target=target)
    plan = inputs.plan
    reporter.note(describe(plan, settings, estimate_seconds(plan, settings)))
    return inputs


def _load_rows(
    settings: JobSettings, target: Target, target_path: Path | None, work: WorkDirectory, reporter: Reporter
) -> RowSet:
    """Calibration and held-out rows."""
    stored = work.load("rows")
    if stored is not None:
        return unpack_rows(stored)
    source = settings.rows_source(target.tokenizer.has_chat_template)
    if source == CHAT and settings.cal_data == AUTO:
        reporter.note(
            "note: the target writes the rows, which pays below 3 bits and with --tune; --cal-data default spares it"
        )
    rows = load_rows(
        source,
        target,
        rows=settings.cal_rows if settings.calibration == "target" else 0,
        cols=settings.cal_cols,
        seed=settings.seed,
        held_out=settings.eval_rows,
        progress=reporter,
        thinking=THINKING[settings.thinking],
        target_directory=target_path,
        answers=KeptAnswers(work),
    )
    for note in rows.notes:
        reporter.note(f"note: {note}")
    packed = pack_rows(rows)
    work.save("rows", packed.tensors, packed.facts)
    return rows

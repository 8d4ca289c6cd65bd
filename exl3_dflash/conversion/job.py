"""The quantization job, from a drafter's directory to an audited EXL3 directory.

Order: everything that can be refused is refused first (names, files, config, pairing, output directory), then the plan
is shown, then rows -> probe -> accept length of the unquantized drafter -> Hessians -> one tensor after the other ->
paired measurement -> files -> audit -> one rename. Nothing of the output exists under its final name before it is
complete, and every finished step is kept in the work directory, from where an interrupted job goes on.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from exl3_dflash.calibration.capture import Calibration, calibrate
from exl3_dflash.calibration.fisher import FisherSettings
from exl3_dflash.calibration.rows import RowSet, check_source, load_rows
from exl3_dflash.conversion.output import audit_output, write_output
from exl3_dflash.conversion.plan import QuantizationPlan, TensorPlan, describe, make_plan
from exl3_dflash.conversion.probing import probe_checkpoint
from exl3_dflash.conversion.report import QuantizeReport, package_versions
from exl3_dflash.conversion.reporting import build_report
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.conversion.steps import (
    pack_calibration,
    pack_linear,
    pack_rows,
    unpack_calibration,
    unpack_linear,
    unpack_rows,
)
from exl3_dflash.conversion.work_directory import WorkDirectory
from exl3_dflash.doctor.papers import require_papers
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.hub.resolve import ResolvedModel, resolve
from exl3_dflash.measure.fidelity import FidelityResult, measure_fidelity
from exl3_dflash.measure.probe import ProbeResult
from exl3_dflash.progress import Reporter
from exl3_dflash.runtime.load import choose_torch_dtype
from exl3_dflash.target.base import Target
from exl3_dflash.target.load import load_target, sketch_target
from quantize.checkpoint import CheckpointWriter
from quantize.encoder import default_threads
from quantize.hessian import Hessian
from quantize.linear import QuantizedLinear, QuantSettings, decode_linear, quantize_linear
from quantize.tensor_directory import file_sha256

MIN_ANCHORS_PER_ROW = 32
HEAD_OPERATIONS_PER_ROW = 5e10  # about a second of a CPU
UNQUANTIZED, QUANTIZED = "unquantized", "quantized"


@dataclass(frozen=True)
class _Inputs:
    """What a job works on, all checked."""

    source: ResolvedModel
    checkpoint: DrafterCheckpoint
    target: Target | None
    target_path: Path | None
    target_revision: str | None
    plan: QuantizationPlan


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
    with CheckpointWriter(settings.out_dir, force=settings.force) as writer:
        inputs = _load_inputs(settings, reporter)
        manifest = _manifest(settings, inputs)
        with WorkDirectory(settings.work_path, manifest, resume=settings.resume, restart=settings.restart) as work:
            writer.discard_leftovers()
            report, quantized = _run_steps(settings, inputs, work, reporter)
            write_output(writer, inputs.checkpoint, quantized, report)
            report = replace(report, size_bytes=writer.tensor_bytes, seconds=round(time.perf_counter() - start, 2))
            writer.add_file("quantize_report.json", report.to_json_text() + "\n")
            writer.finish(check=lambda path: audit_output(path, inputs.checkpoint, quantized))
            work.remove()
    return report


def _manifest(settings: JobSettings, inputs: _Inputs) -> dict[str, Any]:
    """What the job is: results of another one are not reused."""
    facts = inputs.target.facts if inputs.target else None
    cal_data = Path(settings.cal_data).expanduser()  # a file, or the word `default` or `chat`
    return {
        "settings": settings.binding(),
        "cal_data_sha256": file_sha256(cal_data) if cal_data.is_file() else None,
        "source_sha256": inputs.checkpoint.sha256,
        "target": facts and (facts.sha256 or inputs.target_revision or facts.name),
        "versions": package_versions(),
    }


def _run_steps(
    settings: JobSettings, inputs: _Inputs, work: WorkDirectory, reporter: Reporter
) -> tuple[QuantizeReport, dict[str, QuantizedLinear]]:
    """Everything between the checked inputs and the files."""
    drafter = None
    if inputs.target is not None:
        drafter = DrafterModel.from_checkpoint(
            inputs.checkpoint, dtype=inputs.target.dtype, device=inputs.target.device
        )
    rows = _load_rows(settings, inputs, work, reporter)
    inputs, probe = _probe(settings, inputs, rows, reporter)
    if drafter is not None:
        drafter.config = inputs.checkpoint.config
    calibration = _calibrate(settings, inputs, drafter, rows, work, reporter)
    quantized = _quantize_tensors(settings, inputs, calibration, work, reporter)
    fidelity = _measure_pair(inputs, drafter, quantized, rows, reporter)
    report = build_report(
        settings,
        inputs.source,
        inputs.checkpoint,
        inputs.target,
        inputs.plan,
        rows,
        probe,
        calibration,
        quantized,
        fidelity,
    )
    return report, quantized


def _load_inputs(settings: JobSettings, reporter: Reporter) -> _Inputs:
    source = resolve(settings.source, "drafter")
    checkpoint = DrafterCheckpoint.open(source.path, settings.block_size)
    _ = checkpoint.config.block_size  # raises where nobody has said it
    if checkpoint.is_exl3:
        raise Exl3DflashError(
            f"{source.name} is quantized to EXL3 already",
            expected="the original drafter in BF16, FP16 or FP32",
            fix="quantize the drafter it was made from",
        )
    plan = make_plan(checkpoint, settings)
    target = target_path = revision = None
    if settings.target is not None:
        check_source(settings.cal_data)
        resolved = resolve(settings.target, "target")
        for note in require_papers(checkpoint, sketch_target(resolved.path, resolved.name)):
            reporter.note(f"note: {note}")
        reporter.note(f"loading the target {resolved.name}")
        dtype = choose_torch_dtype(settings.dtype)
        target = load_target(resolved.path, device=settings.device, dtype=dtype, name=resolved.name)
        target_path, revision = resolved.path, resolved.revision
    reporter.note(
        describe(plan, settings, plan.estimate_seconds(settings.codebook, settings.threads, settings.encoder))
    )
    return _Inputs(source, checkpoint, target, target_path, revision, plan)


def _load_rows(settings: JobSettings, inputs: _Inputs, work: WorkDirectory, reporter: Reporter) -> RowSet | None:
    """Calibration and held-out rows; None without a target."""
    if inputs.target is None:
        return None
    stored = work.load("rows")
    if stored is not None:
        return unpack_rows(stored)
    rows = load_rows(
        settings.cal_data,
        inputs.target,
        rows=settings.cal_rows if settings.calibration == "target" else 0,
        cols=settings.cal_cols,
        seed=settings.seed,
        held_out=settings.eval_rows,
        progress=reporter,
        target_directory=inputs.target_path,
    )
    for note in rows.notes:
        reporter.note(f"note: {note}")
    packed = pack_rows(rows)
    work.save("rows", packed.tensors, packed.facts)
    return rows


def _probe(
    settings: JobSettings, inputs: _Inputs, rows: RowSet | None, reporter: Reporter
) -> tuple[_Inputs, ProbeResult | None]:
    """The inputs with the settings chosen that the checkpoint leaves open; without a target they stay as they are."""
    if inputs.target is None or rows is None:
        return inputs, None
    checkpoint, result = probe_checkpoint(
        inputs.checkpoint, inputs.target, rows, inputs.target_path, settings.seed, reporter
    )
    return replace(inputs, checkpoint=checkpoint), result


def _calibrate(
    settings: JobSettings,
    inputs: _Inputs,
    drafter: DrafterModel | None,
    rows: RowSet | None,
    work: WorkDirectory,
    reporter: Reporter,
) -> Calibration | None:
    if settings.calibration == "none":
        return None
    assert drafter is not None
    assert rows is not None
    assert inputs.target is not None
    stored = work.load("calibration")
    if stored is not None:
        return unpack_calibration(stored, inputs.target.device)
    accept_length = _accept_length(inputs.target, drafter, rows, reporter)
    with reporter.bar("calibrate", len(rows.rows), "row") as advance:
        calibration = calibrate(
            drafter,
            inputs.checkpoint.linears,
            inputs.target,
            rows.rows,
            accept_length=accept_length,
            fisher=FisherSettings() if settings.method == "two-sided" else None,
            seed=settings.seed,
            progress=lambda: advance(1),
        )
    if calibration.rows == 0:
        raise Exl3DflashError(
            f"none of {len(rows.rows)} calibration rows could be used, {calibration.dropped_rows} were not finite",
            expected="rows with at least two tokens and finite target features",
            fix="try --dtype float32 or other --cal-data",
        )
    if calibration.dropped_rows or calibration.dropped_inputs or calibration.dropped_gradients:
        reporter.note(
            f"note: {calibration.dropped_rows} rows, {calibration.dropped_inputs} single inputs and "
            f"{calibration.dropped_gradients} single gradients were not finite and were dropped"
        )
    packed = pack_calibration(calibration)
    work.save("calibration", packed.tensors, packed.facts)
    return calibration


def _accept_length(target: Target, drafter: DrafterModel, rows: RowSet, reporter: Reporter) -> float:
    """Teacher-forced accept length of the unquantized drafter; 1 (a step per token) where nothing is measured."""
    if not rows.held_out:
        return 1.0
    with reporter.bar("measure unquantized", len(rows.held_out), "row") as advance:
        result = measure_fidelity(
            target,
            {UNQUANTIZED: drafter},
            rows.held_out,
            anchors_per_row=anchors_per_row(drafter, target),
            progress=lambda: advance(1),
        )
    accept_length = result.drafters[0].accept_length
    reporter.note(f"unquantized: accept length {accept_length:.3f} over {result.anchors} held-out anchors")
    return accept_length


def tensor_seed(seed: int, name: str) -> int:
    """The seed of one tensor: the job's seed and the tensor's name, so that results do not depend on the order."""
    return (seed * 1_000_003 + zlib.crc32(name.encode())) % (1 << 31)


def _quantize_tensors(
    settings: JobSettings,
    inputs: _Inputs,
    calibration: Calibration | None,
    work: WorkDirectory,
    reporter: Reporter,
) -> dict[str, QuantizedLinear]:
    quantized: dict[str, QuantizedLinear] = {}
    total = sum(tensor.tiles for tensor in inputs.plan.quantized)
    with reporter.bar("quantize", total, "tile") as advance:
        for tensor in inputs.plan.quantized:
            name = tensor.linear.name
            stored = work.load(f"tensor-{name}")
            if stored is not None:
                quantized[name] = unpack_linear(stored)
            else:
                hessian = calibration.hessians.get(tensor.linear.group) if calibration else None
                outputs = calibration.output_hessians.get(name) if calibration else None
                quantized[name] = quantize_tensor(settings, inputs.checkpoint, tensor, hessian, outputs)
                packed = pack_linear(quantized[name])
                work.save(f"tensor-{name}", packed.tensors, packed.facts)
            advance(tensor.tiles)
    return quantized


def quantize_tensor(
    settings: JobSettings,
    checkpoint: DrafterCheckpoint,
    tensor: TensorPlan,
    hessian: Hessian | None,
    output_hessian: Hessian | None = None,
) -> QuantizedLinear:
    """Quantize one linear of a drafter as planned, with the Hessians of its inputs and outputs where they are known."""
    assert tensor.bits is not None
    name = tensor.linear.name
    weight = checkpoint.load(f"{name}.weight").float().T.contiguous()  # (in, out)
    bias = checkpoint.load(f"{name}.bias") if tensor.linear.bias else None
    quant_settings = QuantSettings(
        bits=tensor.bits,
        codebook=settings.codebook,
        encoder=settings.encoder,
        out_scales=settings.out_scales,
        seed=tensor_seed(settings.seed, name),
        threads=settings.threads,
    )
    return quantize_linear(weight, hessian, quant_settings, output_hessian=output_hessian, bias=bias, name=name)


def _measure_pair(
    inputs: _Inputs,
    drafter: DrafterModel | None,
    quantized: dict[str, QuantizedLinear],
    rows: RowSet | None,
    reporter: Reporter,
) -> FidelityResult | None:
    """Unquantized against quantized on the held-out rows; None where there are none."""
    if drafter is None or rows is None or not rows.held_out or inputs.target is None:
        return None
    other = DrafterModel.from_checkpoint(inputs.checkpoint, dtype=inputs.target.dtype, device=inputs.target.device)
    for name, linear in quantized.items():
        other.set_linear_weight(name, decode_linear(linear))
    with reporter.bar("measure quantized", len(rows.held_out), "row") as advance:
        return measure_fidelity(
            inputs.target,
            {UNQUANTIZED: drafter, QUANTIZED: other},
            rows.held_out,
            anchors_per_row=anchors_per_row(drafter, inputs.target),
            progress=lambda: advance(1),
        )


def anchors_per_row(drafter: DrafterModel, target: Target) -> int:
    """Anchors measured per held-out row: as many as keep the head, by far the largest part, within bounds."""
    config = drafter.config
    head_operations = 2 * (config.block_size - 1) * target.facts.head_size * config.hidden_size
    return max(MIN_ANCHORS_PER_ROW, int(HEAD_OPERATIONS_PER_ROW // head_operations))

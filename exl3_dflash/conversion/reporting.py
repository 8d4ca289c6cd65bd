"""The report of a quantization job, assembled from what its steps left (types: `conversion.report`)."""

from __future__ import annotations

from exl3_dflash.calibration.capture import Calibration
from exl3_dflash.calibration.rowset import RowSet
from exl3_dflash.conversion.plan import QuantizationPlan, TensorPlan
from exl3_dflash.conversion.probing import probe_notes
from exl3_dflash.conversion.report import CalibrationReport, QuantizeReport, TensorReport, package_versions
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.conversion.tuning_step import Drafted
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.taps import DEFAULT_TAP_SHIFT
from exl3_dflash.hub.resolve import ResolvedModel
from exl3_dflash.measure.fidelity import FidelityResult
from exl3_dflash.measure.probe import ProbeResult
from exl3_dflash.target.base import Target
from quantize.encoder import used_encoder
from quantize.linear import QuantizedLinear


def build_report(
    settings: JobSettings,
    source: ResolvedModel,
    checkpoint: DrafterCheckpoint,
    target: Target | None,
    plan: QuantizationPlan,
    rows: RowSet | None,
    probe: ProbeResult | None,
    calibration: Calibration | None,
    drafted: Drafted,
    fidelity: FidelityResult | None,
) -> QuantizeReport:
    """The report of a job whose files are still to be written: `size_bytes` and `seconds` are 0."""
    tap_shift = checkpoint.config.tap_shift
    accept_length = {row.name: row.accept_length for row in fidelity.drafters} if fidelity else None
    return QuantizeReport(
        out_dir=str(settings.out_dir),
        source=source.name,
        source_revision=source.revision,
        source_sha256=checkpoint.sha256,
        target=target.facts.name if target else None,
        bits=settings.bits if settings.recipe is None else round(plan.mean_bits, 4),
        plan=settings.plan_kind,
        mean_bits=round(plan.mean_bits, 4),
        predicted_retention=plan.predicted_retention,
        bpw=round(plan.bpw, 4),
        head_bits=settings.head_bits,
        head_quantized=plan.has_head,
        codebook=settings.codebook,
        encoder=used_encoder(settings.encoder, settings.codebook),
        out_scales=settings.out_scales,
        size_bytes=0,
        source_bytes=plan.source_bytes,
        tensors=[_tensor_report(tensor, drafted.linears[tensor.linear.name]) for tensor in plan.quantized],
        copied={tensor.linear.name: tensor.reason for tensor in plan.tensors if tensor.reason},
        notes=[*([plan.loader_note] if plan.loader_note else []), *probe_notes(probe)],
        calibration=_calibration_report(settings, rows, calibration),
        tap_shift=DEFAULT_TAP_SHIFT if tap_shift is None else tap_shift,
        probe=probe.to_json() if probe else None,
        accept_length=accept_length,
        fidelity=fidelity.to_json() if fidelity else None,
        seed=settings.seed,
        versions=package_versions(),
        seconds=0.0,
        tuning=drafted.tuning,
    )


def _tensor_report(tensor: TensorPlan, linear: QuantizedLinear) -> TensorReport:
    return TensorReport(
        name=tensor.linear.name,
        shape=[tensor.linear.in_features, tensor.linear.out_features],
        bits=linear.bits,
        proxy_error=linear.proxy_error,
        weight_error=linear.weight_error,
        fallback=linear.fallback,
        seconds=linear.seconds,
        method=linear.method,
        output_fallback=linear.output_fallback,
    )


def _calibration_report(
    settings: JobSettings, rows: RowSet | None, calibration: Calibration | None
) -> CalibrationReport:
    if calibration is None or rows is None:
        return CalibrationReport(mode="none")
    return CalibrationReport(
        mode="target",
        source=rows.source,
        rows=calibration.rows,
        cols=settings.cal_cols,
        tokens=calibration.tokens,
        anchors=calibration.anchors,
        dropped_rows=calibration.dropped_rows,
        dropped_inputs=calibration.dropped_inputs,
        dropped_gradients=calibration.dropped_gradients,
        method=settings.method,
        thinking=settings.thinking,
        notes=list(rows.notes),
    )

"""How much disk a job needs, checked before it works: the output, and what is kept until it is complete."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from exl3_dflash.conversion.plan import QuantizationPlan
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.conversion.work_directory import SUFFIX
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint, LinearSpec
from exl3_dflash.drafter.layout import output_linears
from quantize.checkpoint import require_space
from quantize.hessian import STRIP_ROWS


def require_job_space(plan: QuantizationPlan, checkpoint: DrafterCheckpoint, settings: JobSettings) -> None:
    """Raise `Exl3DflashError` unless the disks of output and work directory have room for the whole job."""
    there = sum(file.stat().st_size for file in settings.work_path.glob("*" + SUFFIX))  # of a job that is resumed
    kept = max(0, work_bytes(plan, checkpoint, settings) - there)
    out, work = _existing(settings.out_dir), _existing(settings.work_path)
    if out.stat().st_dev == work.stat().st_dev:
        require_space(out, plan.total_bytes + kept)
        return
    require_space(out, plan.total_bytes)
    require_space(work, kept)


def work_bytes(plan: QuantizationPlan, checkpoint: DrafterCheckpoint, settings: JobSettings) -> int:
    """Largest size of the work directory: finished tensors, and two copies of the calibration's sums, because the old
    one stays until the new one is complete."""
    kept = sum(tensor.stored_bytes for tensor in plan.quantized)
    if settings.calibration == "none":
        return kept
    kept += 2 * _input_sums_bytes(checkpoint.linears)
    if settings.method == "two-sided":
        outermost = output_linears(checkpoint.config, has_head=True)
        inner = [linear for linear in checkpoint.linears if linear.name not in outermost]
        kept += 2 * sum(packed_bytes(linear.out_features) for linear in inner)
    return kept


def _input_sums_bytes(linears: Iterable[LinearSpec]) -> int:
    """Bytes of the inputs' packed sums: one per group, two where k and v see two streams."""
    groups = {linear.group: linear for linear in linears}.values()
    streams = {linear: 2 if linear.name.endswith((".k_proj", ".v_proj")) else 1 for linear in groups}
    return sum(packed_bytes(linear.in_features) * count for linear, count in streams.items())


def packed_bytes(features: int) -> int:
    """Bytes of the packed sums of one Hessian (`quantize.hessian`): float32 strips of `STRIP_ROWS` rows."""
    starts = range(0, features, STRIP_ROWS)
    return 4 * sum(min(STRIP_ROWS, features - start) * (features - start) for start in starts)


def _existing(path: Path) -> Path:
    """The path, or the nearest parent that exists."""
    path = path.expanduser().absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())

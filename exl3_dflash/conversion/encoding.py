"""The tensors of a job: as tasks for an executor, with their results kept in the work directory as they arrive."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import closing

from exl3_dflash.calibration.capture import Calibration
from exl3_dflash.conversion.executor import Executor, LinearTask
from exl3_dflash.conversion.plan import QuantizationPlan, TensorPlan
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.conversion.steps import pack_linear, unpack_linear
from exl3_dflash.conversion.work_directory import WorkDirectory
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.progress import Reporter
from quantize.hessian import Hessian
from quantize.linear import QuantizedLinear, QuantSettings


def tensor_seed(seed: int, name: str) -> int:
    """The seed of one tensor: the job's seed and the tensor's name, so that results do not depend on the order."""
    return (seed * 1_000_003 + zlib.crc32(name.encode())) % (1 << 31)


def encode_tensors(
    settings: JobSettings,
    checkpoint: DrafterCheckpoint,
    plan: QuantizationPlan,
    calibration: Calibration | None,
    executor: Executor,
    work: WorkDirectory,
    reporter: Reporter,
    still_valid: Callable[[], None] = lambda: None,
) -> dict[str, QuantizedLinear]:
    """All tensors that the plan quantizes, in its order; those that an earlier run finished are not encoded again.

    Args:
        settings, checkpoint, plan: of the job.
        calibration: Hessians; None for a job without calibration.
        executor: where to encode.
        work: where results are kept.
        reporter: shows how far the work is, in tiles.
        still_valid: raises where the source is no longer what it was; called before a result is kept.
    """
    results: dict[str, QuantizedLinear] = {}
    tiles = {tensor.linear.name: tensor.tiles for tensor in plan.quantized}
    with reporter.bar("quantize", sum(tiles.values()), "tile") as advance:
        for tensor in plan.quantized:
            stored = work.load(_step(tensor.linear.name))
            if stored is not None:
                results[tensor.linear.name] = unpack_linear(stored)
                advance(tensor.tiles)

        missing = [tensor for tensor in plan.quantized if tensor.linear.name not in results]
        tasks = (_calibrated_task(settings, checkpoint, tensor, calibration) for tensor in missing)
        with closing(executor.run(tasks)) as finished:
            for name, linear in finished:
                still_valid()
                packed = pack_linear(linear)
                work.save(_step(name), packed.tensors, packed.facts)
                results[name] = linear
                advance(tiles[name])
    return {name: results[name] for name in tiles}


def _step(name: str) -> str:
    return f"tensor-{name}"


def _calibrated_task(
    settings: JobSettings, checkpoint: DrafterCheckpoint, tensor: TensorPlan, calibration: Calibration | None
) -> LinearTask:
    if calibration is None:
        return make_task(settings, checkpoint, tensor, None)
    outputs = calibration.output_hessians.get(tensor.linear.name)
    return make_task(settings, checkpoint, tensor, calibration.hessians.get(tensor.linear.group), outputs)


def make_task(
    settings: JobSettings,
    checkpoint: DrafterCheckpoint,
    tensor: TensorPlan,
    hessian: Hessian | None,
    output_hessian: Hessian | None = None,
) -> LinearTask:
    """One linear of a drafter as planned, with the Hessians of its inputs and outputs where they are known."""
    assert tensor.bits is not None
    name = tensor.linear.name
    return LinearTask(
        name=name,
        weight=checkpoint.load(f"{name}.weight").float().T.contiguous(),  # (in, out)
        hessian=hessian,
        output_hessian=output_hessian,
        bias=checkpoint.load(f"{name}.bias").clone() if tensor.linear.bias else None,
        settings=QuantSettings(
            bits=tensor.bits,
            codebook=settings.codebook,
            encoder=settings.encoder,
            out_scales=settings.out_scales,
            seed=tensor_seed(settings.seed, name),
            threads=settings.threads,
        ),
    )


def quantize_tensor(
    settings: JobSettings,
    checkpoint: DrafterCheckpoint,
    tensor: TensorPlan,
    hessian: Hessian | None,
    output_hessian: Hessian | None = None,
) -> QuantizedLinear:
    """Quantize one linear of a drafter here and now (see `make_task`)."""
    return make_task(settings, checkpoint, tensor, hessian, output_hessian).run()

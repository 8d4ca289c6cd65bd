"""The executor of CUDA devices: several tensors at a time on each, so that their tiles are encoded together.

Tasks are joined in batches by memory and work (`quantize.cuda_plan`). Every device takes the next batch when it is
free; a tensor that no device can hold is encoded on the CPU meanwhile. Only the batches in progress are in memory.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from threading import Event

import torch

from exl3_dflash.conversion.executor import LinearTask, Result
from exl3_dflash.target.placement import choose_device
from quantize.cuda_batch import run_together
from quantize.cuda_encoder import wave_tiles
from quantize.cuda_extension import load_extension
from quantize.cuda_plan import BatchLimits, LayerShape, join
from quantize.cuda_requirements import kernel_problem

log = logging.getLogger(__name__)

CPU = torch.device("cpu")


class DeviceExecutor:
    """Batches of tensors on CUDA devices.

    Args:
        devices: at least one CUDA device; the smallest decides how much a batch may take.
    """

    encoder = "exllamav3"  # what reports call its tile search

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = tuple(devices)

    def run(self, tasks: Iterable[LinearTask]) -> Generator[Result]:
        """See `executor.Executor`; closed early, batches end: on GPUs at their next step, on the CPU when done."""
        limits = device_limits(self._devices)
        free = [*self._devices, CPU]
        running: dict[Future[list[Result]], torch.device] = {}
        stop = Event()
        with ThreadPoolExecutor(len(free), "encode") as pool:
            try:
                for batch in join(tasks, shape_of, limits):
                    on_gpu = limits.hold(shape_of(batch[0]))
                    while not (fit := [device for device in free if (device != CPU) == on_gpu]):
                        yield from _finished(running, free)
                    free.remove(fit[0])
                    running[pool.submit(encode_batch, batch, fit[0], stop)] = fit[0]
                    del batch
                while running:
                    yield from _finished(running, free)
            finally:
                stop.set()


def _finished(running: dict[Future[list[Result]], torch.device], free: list[torch.device]) -> Generator[Result]:
    """Wait for at least one batch, and take the finished ones out."""
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        free.append(running.pop(future))
        yield from future.result()


def encode_batch(batch: Sequence[LinearTask], device: torch.device, stop: Event) -> list[Result]:
    """Encode tensors on one device, side by side if its memory allows it after all, until `stop` is set."""
    try:
        return _encode_together(batch, device, stop)
    except torch.OutOfMemoryError:
        if device == CPU:
            raise
    gc.collect()  # futures, their error and its frames hold each other, and the frames hold tensors
    torch.cuda.empty_cache()
    if len(batch) > 1:
        return [result for task in batch for result in encode_batch([task], device, stop)]
    log.warning("%s does not fit into the memory of %s: the CPU encodes it", batch[0].name, device)
    return _encode_together(batch, CPU, stop)


def _encode_together(batch: Sequence[LinearTask], device: torch.device, stop: Event) -> list[Result]:
    def encode(task: LinearTask) -> Result:
        # The CPU only gives orders to a GPU: one thread per tensor does.
        return task.name, task.run() if device == CPU else task.on_threads(1).to(device).run()

    return run_together([partial(encode, task) for task in batch], stop=stop)


def shape_of(task: LinearTask) -> LayerShape:
    """What the plan has to know of a task."""
    rows, columns = task.weight.shape
    return LayerShape(rows, columns, task.settings.bits, task.hessian is not None, task.output_hessian is not None)


def make_device_executor(device: str) -> DeviceExecutor | None:
    """The executor for the GPUs of `device`, see `encoding_devices`; None where they are none.

    ExLlamaV3's extension is imported here, and compiled where that has not been done: minutes that come before a job's
    hours, not in the middle of them.
    """
    devices = encoding_devices(device)
    if not devices:
        return None
    load_extension(str(devices[0]))
    return DeviceExecutor(devices)


def encoding_devices(device: str) -> tuple[torch.device, ...]:
    """Where the tensors of a job for `device` are encoded: CUDA devices, or none of them, which is the CPU.

    "cuda" and "auto" mean every GPU that can run ExLlamaV3's kernels. Where "auto" finds a GPU that cannot, the CPU
    encodes, and the log says why.

    Raises:
        Exl3DflashError: a CUDA device was asked for by name and lacks something.
    """
    chosen = choose_device(device)
    if chosen.type != "cuda":
        return ()
    problem = kernel_problem(chosen.index or 0)
    if problem is not None and device == "auto":
        log.warning("encoding on the CPU: %s", problem)
        return ()
    if problem is not None:
        raise problem
    if chosen.index is not None:
        return (chosen,)
    return tuple(torch.device("cuda", n) for n in range(torch.cuda.device_count()) if kernel_problem(n) is None)


def device_limits(devices: Sequence[torch.device]) -> BatchLimits:
    """Limits of a batch that every one of these CUDA devices can take, by what is free on them now."""
    torch.cuda.empty_cache()  # what calibration left is free as well
    free, total = min(torch.cuda.mem_get_info(device) for device in devices)
    return BatchLimits(free, total, max(wave_tiles(device) for device in devices))

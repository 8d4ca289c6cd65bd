"""Where the tensors of a job are encoded: here, in worker processes, or on a Ray cluster.

An executor takes tasks and gives back results as they are ready, in any order. Encoding is a pure function of the
task, whatever the number of threads and whoever else is at work, so every executor gives the same bytes (on CPUs of one
kind: another instruction set may round factorizations otherwise). Tasks are taken when there is a place for them: no
more weights are in memory than are being worked on.

One tensor at a time with all threads is the default: it needs the least memory. Several at a time pay where many cores
meet narrow tensors, whose tiles are too few to share out, and for the steps that run on one core.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from exl3_dflash.errors import Exl3DflashError
from quantize.encoder import default_threads
from quantize.hessian import Hessian
from quantize.linear import QuantizedLinear, QuantSettings, quantize_linear

EXECUTORS = ("local", "ray")

Result = tuple[str, QuantizedLinear]


@dataclass(frozen=True, eq=False)
class LinearTask:
    """One linear to encode: the arguments of `quantize.linear.quantize_linear`, plain data that can be sent anywhere.

    Attributes:
        name: of the linear.
        weight: (in, out).
        hessian, output_hessian: of inputs and outputs, where they are known.
        bias: (out,) or None.
        settings: how.
    """

    name: str
    weight: Tensor
    hessian: Hessian | None
    output_hessian: Hessian | None
    bias: Tensor | None
    settings: QuantSettings

    def run(self) -> QuantizedLinear:
        """Encode it, on the device of its weight; the result is on the CPU."""
        result = quantize_linear(
            self.weight,
            self.hessian,
            self.settings,
            output_hessian=self.output_hessian,
            bias=self.bias,
            name=self.name,
        )
        bias = None if result.bias is None else result.bias.cpu()
        return replace(result, trellis=result.trellis.cpu(), suh=result.suh.cpu(), svh=result.svh.cpu(), bias=bias)

    def to(self, device: torch.device | str) -> LinearTask:
        """The same task on another device."""
        return replace(
            self,
            weight=self.weight.to(device),
            hessian=_moved(self.hessian, device),
            output_hessian=_moved(self.output_hessian, device),
            bias=None if self.bias is None else self.bias.to(device),
        )

    def on_threads(self, threads: int) -> LinearTask:
        """The same task for so many threads."""
        return replace(self, settings=replace(self.settings, threads=threads))


def _moved(hessian: Hessian | None, device: torch.device | str) -> Hessian | None:
    return None if hessian is None else replace(hessian, matrix=hessian.matrix.to(device))


class Executor(Protocol):
    """Something that encodes tensors."""

    def run(self, tasks: Iterable[LinearTask]) -> Generator[Result]:
        """Names and results of all tasks, as they are ready; tasks are taken as there is a place for them.

        Closing the generator early, as Ctrl-C does, ends the work in progress and leaves no process behind.
        """
        ...


def make_executor(name: str, workers: int, threads: int, device: str = "cpu") -> Executor:
    """The executor of a job.

    Args:
        name: one of `EXECUTORS`.
        workers: tensors at a time; 0 means one (local), or as many as the cluster has room for (ray).
        threads: of the job, shared out between local workers, 0 for the physical cores; with ray the CPUs of one
            tensor, 0 for one.
        device: of the job, "auto", "cpu", "cuda" or "cuda:N". A local executor encodes there, unless it is asked for
            several workers, which are processes on the CPU.

    Raises:
        Exl3DflashError: unknown name, a number below 0, Ray is not installed, or what a CUDA device lacks.
    """
    if name not in EXECUTORS:
        raise Exl3DflashError(f"--executor {name!r}", expected=f"one of {', '.join(EXECUTORS)}", fix="use local")
    if workers < 0:
        raise Exl3DflashError(f"--workers {workers}", expected="a number of tensors at a time", fix="use 0 or more")
    if name == "ray":
        from exl3_dflash.conversion.ray_executor import RayExecutor

        return RayExecutor(workers, threads or 1)
    if workers > 1:
        return ProcessExecutor(workers, max(1, (threads or default_threads()) // workers))
    from exl3_dflash.conversion.device_executor import make_device_executor

    return make_device_executor(device) or InProcess()


class InProcess:
    """One tensor after the other, here."""

    def run(self, tasks: Iterable[LinearTask]) -> Generator[Result]:
        """See `Executor`."""
        for task in tasks:
            yield task.name, task.run()


class ProcessExecutor:
    """Several tensors at a time, each in a process of its own.

    Args:
        workers: processes.
        threads: of each.
    """

    def __init__(self, workers: int, threads: int) -> None:
        self._workers = workers
        self._threads = threads

    def run(self, tasks: Iterable[LinearTask]) -> Generator[Result]:
        """See `Executor`."""
        others = set(multiprocessing.active_children())
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(self._workers, context, initializer=_start_worker)
        try:
            yield from self._run(pool, tasks)
        except BrokenProcessPool as error:
            raise Exl3DflashError(
                "a worker process died while it encoded a tensor",
                expected="enough memory for --workers tensors at a time",
                fix="use fewer --workers, and --resume",
            ) from error
        except BaseException:  # GeneratorExit among them: the consumer has stopped
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _run(self, pool: ProcessPoolExecutor, tasks: Iterable[LinearTask]) -> Generator[Result]:
        running: dict[Future[bytes], str] = {}
        for task in tasks:
            data = pickle.dumps(task.to("cpu").on_threads(self._threads))
            running[pool.submit(_run_pickled, data)] = task.name
            if len(running) == self._workers:
                yield from _finished(running)
        while running:
            yield from _finished(running)


def _run_pickled(task: bytes) -> bytes:
    """Encode a task sent as bytes: a tensor as such would go through shared memory, of which containers have little."""
    loaded: LinearTask = pickle.loads(task)
    return pickle.dumps(loaded.run())


def _finished(running: dict[Future[bytes], str]) -> Generator[Result]:
    """Wait for at least one, and take the finished ones out."""
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        yield running.pop(future), pickle.loads(future.result())


def _start_worker() -> None:
    """Leave Ctrl-C to the parent, and end when it does, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

"""Tensors of a job encoded on a Ray cluster: the one that `RAY_ADDRESS` names, or one on this machine.

Ray moves inputs and results, places them, and tries a tensor again whose worker died; there is nothing here but the
mapping. The cluster's machines need the same exl3-dflash and CPUs of the same kind.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from exl3_dflash.conversion.executor import LinearTask, Result
from exl3_dflash.errors import Exl3DflashError


class RayExecutor:
    """Several tensors at a time on a Ray cluster.

    Args:
        workers: tensors at a time; 0 means as many as the cluster's CPUs have room for.
        threads: CPUs of each.

    Raises:
        Exl3DflashError: Ray is not installed.
    """

    def __init__(self, workers: int, threads: int) -> None:
        self._ray = _import_ray()
        self._workers = workers
        self._threads = threads

    def run(self, tasks: Iterable[LinearTask]) -> Generator[Result]:
        """See `exl3_dflash.conversion.executor.Executor`."""
        own = not self._ray.is_initialized()
        if own:
            self._start()
        running: dict[Any, str] = {}
        try:
            yield from self._run(tasks, running)
        finally:
            if own:
                self._ray.shutdown()  # ends what still runs, here or on a cluster
            else:
                for reference in running:
                    self._ray.cancel(reference)

    def _start(self) -> None:
        """Connect to the cluster of `RAY_ADDRESS`, or start one here."""
        try:
            with _own_sigterm():
                self._ray.init(log_to_driver=False, include_dashboard=False, logging_level="error")
        except ConnectionError as error:
            raise Exl3DflashError(
                f"the Ray cluster cannot be reached: {str(error).splitlines()[0]}",
                expected="the address of a running cluster in RAY_ADDRESS, or none",
                fix="start the cluster, or unset RAY_ADDRESS to work on this machine",
            ) from error

    def _run(self, tasks: Iterable[LinearTask], running: dict[Any, str]) -> Generator[Result]:
        """Results as they are ready; `running` are the names of tasks that are not, by Ray's references."""
        encode = self._ray.remote(LinearTask.run).options(num_cpus=self._threads)
        at_once = self._workers or max(1, self._cpus() // self._threads)
        for task in tasks:
            running[encode.remote(task.to("cpu").on_threads(self._threads))] = task.name
            if len(running) == at_once:
                yield self._next(running)
        while running:
            yield self._next(running)

    def _cpus(self) -> int:
        """CPUs of the cluster; a tensor that no machine has room for would wait for ever."""
        machines = [machine["Resources"].get("CPU", 0) for machine in self._ray.nodes() if machine["Alive"]]
        largest = int(max(machines, default=0))
        if largest < self._threads:
            raise Exl3DflashError(
                f"--threads {self._threads} on a Ray cluster whose largest machine offers {largest} CPUs",
                expected="a machine with as many",
                fix=f"use --threads {max(1, largest)}",
            )
        return int(sum(machines))

    def _next(self, running: dict[Any, str]) -> Result:
        """Wait for one, and take it out."""
        errors = self._ray.exceptions
        (reference,), _ = self._ray.wait(list(running), num_returns=1)
        name = running.pop(reference)
        try:
            return name, self._ray.get(reference)
        except errors.RayTaskError as error:
            raise error.cause from error
        except errors.RayError as error:
            raise Exl3DflashError(
                f"Ray could not encode {name}: {str(error).splitlines()[0]}",
                expected="workers with enough memory and the same exl3-dflash",
                fix="see Ray's log, then continue with --resume",
            ) from error


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Put the program's handler back afterwards: Ray sets its own, which exits with another code."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _import_ray() -> Any:
    try:
        ray = import_module("ray")
        _ = ray.init  # a folder called ray imports as well
    except (ImportError, AttributeError) as error:
        raise Exl3DflashError(
            "--executor ray needs the package ray, which is not installed",
            expected="exl3-dflash with its extra `ray`",
            fix="pip install 'exl3-dflash[ray]', or use --executor local",
        ) from error
    return ray

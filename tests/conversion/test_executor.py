"""Wherever tensors are encoded, the bytes are the same, and whoever stops a job leaves no process behind."""

from __future__ import annotations

import importlib.util
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from exl3_dflash.conversion import ray_executor
from exl3_dflash.conversion.executor import InProcess, LinearTask, ProcessExecutor, make_executor
from exl3_dflash.conversion.job import quantize_drafter
from exl3_dflash.errors import Exl3DflashError
from quantize.hessian import Hessian
from quantize.linear import QuantizedLinear, QuantSettings
from tests.conversion.small_job import contents, job_in, make_pair

SIZE = 128


def make_tasks(count: int = 3) -> list[LinearTask]:
    generator = torch.Generator().manual_seed(0)

    def hessian() -> Hessian:
        rows = torch.randn(2 * SIZE, SIZE, generator=generator)
        return Hessian(rows.T @ rows / len(rows), len(rows), len(rows), 0)

    return [
        LinearTask(
            name=f"linear-{number}",
            weight=torch.randn(SIZE, SIZE, generator=generator),
            hessian=hessian() if number else None,
            output_hessian=hessian() if number > 1 else None,
            bias=torch.randn(SIZE, generator=generator) if number else None,
            settings=QuantSettings(bits=3, seed=number, threads=1),
        )
        for number in range(count)
    ]


def stored(linear: QuantizedLinear) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in linear.tensors("x").items()}


def encoded_here() -> dict[str, dict[str, bytes]]:
    return {name: stored(linear) for name, linear in InProcess().run(make_tasks())}


def test_a_process_gives_the_same_bytes_and_ends_when_the_work_is_stopped() -> None:
    taken = []

    def tasks() -> Iterator[LinearTask]:
        for task in make_tasks(4):
            taken.append(task.name)
            yield task

    results = {}
    with closing(ProcessExecutor(1, 1).run(tasks())) as running:
        for name, linear in running:
            results[name] = stored(linear)
            assert len(taken) <= len(results) + 1, "no more tasks are made than are worked on"
            if len(results) == 3:
                break
        assert multiprocessing.active_children() != []
    assert multiprocessing.active_children() == []
    assert results == encoded_here()


def test_a_worker_that_dies_is_an_error_and_not_a_wait() -> None:
    running = ProcessExecutor(1, 1).run(make_tasks())
    next(running)
    for process in multiprocessing.active_children():
        process.kill()
    with pytest.raises(Exl3DflashError, match="a worker process died"):
        list(running)
    assert multiprocessing.active_children() == []


def test_a_whole_job_has_the_same_bytes_on_two_threads_in_two_processes(tmp_path: Path) -> None:
    settings = make_pair(tmp_path)
    for name, options in (("a", {"threads": 1}), ("b", {"threads": 2, "workers": 2})):
        (tmp_path / name).mkdir()
        quantize_drafter(job_in(settings, tmp_path / name, **options))
    assert contents(tmp_path / "a" / "out") == contents(tmp_path / "b" / "out")


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra `ray`")
def test_ray_gives_the_same_bytes() -> None:
    results = {name: stored(linear) for name, linear in make_executor("ray", 2, 1).run(make_tasks())}
    assert results == encoded_here()


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra `ray`")
def test_ray_ends_when_the_work_is_stopped() -> None:
    import ray

    with closing(make_executor("ray", 2, 1).run(make_tasks())) as running:
        next(running)
        assert ray.is_initialized()
    assert not ray.is_initialized()


def test_ray_that_is_not_installed_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(ray_executor, "import_module", missing)
    with pytest.raises(Exl3DflashError, match=r"ray, which is not installed.*pip install 'exl3-dflash\[ray\]'"):
        make_executor("ray", 0, 0)


@pytest.mark.parametrize(("name", "workers", "said"), [("cluster", 0, "'cluster'"), ("local", -1, "--workers -1")])
def test_wrong_choices_are_refused(name: str, workers: int, said: str) -> None:
    with pytest.raises(Exl3DflashError, match=said):
        make_executor(name, workers, 1)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks processes up in /proc")
def test_workers_end_with_a_parent_that_is_killed() -> None:
    code = """
import multiprocessing, os, signal
from exl3_dflash.conversion.executor import ProcessExecutor
from tests.conversion.test_executor import make_tasks
if __name__ == "__main__":
    running = ProcessExecutor(1, 1).run(make_tasks())
    next(running)
    print(multiprocessing.active_children()[0].pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    parent = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=120, check=False)
    worker = Path("/proc") / parent.stdout.strip()
    for _ in range(200):
        if not worker.exists() or worker.joinpath("stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the worker outlived its parent")

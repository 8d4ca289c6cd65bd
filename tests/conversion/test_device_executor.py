"""Tensors on CUDA devices: batches, several devices, and the CPU for what no device can hold."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from exl3_dflash.conversion import device_executor
from exl3_dflash.conversion import job as job_module
from exl3_dflash.conversion.device_executor import DeviceExecutor, encoding_devices, shape_of
from exl3_dflash.conversion.executor import InProcess, LinearTask, ProcessExecutor, make_executor
from exl3_dflash.conversion.job import quantize_drafter
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.target import placement
from quantize.cuda_plan import RESERVED, BatchLimits, LayerShape, scratch_bytes
from quantize.linear import QuantSettings
from tests.conversion.small_job import contents, job_in, make_pair
from tests.quantize.gpu_stand_in import GPU, EncoderStub, fake_gpu, run_on_fake_gpu
from tests.quantize.layer_samples import correlated_rows, hessian_of, uneven_weight

DEVICES = (GPU, torch.device("cuda:1"))


def task(name: str, rows: int, bits: float = 6) -> LinearTask:
    settings = QuantSettings(bits=bits, encoder="fast", threads=1, seed=len(name))
    hessian = hessian_of(correlated_rows(256, rows))
    return LinearTask(name, uneven_weight(rows, 128), hessian, None, torch.ones(128), settings)


def with_room_for(shape: LayerShape, wave: int) -> BatchLimits:
    """A GPU that holds just this layer."""
    return BatchLimits(shape.peak_bytes() + RESERVED + scratch_bytes(shape.bits, wave), 1 << 40, wave)


def test_results_are_those_of_the_cpu_and_tensors_share_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [task("a", 128), task("b", 256), task("c", 128, bits=5)]
    wanted = {task.name: task.run().tensors("x") for task in tasks}
    together = []
    monkeypatch.setattr(
        device_executor, "run_together", lambda works, stop: (together.append(len(works)), run_on_fake_gpu(works))[1]
    )
    with fake_gpu(EncoderStub(encoder="fast")) as kernels:
        found = {name: linear.tensors("x") for name, linear in DeviceExecutor([GPU]).run(tasks)}
    assert together == [2, 1], "a and b side by side, c at another rate"
    assert {bits for _, bits, _ in kernels.calls} == {5, 6}
    for name, tensors in wanted.items():
        for key, tensor in tensors.items():
            assert type(found[name][key]) is torch.Tensor, "results are on the CPU"
            assert torch.equal(found[name][key], tensor)


def test_a_whole_job_writes_the_files_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two-sided calibration, all tensors on the pretended GPU, the kernels replaced by the CPU's search."""
    job = job_in(make_pair(tmp_path), tmp_path / "cpu", encoder="fast", eval_rows=0)
    quantize_drafter(job)
    monkeypatch.setattr(job_module, "make_executor", lambda *asked: DeviceExecutor([GPU]))
    monkeypatch.setattr(device_executor, "run_together", lambda works, stop: run_on_fake_gpu(works))
    with fake_gpu(EncoderStub(encoder="fast")) as kernels:
        quantize_drafter(job_in(job, tmp_path / "gpu"))
        assert len(kernels.calls) > 10
    on_cpu, on_gpu = (contents(tmp_path / name / "out") for name in ("cpu", "gpu"))
    assert on_gpu.keys() == on_cpu.keys() >= {"model.safetensors", "config.json", "quantize_report.json"}
    reports = [json.loads(files.pop("quantize_report.json")) for files in (on_cpu, on_gpu)]
    assert [report.pop("encoder") for report in reports] == ["fast", "exllamav3"]
    assert reports[0] == reports[1]
    assert [name for name in on_cpu if on_gpu[name] != on_cpu[name]] == []


def test_too_large_tensors_go_to_the_cpu_and_the_rest_to_any_free_device(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [task("a", 256), *(task(name, 128) for name in "bcde")]
    limits = with_room_for(shape_of(tasks[1]), wave=1)
    monkeypatch.setattr(device_executor, "device_limits", lambda devices: limits)
    three, seen = threading.Barrier(3, timeout=20), []

    def encode_batch(batch: list[LinearTask], device: torch.device, stop: threading.Event) -> list[tuple[str, None]]:
        seen.append(("".join(task.name for task in batch), device.type))
        if len(seen) <= 3:
            three.wait()  # three at a time, or this never returns
        return [(task.name, None) for task in batch]

    monkeypatch.setattr(device_executor, "encode_batch", encode_batch)
    names = [name for name, _ in DeviceExecutor(DEVICES).run(tasks)]
    assert sorted(names) == list("abcde")
    assert sorted(seen) == [("a", "cpu"), ("b", "cuda"), ("c", "cuda"), ("d", "cuda"), ("e", "cuda")]


def test_only_batches_in_progress_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def tasks() -> Iterator[LinearTask]:
        for name in "abcd":
            made.append(name)
            yield task(name, 128)

    monkeypatch.setattr(
        device_executor, "device_limits", lambda devices: with_room_for(shape_of(task("x", 128)), wave=1)
    )
    monkeypatch.setattr(device_executor, "encode_batch", lambda batch, device, stop: [(batch[0].name, None)])
    results = DeviceExecutor([GPU]).run(tasks())
    assert next(results)[0] == "a"
    assert len(made) <= 3, "one in progress, one waiting for the device, one that did not join it"
    assert [name for name, _ in results] == ["b", "c", "d"]


def test_an_error_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = task("bad", 128)
    bad.weight.fill_(float("nan"))
    monkeypatch.setattr(device_executor, "run_together", lambda works, stop: run_on_fake_gpu(works))
    with fake_gpu(EncoderStub()), pytest.raises(Exl3DflashError, match="bad holds 16384 values"):
        list(DeviceExecutor([GPU]).run([bad]))


def test_what_does_not_fit_after_all_is_encoded_alone_or_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LinearTask, "to", lambda task, device: replace(task, name=f"{task.name} {device}"))
    monkeypatch.setattr(LinearTask, "run", lambda task: task.name)

    def together(works: list[Callable[[], Any]], stop: threading.Event) -> list[Any]:
        results = [work() for work in works]
        if len(works) > 1 or results[0][1] == "b cuda:0":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return results

    monkeypatch.setattr(device_executor, "run_together", together)
    results = device_executor.encode_batch([task(name, 128) for name in "abc"], GPU, threading.Event())
    assert results == [("a", "a cuda:0"), ("b", "b"), ("c", "c cuda:0")]
    assert "b does not fit into the memory of cuda:0: the CPU encodes it" in caplog.text


def test_a_batch_that_did_not_fit_is_out_of_memory_before_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that failed keep their tensors alive through their errors, until these are collected."""
    moved: list[weakref.ref[torch.Tensor]] = []

    def to(task: LinearTask, device: torch.device) -> LinearTask:
        weight = task.weight.clone()
        moved.append(weakref.ref(weight))
        return replace(task, weight=weight)

    def run(task: LinearTask) -> bool:
        if len(moved) <= 2:
            both.wait()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return all(weight() is None for weight in moved[:2])

    both = threading.Barrier(2, timeout=20)
    monkeypatch.setattr(LinearTask, "to", to)
    monkeypatch.setattr(LinearTask, "run", run)
    gc.disable()
    try:
        results = device_executor.encode_batch([task(name, 128) for name in "ab"], GPU, threading.Event())
    finally:
        gc.enable()
    assert results == [("a", True), ("b", True)]


def test_closing_early_ends_the_work_at_its_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def encode_batch(batch: list[LinearTask], device: torch.device, stop: threading.Event) -> list[tuple[str, None]]:
        if batch[0].name != "a":
            assert stop.wait(20)
            ended.set()
        return [(batch[0].name, None)]

    monkeypatch.setattr(
        device_executor, "device_limits", lambda devices: with_room_for(shape_of(task("x", 128)), wave=1)
    )
    monkeypatch.setattr(device_executor, "encode_batch", encode_batch)
    results = DeviceExecutor(DEVICES).run(task(name, 128) for name in "abc")
    assert next(results)[0] == "a"
    results.close()
    assert ended.is_set()


def test_where_tensors_are_encoded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    lacking = dict.fromkeys((1,), Exl3DflashError("GPU 1 is too old"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(placement, "check_cuda_device", lambda device: None)
    monkeypatch.setattr(device_executor, "kernel_problem", lacking.get)
    zero, two = torch.device("cuda:0"), torch.device("cuda:2")
    assert encoding_devices("cpu") == ()
    assert encoding_devices("auto") == encoding_devices("cuda") == (zero, two)
    assert encoding_devices("cuda:2") == (two,)
    with pytest.raises(Exl3DflashError, match="too old"):
        encoding_devices("cuda:1")
    lacking[0] = Exl3DflashError("nvcc is not found")
    with pytest.raises(Exl3DflashError, match="nvcc"):
        encoding_devices("cuda")
    assert encoding_devices("auto") == ()
    assert "encoding on the CPU: nvcc is not found" in caplog.text
    imported: list[str] = []
    monkeypatch.setattr(device_executor, "load_extension", imported.append)
    assert isinstance(make_executor("local", 0, 1, "cuda:2"), DeviceExecutor)
    assert imported == ["cuda:2"], "before the job begins"
    assert isinstance(make_executor("local", 2, 1, "cuda:2"), ProcessExecutor)
    assert isinstance(make_executor("local", 0, 1, "auto"), InProcess)
    assert imported == ["cuda:2"]

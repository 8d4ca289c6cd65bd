"""A job that is killed goes on where it was, and ends with the same bytes as an undisturbed one."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from exl3_dflash.conversion import job as job_module
from exl3_dflash.conversion.job import quantize_drafter
from exl3_dflash.conversion.tuning import TuningSettings
from exl3_dflash.conversion.work_directory import WorkDirectory
from tests.conversion.small_job import contents, job_in, make_pair
from tests.tiny_models import make_tiny_drafter
from tests.tiny_targets import make_tiny_llama

KILLS = 3


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of a small job, without --out."""
    folder = tmp_path_factory.mktemp("pair")
    text = folder / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, again and again.\n\n" * 60)
    target, drafter = make_tiny_llama(folder / "target"), make_tiny_drafter(folder / "drafter", num_hidden_layers=1)
    sizes = ["--cal-rows", "4", "--cal-cols", "64", "--eval-rows", "2", "--threads", "1", "--bits", "6"]
    command = [sys.executable, "-m", "exl3_dflash", "quantize", str(drafter), "--target", str(target)]
    return [*command, "--cal-data", str(text), *sizes, "-q"]


@pytest.fixture(scope="module")
def undisturbed(job: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """An output, and the seconds it took."""
    folder = tmp_path_factory.mktemp("undisturbed")
    start = time.perf_counter()
    subprocess.run([*job, "--out", str(folder / "out")], check=True, timeout=120)
    seconds = time.perf_counter() - start
    assert [path.name for path in folder.iterdir()] == ["out"], "the work directory is gone after success"
    return folder / "out", seconds


@pytest.mark.parametrize("number", range(KILLS))
def test_killed_and_resumed_jobs_end_with_the_same_bytes(
    job: list[str], undisturbed: tuple[Path, float], tmp_path: Path, number: int
) -> None:
    reference, seconds = undisturbed
    out = tmp_path / "out"
    running = subprocess.Popen([*job, "--out", str(out)])
    time.sleep(seconds * (number + random.Random(number).random()) / KILLS)
    running.send_signal(signal.SIGKILL)
    running.wait()
    if not out.exists():
        resume = ["--resume"] if (tmp_path / "out.work" / "manifest.json").exists() else []
        subprocess.run([*job, "--out", str(out), *resume], check=True, timeout=120)
    assert contents(out) == contents(reference)
    leftovers = [path.name for path in tmp_path.iterdir() if path.name not in ("out", "out.work")]
    assert leftovers == []


class Killed(BaseException):
    """The end of a process, as far as that can be had in one."""


def test_a_job_stopped_after_each_of_its_steps_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job with every kind of step: mixed bits, tuned, with the tap shift left open."""
    settings = replace(make_pair(tmp_path), bits=2.25, tune=True, cal_rows=8)
    make_tiny_drafter(tmp_path / "drafter", num_hidden_layers=1)
    monkeypatch.setattr(job_module, "TuningSettings", partial(TuningSettings, epochs=1, anchors_per_row=4))
    quantize_drafter(job_in(settings, tmp_path / "undisturbed"))
    save, steps = WorkDirectory.save, []

    def saved_and_killed(self: WorkDirectory, step: str, *result: Any) -> None:
        save(self, step, *result)
        steps.append(step)
        raise Killed

    monkeypatch.setattr(WorkDirectory, "save", saved_and_killed)
    done = False
    while not done:
        try:
            quantize_drafter(job_in(settings, tmp_path, resume=bool(steps)))
            done = True
        except Killed:
            assert len(set(steps)) == len(steps), "a finished step was done again"
    assert {"rows", "unquantized", "calibration", "plan", "tuning", "report"} < set(steps)
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed" / "out")
    assert not (tmp_path / "out.work").exists()


def test_sigterm_leaves_no_output_and_says_how_to_go_on(job: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    running = subprocess.Popen([*job, "--out", str(out)], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "out.work" / "rows.safetensors").exists():
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(signal.SIGTERM)
    _, stderr = running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGTERM
    assert "--resume continues" in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out.work"]

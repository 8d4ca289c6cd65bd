"""Results of a job survive whatever ends it, and never mix with those of another job."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from exl3_dflash.conversion.work_directory import WorkDirectory
from exl3_dflash.errors import Exl3DflashError


@contextmanager
def job(path: Path, manifest: dict[str, Any] | None = None, **options: Any) -> Iterator[WorkDirectory]:
    """The work directory of a job that has begun."""
    with WorkDirectory(path, **options) as work:
        work.begin(MANIFEST if manifest is None else manifest)
        yield work


MANIFEST = {"settings": {"bits": 4.0, "seed": 0}, "source": "abc"}
TENSORS = {"trellis": torch.arange(12, dtype=torch.int16).reshape(3, 4), "mul1": torch.tensor(-5, dtype=torch.int32)}


def test_a_result_comes_back_as_it_was(tmp_path: Path) -> None:
    with job(tmp_path / "w") as work:
        assert work.load("fc") is None
        work.save("fc", TENSORS, {"error": 0.25, "fallback": None})
    with job(tmp_path / "w", resume=True) as work:
        result = work.load("fc")
        assert result is not None
        assert result.facts == {"error": 0.25, "fallback": None}
        assert set(result.tensors) == set(TENSORS)
        assert all(torch.equal(result.tensors[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "facts"])
def test_a_damaged_result_counts_as_missing(tmp_path: Path, damage: str) -> None:
    with job(tmp_path / "w") as work:
        work.save("fc", TENSORS, {"error": 0.25})
        file = tmp_path / "w" / "fc.safetensors"
        content = bytearray(file.read_bytes())
        if damage == "truncated":
            content = content[:-3]
        elif damage == "flipped":
            content[-1] ^= 1
        elif damage == "empty":
            content = bytearray()
        else:
            content = bytearray(bytes(content).replace(b"0.25", b"0.52"))
        file.write_bytes(content)
        assert work.load("fc") is None
        work.save("fc", TENSORS, {"error": 0.25})
        assert work.load("fc") is not None


def test_an_unfinished_job_needs_a_decision(tmp_path: Path) -> None:
    with job(tmp_path / "w") as work:
        work.save("fc", TENSORS, {})
    with pytest.raises(Exl3DflashError, match=r"unfinished job.*--resume"), job(tmp_path / "w"):
        pass
    with job(tmp_path / "w", restart=True) as work:
        assert work.load("fc") is None


def test_another_job_is_refused_naming_the_difference(tmp_path: Path) -> None:
    with job(tmp_path / "w") as work:
        work.save("fc", TENSORS, {})
    changed = {"settings": {"bits": 6.0, "seed": 0}, "source": "abd"}
    with pytest.raises(Exl3DflashError) as error, job(tmp_path / "w", changed, resume=True):
        pass
    assert "settings.bits was 4.0, is 6.0" in str(error.value)
    assert "source was abc, is abd" in str(error.value)
    with job(tmp_path / "w", resume=True) as work:
        assert work.load("fc") is not None, "nothing was lost by the refusal"


def test_nothing_to_resume_is_said(tmp_path: Path) -> None:
    with pytest.raises(Exl3DflashError, match="no job to resume"), job(tmp_path / "w", {}, resume=True):
        pass
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize("restart", [False, True])
def test_a_directory_of_other_things_is_left_alone(tmp_path: Path, restart: bool) -> None:
    (tmp_path / "thesis.tex").write_text("three years of work")
    with pytest.raises(Exl3DflashError, match=r"thesis\.tex"), job(tmp_path, restart=restart):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def _hold(path: Path, held: multiprocessing.synchronize.Event, done: multiprocessing.synchronize.Event) -> None:
    with job(path):
        held.set()
        done.wait(30)


def test_a_second_job_is_refused_while_the_first_runs(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held, done = context.Event(), context.Event()
    first = context.Process(target=_hold, args=(tmp_path / "w", held, done))
    first.start()
    try:
        assert held.wait(60)
        with (
            pytest.raises(Exl3DflashError, match="another job is running"),
            job(tmp_path / "w", resume=True),
        ):
            pass
    finally:
        done.set()
        first.join()


def test_a_killed_job_leaves_its_lock_free_and_its_results_whole(tmp_path: Path) -> None:
    code = f"""
import torch
from pathlib import Path
from exl3_dflash.conversion.work_directory import WorkDirectory
with WorkDirectory(Path({str(tmp_path / "w")!r})) as work:
    work.begin({MANIFEST!r})
    print("held", flush=True)
    for number in range(100000):
        work.save(f"step-{{number % 7}}", {{"x": torch.full((1000,), number)}}, {{"number": number}})
"""
    running = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert running.stdout is not None
    assert running.stdout.readline().strip() == b"held"
    while len(list((tmp_path / "w").glob("*.safetensors"))) < 7:
        pass
    running.send_signal(signal.SIGKILL)
    running.wait()
    with job(tmp_path / "w", resume=True) as work:
        for number in range(7):
            result = work.load(f"step-{number}")
            assert result is not None
            assert (result.tensors["x"] == result.facts["number"]).all()


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with job(tmp_path / "w") as work:
        work.save("fc", TENSORS, {})
        monkeypatch.setattr("exl3_dflash.conversion.work_directory.write_file", full)
        with pytest.raises(Exl3DflashError, match=r"w cannot be written: No space left.*free some space"):
            work.save("next", TENSORS, {})
        assert work.load("fc") is not None


def test_a_job_that_finished_no_step_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), job(tmp_path / "w"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_finished_job_leaves_nothing(tmp_path: Path) -> None:
    with job(tmp_path / "w") as work:
        work.save("fc", TENSORS, {})
        work.remove()
    assert list(tmp_path.iterdir()) == []

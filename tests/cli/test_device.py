"""`--device cuda` on a machine without CUDA: one line, exit code 1, at once, and nothing was loaded."""

from __future__ import annotations

import inspect
import subprocess
import sys
import time

import pytest

from exl3_dflash.cli import app as app_module
from exl3_dflash.cli.app import main
from quantize.cuda_requirements import gpu_problem

ARGUMENTS = {
    "quantize": ["no-drafter", "--target", "no-target", "--out", "no-out"],
    "chat": ["--target", "no-target", "--drafter", "no-drafter", "--prompt", "hi"],
    "doctor": ["no-drafter", "--target", "no-target"],
    "eval": ["--target", "no-target", "--drafter", "no-drafter"],
}
HEAVY = ("torch", "transformers", "exllamav3", "numpy", "safetensors")
WATCH = f"""
import sys
from exl3_dflash.cli.app import main
try:
    main(sys.argv[1:])
finally:
    print(sorted(set({HEAVY!r}) & set(sys.modules)))
"""

without_cuda = pytest.mark.skipif(gpu_problem() is None, reason="CUDA can be used here")


def commands_with_device() -> list[str]:
    commands = app_module.app.registered_commands
    return [str(c.name) for c in commands if c.callback and "device" in inspect.signature(c.callback).parameters]


def arguments(command: str) -> list[str]:
    """The command with what it requires, none of which exists."""
    return [command, *ARGUMENTS[command], "--device", "cuda"]


@without_cuda
@pytest.mark.parametrize("command", commands_with_device())
def test_every_command_refuses_in_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments(command))
    assert stop.value.code == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"error: {gpu_problem()}\n"


@without_cuda
def test_the_refusal_loads_nothing_and_is_quick() -> None:
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        run = subprocess.run(
            [sys.executable, "-c", WATCH, *arguments("quantize")], capture_output=True, text=True, timeout=60
        )
        best = min(best, time.perf_counter() - start)
        assert (run.returncode, run.stdout) == (1, "[]\n")
        assert run.stderr.startswith("error: CUDA cannot be used: ")
        assert len(run.stderr.splitlines()) == 1
    assert best < 3.0

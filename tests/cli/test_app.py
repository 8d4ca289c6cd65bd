"""The program around the commands: quick help, one line per error, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from exl3_dflash.cli import app as app_module
from exl3_dflash.cli.app import main
from exl3_dflash.errors import Exl3DflashError

HEAVY = ("torch", "transformers", "exllamav3", "numpy", "safetensors", "rich", "prompt_toolkit")


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return int(stop.value.code or 0)


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = "import sys, json; import exl3_dflash.cli.app; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not set(HEAVY) & set(json.loads(run.stdout))
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "exl3_dflash", "--help"], capture_output=True, check=True, timeout=60)
        best = min(best, time.perf_counter() - start)
    assert best < 0.5


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in app_module.app.registered_commands:
        assert exit_code(str(command.name), "--help") == 0
        assert str(command.name) in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--version") == 0
    assert capsys.readouterr().out.startswith("exl3-dflash ")


def test_usage_errors_exit_with_2() -> None:
    assert exit_code("quantize", "--no-such-option") == 2
    assert exit_code("no-such-command") == 2


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Exl3DflashError("fc.weight is missing", "it in the file", "download\nagain"), "error: fc.weight is missing"),
        (PermissionError(13, "Permission denied", "out"), "error: [Errno 13] Permission denied"),
        (ZeroDivisionError("division"), "internal error: ZeroDivisionError: division"),
    ],
)
@pytest.mark.parametrize("debug", [False, True])
def test_errors_are_one_line_with_a_traceback_only_on_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception, said: str, debug: bool
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(app_module, "app", fail)
    monkeypatch.setenv("EXL3_DFLASH_DEBUG", "1" if debug else "0")
    assert exit_code("quantize") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert lines[-1].startswith(said)
    assert (len(lines) > 1) == debug


def test_no_memory_left_is_no_bug(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As it really comes: PyTorch's CPU allocator and its error on a GPU, and Python's own."""
    import torch

    for fail in (
        lambda **_: torch.empty(1 << 50),
        lambda **_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")),
        lambda **_: bytearray(1 << 62),
    ):
        monkeypatch.setattr(app_module, "app", fail)
        assert exit_code("quantize") == 1
        line = capsys.readouterr().err
        assert line.startswith("error: out of memory (")
        assert "fix: end other programs" in line


def test_ctrl_c_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app_module, "app", interrupt)
    assert exit_code("chat") == 130

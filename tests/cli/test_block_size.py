"""FIELD_REPORTS 5, for a published config that has no block size: looked at as it is, run with `--block-size`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exl3_dflash.cli.app import main
from exl3_dflash.drafter.config import DrafterConfig
from tests.tiny_models import make_tiny_drafter
from tests.tiny_targets import make_tiny_llama

SMALL = ("--cal-rows", 2, "--cal-cols", 64, "--eval-rows", 0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    drafter = make_tiny_drafter(folder / "drafter", num_hidden_layers=1)
    config = json.loads((drafter / "config.json").read_text())
    assert config.pop("block_size") == 4
    (drafter / "config.json").write_text(json.dumps(config))
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n\n" * 60)
    return make_tiny_llama(folder / "target"), drafter


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def commands(pair: tuple[Path, Path], out: Path) -> dict[str, tuple[object, ...]]:
    target, drafter = pair
    text = target.parent / "text.txt"
    both = ("--target", target, "--drafter", drafter)
    return {
        "quantize": ("quantize", drafter, "--target", target, "--out", out, "--cal-data", text, *SMALL),
        "uncalibrated": ("quantize", drafter, "--calibration", "none", "--out", out),
        "eval": ("eval", *both, "--rows", 2, "--cols", 64, "--data", text),
        "chat": ("chat", *both, "--prompt", "hello", "--max-new-tokens", 4),
        "doctor": ("doctor", drafter, "--target", target, "--rows", 0),
    }


@pytest.mark.parametrize("command", ["quantize", "uncalibrated", "eval", "chat", "doctor"])
def test_a_missing_block_size_is_asked_for_and_taken(capsys, pair, tmp_path: Path, command: str) -> None:
    arguments = commands(pair, tmp_path / "out")[command]
    code, stdout, stderr = run(capsys, *arguments, "--threads", 1, "-q")
    assert code == 1
    assert "no 'block_size'" in stdout + stderr
    assert "--block-size N" in stdout + stderr
    assert list(tmp_path.iterdir()) == []
    code, stdout, stderr = run(capsys, *arguments, "--threads", 1, "-q", "--block-size", 4)
    assert code == 0, stdout + stderr
    if arguments[0] == "quantize":
        assert DrafterConfig.from_directory(tmp_path / "out").block_size == 4


def test_inspect_shows_it_as_unknown(capsys, pair) -> None:
    code, stdout, _ = run(capsys, "inspect", pair[1], "--json")
    found = json.loads(stdout)
    assert code == 0
    assert (found["problems"], found["drafter"]["block_size"]) == ([], None)
    assert "unknown number of tokens" in run(capsys, "inspect", pair[1], "--no-tensors")[1]


def test_another_than_the_config_says_is_refused(capsys, pair, tmp_path: Path) -> None:
    stated = make_tiny_drafter(tmp_path / "stated", num_hidden_layers=1)
    code, _, stderr = run(capsys, "chat", "--target", pair[0], "--drafter", stated, "--block-size", 8, "-q")
    assert code == 1
    assert "--block-size 8, but config.json of the drafter says 4" in stderr

"""`exl3-dflash doctor`: its JSON, its exit code, and faults that are findings and never crashes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exl3_dflash.cli.app import main
from tests.tiny_models import make_tiny_drafter
from tests.tiny_targets import make_tiny_llama


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return make_tiny_llama(folder / "target"), make_tiny_drafter(folder / "drafter")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["doctor", *[str(argument) for argument in arguments], "-q", "--threads", "1"])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def test_files_alone_are_looked_at_with_no_rows(capsys, pair) -> None:
    code, stdout, stderr = run(capsys, pair[1], "--target", pair[0], "--rows", 0)
    assert code == 0, stderr
    assert "verdict: healthy" in stdout
    assert "acceptance" not in stdout


def test_a_drafter_that_accepts_nothing_is_not_healthy(capsys, pair) -> None:
    """The tiny target thinks: FIELD_REPORTS 11 is measured, too."""
    code, stdout, _ = run(capsys, pair[1], "--target", pair[0], "--rows", 4, "--cols", 1024, "--json")
    assert code == 1
    found = json.loads(stdout)
    assert found["healthy"] is False
    assert found["verdict"]["cause"] == "target"
    by_name = {check["name"]: check for check in found["checks"]}
    assert all(set(check) >= {"name", "status", "seen", "advice"} for check in found["checks"])
    assert by_name["acceptance"]["status"] == "fail"
    assert "thinking on" in by_name["thinking"]["seen"]
    assert set(found["acceptance"]) >= {"accept_length", "ci95", "position_acceptance", "anchors", "rows"}
    assert len(found["acceptance"]["position_acceptance"]) == 3


@pytest.mark.parametrize("fault", ["no drafter", "no target", "swapped", "broken"])
def test_every_fault_is_a_finding(capsys, pair, tmp_path: Path, fault: str) -> None:
    target, drafter = pair
    if fault == "no drafter":
        drafter = tmp_path / "nowhere"
    elif fault == "no target":
        target = tmp_path / "nowhere"
    elif fault == "swapped":
        target, drafter = drafter, target
    else:
        drafter = make_tiny_drafter(tmp_path / "broken")
        (drafter / "model.safetensors").write_bytes(b"not weights")
    code, stdout, stderr = run(capsys, drafter, "--target", target, "--json")
    assert code == 1, stderr
    found = json.loads(stdout)
    failed = [check for check in found["checks"] if check["status"] == "fail"]
    assert failed
    assert found["verdict"]["cause"]
    assert found["acceptance"] is None

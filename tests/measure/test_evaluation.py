"""`exl3-dflash eval` end to end on tiny pairs: its JSON, its groups, its refusals, and the plot."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from exl3_dflash.cli.app import main
from exl3_dflash.measure.plots import PlotEntry, plot_fidelity
from tests.tiny_models import make_tiny_drafter
from tests.tiny_targets import CHAT_TEMPLATE, make_tiny_llama

DRAFTER_KEYS = {"name", "accept_length", "ci95", "retention", "retention_ci95", "position_acceptance", "kl"}


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("family")
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog, again and again.\n\n" * 40)
    target = make_tiny_llama(folder / "target")
    first = make_tiny_drafter(folder / "first", num_hidden_layers=1)
    return target, first, make_tiny_drafter(folder / "second", num_hidden_layers=1, seed=1)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["eval", *[str(argument) for argument in arguments], "-q", "--threads", "1"])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def test_json_follows_the_contract(capsys, family) -> None:
    target, first, second = family
    options = ("--data", target.parent / "text.txt", "--rows", 3, "--cols", 64, "--json")
    code, stdout, stderr = run(capsys, "--target", target, "--drafter", first, "--drafter", second, *options)
    assert code == 0, stderr
    result = json.loads(stdout)
    assert set(result) >= {"drafters", "anchors", "rows", "by_kind", "by_thinking", "versions", "target", "settings"}
    assert [drafter["name"] for drafter in result["drafters"]] == ["first", "second"]
    assert all(set(drafter) >= DRAFTER_KEYS for drafter in result["drafters"])
    reference, other = result["drafters"]
    assert (reference["retention"], reference["retention_ci95"], reference["kl"]) == (1.0, [1.0, 1.0], 0.0)
    assert other["kl"] > 0
    assert other["retention"] == pytest.approx(other["accept_length"] / reference["accept_length"])
    assert all(len(drafter["position_acceptance"]) == 3 for drafter in result["drafters"])
    assert (result["rows"], result["anchors"]) == (3, 3 * (64 - 3 - 1))


def test_kinds_and_thinking_are_told_apart(capsys, family) -> None:
    """FIELD_REPORTS 11: thinking on and off are both measured."""
    target, first, _ = family
    options = ("--thinking", "both", "--rows", 3, "--cols", 1024, "--json")
    code, stdout, stderr = run(capsys, "--target", target, "--drafter", first, *options)
    assert code == 0, stderr
    result = json.loads(stdout)
    assert set(result["by_thinking"]) == {"on", "off"}
    for groups in (result["by_thinking"], result["by_kind"]):
        assert sum(group["rows"] for group in groups.values()) == result["rows"]
        assert sum(group["anchors"] for group in groups.values()) == result["anchors"]
    assert len(result["by_kind"]) >= 2


def test_a_table_is_printed_for_people(capsys, family) -> None:
    target, first, second = family
    options = ("--data", target.parent / "text.txt", "--rows", 2, "--cols", 64)
    code, stdout, _ = run(capsys, "--target", target, "--drafter", first, "--drafter", second, *options)
    assert code == 0
    assert "100.00 (100.00 to 100.00)" in stdout
    assert "second" in stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--thinking", "sometimes"), "'sometimes'"),
        (("--data", "nothing-here.txt"), "nothing-here.txt"),
        (("--plot", "picture.doc"), ".png"),
        (("--drafter", "first"), "given twice"),
    ],
)
def test_wrong_options_are_one_line(capsys, family, options: tuple[str, str], said: str) -> None:
    target, first, _ = family
    given = tuple(first if option == "first" else option for option in options)
    code, stdout, stderr = run(capsys, "--target", target, "--drafter", first, *given)
    assert code == 1
    assert stdout == ""
    assert said in stderr.strip().splitlines()[-1]


def test_thinking_needs_a_template_with_the_switch(capsys, family, tmp_path: Path) -> None:
    plain = make_tiny_llama(tmp_path / "plain", chat_template=CHAT_TEMPLATE.replace("enable_thinking", "other"))
    code, _, stderr = run(capsys, "--target", plain, "--drafter", family[1], "--thinking", "both")
    assert code == 1
    assert "no thinking switch" in stderr


def test_drafters_of_different_blocks_are_not_compared(capsys, family, tmp_path: Path) -> None:
    target, first, _ = family
    other = make_tiny_drafter(tmp_path / "other", num_hidden_layers=1, block_size=6)
    options = ("--data", target.parent / "text.txt", "--rows", 1, "--cols", 64)
    code, _, stderr = run(capsys, "--target", target, "--drafter", first, "--drafter", other, *options)
    assert code == 1
    assert "block size 6" in stderr


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    capsys, family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("exl3_dflash.measure.evaluation.evaluate", lambda *_: pytest.fail("it was measured"))
    target, first, _ = family
    code, _, stderr = run(capsys, "--target", target, "--drafter", first, "--plot", tmp_path / "p.png")
    assert code == 1
    assert "exl3-dflash[plots]" in stderr


def test_a_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    positions = [0.8, 0.7, 0.6]
    entries = [PlotEntry("unquantized", "", None, 1.0, (1.0, 1.0), positions)]
    for series, bits, retention in (("calibrated", 2.0, 0.9), ("uncalibrated", 2.0, 0.5), ("calibrated", 4.0, 1.0)):
        name = f"{bits:g} bpw, {series}"
        entries.append(PlotEntry(name, series, bits, retention, (retention - 0.02, retention + 0.01), positions))
    plot_fidelity(entries, tmp_path / "plot.png", "test")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")

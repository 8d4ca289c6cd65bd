"""`exl3-dflash quantize` end to end on a tiny pair: its JSON contract, its files, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from exl3_dflash.cli.app import main
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from tests.tiny_models import make_tiny_drafter
from tests.tiny_targets import CHAT_TEMPLATE, make_tiny_llama

REPORT_KEYS = {
    "out_dir", "bits", "bpw", "head_bits", "size_bytes", "tensors", "calibration", "tap_shift", "accept_length",
    "versions", "source_sha256", "seconds",
}  # fmt: skip
TENSOR_KEYS = {"name", "shape", "bits", "proxy_error", "weight_error", "fallback", "seconds"}
CALIBRATION_KEYS = {"mode", "rows", "cols", "tokens", "anchors", "source", "dropped_rows"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    text = folder / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, again and again.\n\n" * 60)
    return make_tiny_llama(folder / "target"), make_tiny_drafter(folder / "drafter", num_hidden_layers=1)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the program."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def quantize(capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path], out: Path, *more: object) -> dict[str, Any]:
    """A small calibrated job; its report."""
    target, drafter = pair
    data = target.parent / "text.txt"
    sizes = ("--cal-data", data, "--cal-rows", 4, "--cal-cols", 64, "--eval-rows", 2, "--threads", 1)
    code, stdout, stderr = run(
        capsys, "quantize", drafter, "--target", target, "--out", out, *sizes, "--json", "-q", *more
    )
    assert code == 0, stderr
    return json.loads(stdout)


def test_json_and_files_follow_the_contract(capsys, pair, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = quantize(capsys, pair, out, "--bits", 4)
    assert set(report) >= REPORT_KEYS
    assert all(set(tensor) >= TENSOR_KEYS for tensor in report["tensors"])
    assert set(report["calibration"]) >= CALIBRATION_KEYS
    assert set(report["accept_length"]) == {"unquantized", "quantized"}
    assert report["calibration"]["mode"] == "target"
    assert report["calibration"]["rows"] == 4
    assert report == json.loads((out / "quantize_report.json").read_text())

    config = json.loads((out / "config.json").read_text())
    expected = {"quant_method": "exl3", "bits": 4, "head_bits": 8, "codebook": "mul1", "out_scales": "auto"}
    assert config["quantization_config"].items() >= expected.items()
    assert config["quantization_config"]["calibration"] == {"rows": 4, "cols": 64}
    assert config["tap_shift"] == report["tap_shift"]
    storage = json.loads((out / "quantization_config.json").read_text())["tensor_storage"]
    assert storage["layers.0.mlp.up_proj"]["bits_per_weight"] == 4
    assert report["size_bytes"] == sum(tensor.nbytes for tensor in load_file(out / "model.safetensors").values())
    assert report["source_sha256"] == DrafterCheckpoint.open(pair[1]).sha256


def test_output_is_a_drafter_with_every_tensor(capsys, pair, tmp_path: Path) -> None:
    report = quantize(capsys, pair, tmp_path / "out", "--bits", 8)
    source, result = DrafterCheckpoint.open(pair[1]), DrafterCheckpoint.open(tmp_path / "out")
    assert set(result.tensor_names()) == set(source.tensor_names())
    errors = {tensor["name"]: tensor["weight_error"] for tensor in report["tensors"]}
    for name in source.tensor_names():
        original, decoded = source.load(name).double(), result.load(name).double()
        error = float((decoded - original).square().sum() / original.square().sum())
        assert error == pytest.approx(errors.get(name.removesuffix(".weight"), 0.0), rel=1e-2)


def test_same_seed_gives_the_same_bytes(capsys, pair, tmp_path: Path) -> None:
    for name in "ab":
        quantize(capsys, pair, tmp_path / name, "--bits", 3, "--threads", 1)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert first == second


def test_the_fast_encoder_is_the_default_recorded_and_about_as_good(capsys, pair, tmp_path: Path) -> None:
    exact = quantize(capsys, pair, tmp_path / "exact", "--bits", 6, "--encoder", "exact")
    fast = quantize(capsys, pair, tmp_path / "fast", "--bits", 6)
    assert (exact["encoder"], fast["encoder"]) == ("exact", "fast")
    ours, reference = (sum(tensor["proxy_error"] for tensor in report["tensors"]) for report in (fast, exact))
    assert ours == pytest.approx(reference, rel=0.05)


def test_codebooks_that_are_always_searched_exactly_say_so(capsys, pair, tmp_path: Path) -> None:
    options = ("--calibration", "none", "--codebook", "mcg", "--bits", 6, "--encoder", "fast", "--threads", 1)
    code, stdout, _ = run(capsys, "quantize", pair[1], "--out", tmp_path / "o", *options, "--json", "-q")
    assert (code, json.loads(stdout)["encoder"]) == (0, "exact")


def test_calibration_none_is_said_everywhere(capsys, pair, tmp_path: Path) -> None:
    """FIELD_REPORTS 19: no file claims a calibration that was not run."""
    drafter = pair[1]
    out = tmp_path / "out"
    code, stdout, stderr = run(
        capsys, "quantize", drafter, "--out", out, "--calibration", "none", "--json", "-q", "--threads", 1
    )
    assert code == 0, stderr
    report = json.loads(stdout)
    assert report["calibration"]["mode"] == "none"
    assert report["calibration"]["rows"] == report["calibration"]["anchors"] == 0
    assert report["accept_length"] is None
    assert all(tensor["fallback"] for tensor in report["tensors"])
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["calibration"] == {"rows": 0, "cols": 0}
    assert config["exl3_dflash"]["calibration"] == "none"


def test_head_bits_are_inert_without_a_head_and_count_with_one(capsys, pair, tmp_path: Path) -> None:
    """FIELD_REPORTS 20."""
    drafter = pair[1]
    options = ("--calibration", "none", "--bits", 2, "--head-bits", 5, "--threads", 1)
    code, _, stderr = run(capsys, "quantize", drafter, "--out", tmp_path / "plain", *options)
    assert code == 0
    assert "--head-bits is inert" in stderr
    with_head = make_tiny_drafter(tmp_path / "with-head", optional=["lm_head.weight"])
    code, stdout, stderr = run(capsys, "quantize", with_head, "--out", tmp_path / "head", *options, "--json")
    assert code == 0, stderr
    assert "inert" not in stderr
    bits = {tensor["name"]: tensor["bits"] for tensor in json.loads(stdout)["tensors"]}
    assert bits.pop("lm_head") == 5
    assert set(bits.values()) == {2}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--bits", 9), "--bits 9"),
        (("--bits", 2.5, "--codebook", "mcg", "--plan", "uniform"), "mul1 codebook"),
        (("--codebook", "mul2"), "'mul2'"),
        (("--cal-rows", 0), "--cal-rows 0"),
        (("--calibration", "maybe"), "'maybe'"),
        (("--cal-data", "nothing-here.txt"), "nothing-here.txt"),
        (("--thinking", "sometimes"), "'sometimes'"),
        (("--seed", 2**63), "--seed 9223372036854775808"),
        (("--tune", "--calibration", "none"), "--tune with --calibration none"),
    ],
)
def test_wrong_options_are_one_line_and_leave_nothing(capsys, pair, tmp_path: Path, options, said: str) -> None:
    target, drafter = pair
    code, stdout, stderr = run(capsys, "quantize", drafter, "--target", target, "--out", tmp_path / "o", *options, "-q")
    assert code == 1
    assert stdout == ""
    assert said in stderr.strip().splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("out", "work"), [("o", "o"), ("o", "o/work"), ("work/o", "work"), ("o/../work/o", "work")])
def test_output_and_work_directory_are_apart(capsys, pair, tmp_path: Path, out: str, work: str) -> None:
    target, drafter = pair
    places = ("--out", tmp_path / out, "--work-dir", tmp_path / work)
    code, stdout, stderr = run(capsys, "quantize", drafter, "--target", target, *places, "-q")
    assert (code, stdout) == (1, "")
    assert "lie in one another" in stderr
    assert list(tmp_path.iterdir()) == []


def test_a_tilde_is_the_home_directory(capsys, pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "notes.txt").write_text("mine")
    code, _, stderr = run(capsys, "quantize", pair[1], "--calibration", "none", "--out", "~/o", "-q")
    assert code == 1
    assert f"{tmp_path / 'o'} exists and is not empty" in stderr


def test_thinking_needs_a_template_with_the_switch(capsys, pair, tmp_path: Path) -> None:
    target = make_tiny_llama(tmp_path / "target", chat_template=CHAT_TEMPLATE.replace("enable_thinking", "other"))
    out = tmp_path / "out"
    code, _, stderr = run(capsys, "quantize", pair[1], "--target", target, "--out", out, "--thinking", "both", "-q")
    assert code == 1
    assert "no thinking switch" in stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target"]


def test_target_is_asked_for_before_anything_else(capsys, pair, tmp_path: Path) -> None:
    code, _, stderr = run(capsys, "quantize", pair[1], "--out", tmp_path / "o")
    assert code == 1
    assert "--target" in stderr


def test_an_existing_output_is_refused_and_kept(capsys, pair, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("three years of work")
    code, _, stderr = run(capsys, "quantize", pair[1], "--target", pair[0], "--out", out, "--force")
    assert code == 1
    assert "out" in stderr
    assert (out / "thesis.tex").read_text() == "three years of work"


def test_a_quantized_source_is_refused(capsys, pair, tmp_path: Path) -> None:
    quantize(capsys, pair, tmp_path / "first")
    code, _, stderr = run(capsys, "quantize", tmp_path / "first", "--target", pair[0], "--out", tmp_path / "second")
    assert code == 1
    assert "quantized to EXL3 already" in stderr
    assert not (tmp_path / "second").exists()


def test_an_interrupted_job_keeps_only_its_finished_steps(
    capsys, pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("exl3_dflash.conversion.measuring.measure_fidelity", interrupt)
    target, drafter = pair
    data = target.parent / "text.txt"
    out = tmp_path / "sub" / "o"
    code, _, stderr = run(capsys, "quantize", drafter, "--target", target, "--out", out, "--cal-data", data, "-q")
    assert code == 130
    assert "--resume continues" in stderr
    assert [path.name for path in out.parent.iterdir()] == ["o.work"]


def test_a_drafter_that_does_not_fit_is_refused_before_the_target_is_read(
    capsys, pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_tiny_llama(tmp_path / "wide", hidden_size=64, num_attention_heads=8)
    monkeypatch.setattr("exl3_dflash.conversion.job.load_target", lambda *_, **__: pytest.fail("weights were read"))
    code, _, stderr = run(capsys, "quantize", pair[1], "--target", other, "--out", tmp_path / "o")
    assert code == 1
    assert "does not fit" in stderr
    assert not (tmp_path / "o").exists()


def test_source_files_go_along(capsys, pair, tmp_path: Path) -> None:
    drafter = make_tiny_drafter(tmp_path / "drafter")
    (drafter / "LICENSE").write_text("MIT")
    (drafter / "pytorch_model.bin").write_bytes(b"old weights")
    torch.save({}, drafter / "optimizer.pt")
    out = tmp_path / "out"
    code, _, stderr = run(capsys, "quantize", drafter, "--out", out, "--calibration", "none", "-q", "--threads", 1)
    assert code == 0, stderr
    assert (out / "LICENSE").read_text() == "MIT"
    names = {path.name for path in out.iterdir()}
    ours = {"config.json", "model.safetensors", "quantization_config.json", "quantize_report.json", "recipe.yaml"}
    assert names == {"LICENSE", *ours}

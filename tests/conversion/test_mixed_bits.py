"""Jobs whose bits differ by tensor: mixed plans and recipes, end to end on a tiny pair."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from exl3_dflash.cli.app import main
from exl3_dflash.conversion.allocation import PLAN_RATES, bit_groups
from exl3_dflash.conversion.job import quantize_drafter
from exl3_dflash.conversion.recipe import Recipe
from exl3_dflash.conversion.settings import JobSettings
from tests.family_models import make_family_drafter
from tests.tiny_models import make_tiny_drafter
from tests.tiny_targets import make_tiny_llama


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    text = folder / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, again and again.\n\n" * 60)
    return make_tiny_llama(folder / "target"), make_tiny_drafter(folder / "drafter", num_hidden_layers=1)


def run(capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path], out: Path, *more: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a small calibrated job."""
    target, drafter = pair
    data = target.parent / "text.txt"
    sizes = ("--cal-data", data, "--cal-rows", 4, "--cal-cols", 64, "--eval-rows", 2, "--threads", 1)
    arguments = ("quantize", drafter, "--target", target, "--out", out, *sizes, "--json", *more)
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def bits_of(report: dict[str, Any]) -> dict[str, float]:
    return {tensor["name"]: tensor["bits"] for tensor in report["tensors"]}


@pytest.fixture(scope="module")
def mixed(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a job at 2.25 bits on average."""
    out = tmp_path_factory.mktemp("mixed") / "out"
    target, drafter = pair
    data = target.parent / "text.txt"
    sizes = ["--cal-data", str(data), "--cal-rows", "4", "--cal-cols", "64", "--eval-rows", "2", "--threads", "1"]
    with pytest.raises(SystemExit) as stop:
        main(["quantize", str(drafter), "--target", str(target), "--out", str(out), *sizes, "-q", "--bits", "2.25"])
    assert not stop.value.code
    return out


def test_a_mean_that_is_no_rate_mixes_rates_within_the_budget(mixed: Path) -> None:
    report = json.loads((mixed / "quantize_report.json").read_text())
    bits = bits_of(report)
    assert set(bits.values()) <= set(PLAN_RATES)
    assert len(set(bits.values())) > 1
    assert all(len({bits[name] for name in group}) == 1 for group in bit_groups(bits))
    assert (report["bits"], report["plan"]) == (2.25, "mixed")
    assert 2.0 < report["mean_bits"] <= 2.25
    assert 0.0 < report["predicted_retention"] <= 1.5
    config = json.loads((mixed / "config.json").read_text())
    assert config["quantization_config"]["bits"] == round(report["mean_bits"], 2)
    storage = json.loads((mixed / "quantization_config.json").read_text())["tensor_storage"]
    stored = {name: entry["bits_per_weight"] for name, entry in storage.items() if "bits_per_weight" in entry}
    assert stored == bits


def test_the_recipe_of_a_job_makes_the_same_file_again(capsys, pair, mixed: Path, tmp_path: Path) -> None:
    code, stdout, stderr = run(capsys, pair, tmp_path / "again", "--recipe", mixed / "recipe.yaml")
    assert code == 0, stderr
    report, first = json.loads(stdout), json.loads((mixed / "quantize_report.json").read_text())
    assert bits_of(report) == bits_of(first)
    assert report["mean_bits"] == report["bits"] == first["mean_bits"]
    assert report["predicted_retention"] == first["predicted_retention"]
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (mixed / "model.safetensors").read_bytes()


def test_the_plan_is_shown_before_encoding_and_kept_for_resuming(
    capsys, pair, mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("exl3_dflash.conversion.job.encode_tensors", interrupt)
        code, _, stderr = run(capsys, pair, out, "--bits", 2.25)
    assert code == 130
    assert "a mixed plan of 2.25 bits on average is made after calibration" in stderr
    assert "predicted to retain" in stderr

    code, _, stderr = run(capsys, pair, out, "--recipe", mixed / "recipe.yaml", "--resume")
    assert code == 1
    assert "settings.recipe was None" in stderr

    never = "exl3_dflash.conversion.deciding.expect_error"
    monkeypatch.setattr(never, lambda *_: pytest.fail("the plan was made again"))
    code, stdout, stderr = run(capsys, pair, out, "--bits", 2.25, "--resume")
    assert code == 0, stderr
    assert bits_of(json.loads(stdout)) == bits_of(json.loads((mixed / "quantize_report.json").read_text()))


def test_a_rate_is_uniform_unless_a_mixed_plan_is_asked_for(capsys, pair, tmp_path: Path) -> None:
    code, stdout, _ = run(capsys, pair, tmp_path / "uniform", "--bits", 3, "-q")
    assert code == 0
    report = json.loads(stdout)
    assert set(bits_of(report).values()) == {3}
    assert report["mean_bits"] == 3
    assert report["predicted_retention"] is not None
    recipe = yaml.safe_load((tmp_path / "uniform" / "recipe.yaml").read_text())
    assert recipe == {"target_bpw": 3, "achieved_bpw": 3, "head_bits": 8, "tensors": bits_of(report) | {"fc": 16}}


def test_without_calibration_a_mixed_plan_predicts_nothing(capsys, pair, tmp_path: Path) -> None:
    options = ["--calibration", "none", "--bits", "2.4", "--json", "-q", "--threads", "1"]
    with pytest.raises(SystemExit) as stop:
        main(["quantize", str(pair[1]), "--out", str(tmp_path / "o"), *options])
    assert not stop.value.code
    report = json.loads(capsys.readouterr().out)
    assert set(bits_of(report).values()) <= set(PLAN_RATES)
    assert 2.0 <= report["mean_bits"] <= 2.4
    assert report["predicted_retention"] is None


def test_a_selector_keeps_the_rate_below_the_budget(tmp_path: Path) -> None:
    """What a DFlash 2 selector reads shows in no divergence, so it cannot be weighed."""
    source = make_family_drafter(tmp_path / "source", "dflash2", num_hidden_layers=1, layer_types=None)
    settings = JobSettings(str(source), None, tmp_path / "out", bits=2.75, calibration="none", threads=1)
    report = quantize_drafter(settings)
    bits = {tensor.name: tensor.bits for tensor in report.tensors}
    assert bits["candidate_selector.hidden_projection"] == 2.5
    assert len(set(bits.values())) > 1
    assert report.mean_bits <= 2.75


def test_wildcards_head_bits_and_unquantized_tensors(capsys, tmp_path: Path, pair) -> None:
    drafter = make_tiny_drafter(tmp_path / "with-head", num_hidden_layers=1, optional=["lm_head.weight"])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('head_bits: 5\ntensors:\n  "*": 2\n  "layers.0.mlp.*": 3.5\n  layers.0.self_attn.o_proj: 16\n')
    code, stdout, stderr = run(capsys, (pair[0], drafter), tmp_path / "out", "--recipe", recipe)
    assert code == 0, stderr
    report = json.loads(stdout)
    bits = bits_of(report)
    assert (bits["layers.0.self_attn.q_proj"], bits["layers.0.mlp.down_proj"], bits["lm_head"]) == (2, 3.5, 5)
    assert report["copied"]["layers.0.self_attn.o_proj"] == "the recipe leaves it unquantized"
    written = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    assert written["tensors"]["layers.0.self_attn.o_proj"] == 16
    assert "lm_head" not in written["tensors"]


def test_a_resumed_job_follows_its_recipe(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the recipe leaves a tensor unquantized, of which the kept plan says nothing."""
    target, drafter = pair
    recipe = Recipe({"*": 2, "layers.0.self_attn.o_proj": 16})
    data = str(target.parent / "text.txt")
    sizes: dict[str, Any] = {"cal_data": data, "cal_rows": 4, "cal_cols": 64, "eval_rows": 2, "threads": 1}
    settings = JobSettings(str(drafter), str(target), tmp_path / "out", recipe=recipe, **sizes)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("exl3_dflash.conversion.job.encode_tensors", interrupt)
        with pytest.raises(KeyboardInterrupt):
            quantize_drafter(settings)
    assert (tmp_path / "out.work" / "plan.safetensors").exists()
    report = quantize_drafter(replace(settings, resume=True))
    assert "layers.0.self_attn.o_proj" in report.copied
    assert report.predicted_retention is not None


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--bits", 1.2), 1, "--bits 1.2"),
        (("--bits", "nan"), 1, "fix: give --bits 1.5"),
        (("--bits", 8.5), 1, "--bits 8.5"),
        (("--bits", 2.25, "--plan", "uniform"), 1, "use the nearest, 2"),
        (("--plan", "even"), 1, "'even'"),
        (("--recipe", "RECIPE", "--bits", 3), 2, "the recipe says the bits"),
        (("--recipe", "RECIPE"), 1, "layers.9.mlp.up_proj matches no tensor"),
        (("--recipe", "NOTHING"), 1, "leaves every linear unquantized"),
    ],
)
def test_what_is_refused_leaves_nothing(capsys, pair, tmp_path: Path, options, code: int, said: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        'tensors: {"*": 16}\n' if "NOTHING" in options else 'tensors: {"*": 3, layers.9.mlp.up_proj: 2}\n'
    )
    given = [recipe if option in ("RECIPE", "NOTHING") else option for option in options]
    found, stdout, stderr = run(capsys, pair, tmp_path / "o", "-q", *given)
    assert (found, stdout) == (code, "")
    assert said in " ".join(stderr.split())
    assert list(tmp_path.iterdir()) == [recipe]

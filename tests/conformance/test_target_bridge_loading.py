"""Targets that ExLlamaV3 loads: EXL3 weights, features beyond FP16, and what cannot be a target."""

from __future__ import annotations

import shutil
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.target import exllama as exllama_target
from exl3_dflash.target import load
from exl3_dflash.target.exllama import FP16_MAX, ExllamaTarget
from exl3_dflash.target.load import load_target
from tests.demo_pair import demo_directories
from tests.target.exl3_directories import write_exl3_pair

from .exllama_pair import load_theirs
from .test_directories import CPU
from .test_target_bridge import CLOSE, error, random_ids

pytestmark = pytest.mark.conformance


@pytest.fixture(scope="module")
def theirs(generator_library: types.ModuleType) -> ExllamaTarget:
    return load_theirs(generator_library, demo_directories()[0], None).target


def test_exl3_targets_on_cuda_are_loaded_by_exllama(
    generator_library: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine with a GPU, whose place the CPU takes."""
    write_exl3_pair(demo_directories()[0], tmp_path / "plain", tmp_path / "exl3", lambda name: "proj" in name)
    monkeypatch.setattr(load, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(exllama_target, "require_exllamav3", lambda _: generator_library)
    real = exllama_target.load_models
    monkeypatch.setattr(exllama_target, "load_models", lambda lib, path, d, _, s: real(lib, path, d, CPU, s))
    target = load_target(tmp_path / "exl3", name="demo")
    assert isinstance(target, ExllamaTarget)
    assert target.facts.quantized == "exl3 4.00bpw"
    assert target.tap_rows(random_ids(5), (1,)).taps.dtype == target.dtype == torch.bfloat16
    assert load_target(tmp_path / "exl3", dtype="float32").dtype == torch.float32


@pytest.mark.parametrize("codebook", ["mul1", "3inst"])
def test_exl3_targets(generator_library: types.ModuleType, tmp_path: Path, codebook: str) -> None:
    def quantized(name: str) -> bool:
        return "proj" in name or name == "lm_head.weight"

    write_exl3_pair(demo_directories()[0], tmp_path / "plain", tmp_path / "exl3", quantized, codebook=codebook)
    theirs = load_theirs(generator_library, tmp_path / "exl3", None).target
    ours = load_target(tmp_path / "plain", device="cpu", dtype=torch.float32)
    assert theirs.facts.quantized == "exl3 4.00bpw"
    ids = random_ids(50)
    given, wanted = (target.tap_rows(ids, (0, 3), want_logits=True) for target in (theirs, ours))
    assert error(given.taps, wanted.taps) < 3 * CLOSE
    assert given.logits is not None
    assert wanted.logits is not None
    hidden = torch.randn(1, 4, 128, generator=torch.Generator().manual_seed(8)).requires_grad_()
    assert error(theirs.output_matrix(hidden), ours.output_matrix(hidden)) < CLOSE
    gradients = [torch.autograd.grad(t.output_matrix(hidden).square().sum(), hidden)[0] for t in (theirs, ours)]
    assert error(*gradients) < CLOSE


def test_features_beyond_fp16_are_clamped_there_and_counted(
    generator_library: types.ModuleType, tmp_path: Path
) -> None:
    source = demo_directories()[0]
    shutil.copytree(source, tmp_path / "hot")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] *= 20000
    save_file(tensors, tmp_path / "hot" / "model.safetensors", metadata={"format": "pt"})
    theirs = load_theirs(generator_library, tmp_path / "hot", None).target
    wanted = load_target(tmp_path / "hot", device="cpu", dtype=torch.float32).tap_rows(random_ids(30), (1,)).taps
    given = theirs.tap_rows(random_ids(30), (1,)).taps
    assert float(wanted.abs().max()) > FP16_MAX
    assert bool(torch.isfinite(given).all())
    assert theirs.clamped_values == pytest.approx(int((wanted.abs() > FP16_MAX).sum()), rel=0.02)
    assert error(given, wanted.clamp(-FP16_MAX, FP16_MAX)) < CLOSE


def test_what_cannot_be_a_target(
    generator_library: types.ModuleType, theirs: ExllamaTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target, drafter = demo_directories()
    with pytest.raises(Exl3DflashError, match="is no target"):
        load_theirs(generator_library, drafter, None)
    shutil.copytree(target, tmp_path / "unknown")
    config = (target / "config.json").read_text().replace("LlamaForCausalLM", "NobodysForCausalLM")
    (tmp_path / "unknown" / "config.json").write_text(config)
    with pytest.raises(Exl3DflashError, match=r"ExLlamaV3 cannot read .*unknown"):
        load_theirs(generator_library, tmp_path / "unknown", None)
    with pytest.raises(Exl3DflashError, match="tap 4 is no layer of demo; expected layers 0 to 3"):
        theirs.tap_rows(random_ids(3), (4,))
    for block in theirs.loaded.model.modules[1:5]:
        monkeypatch.setattr(block, "layer_idx", None)
    with pytest.raises(Exl3DflashError, match="exports no state of some layers"):
        theirs.tap_rows(random_ids(3), (0,))

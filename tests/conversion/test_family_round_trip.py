"""Every member of the family through the whole job: quantized with calibration, loaded again, and generating."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from exl3_dflash.calibration.rowset import TokenRow
from exl3_dflash.conversion.job import quantize_drafter
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.dequantization import dequantize_drafter
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.measure.fidelity import measure_fidelity, tally_rows
from exl3_dflash.runtime.engine import SamplingSettings, StopSettings
from exl3_dflash.runtime.load import load_pair
from exl3_dflash.runtime.reference import ReferenceEngine
from quantize.checkpoint import linear_names
from tests.family_models import FAMILY, family_tensors, make_family_drafter
from tests.tiny_targets import make_tiny_llama


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog, again and again.\n\n" * 60)
    return make_tiny_llama(folder / "target")


def generated(engine: ReferenceEngine, prompt: list[int]) -> list[int]:
    steps = engine.generate(prompt, SamplingSettings(), StopSettings(max_new_tokens=12, token_ids=frozenset()))
    return [token for step in steps for token in step.token_ids]


def one_layer(name: str) -> dict[str, Any]:
    """Overrides that leave a member its first layer."""
    types = FAMILY[name].config.get("layer_types", ["full_attention"])
    return {"num_hidden_layers": 1, "layer_types": types and types[:1]}


@pytest.mark.parametrize("name", FAMILY)
def test_quantize_load_generate(name: str, target: Path, tmp_path: Path) -> None:
    source = make_family_drafter(tmp_path / "source", name, **one_layer(name))
    settings = JobSettings(
        source=str(source), target=str(target), out_dir=tmp_path / "out", bits=6, cal_rows=3, cal_cols=64,
        cal_data=str(target.parent / "text.txt"), eval_rows=2, device="cpu", dtype="float32", threads=1,
    )  # fmt: skip
    report = quantize_drafter(settings)
    checkpoint = DrafterCheckpoint.open(tmp_path / "out")
    quantized = {tensor.name: tensor for tensor in report.tensors}
    assert set(quantized) | set(report.copied) == {spec.name for spec in checkpoint.linears}
    assert not any(tensor.fallback for tensor in quantized.values()), "every linear has a Hessian of its own"
    assert max(tensor.weight_error for tensor in quantized.values()) < 0.01
    stored = linear_names(checkpoint.directory)
    for linear, tensor in quantized.items():
        written = stored[checkpoint.output_name(linear)]
        assert written.bits == tensor.bits == (8 if linear == "lm_head" else 6)
    copied = load_file(tmp_path / "out" / "model.safetensors")
    for tensor_name, tensor in family_tensors(name, **one_layer(name)).items():
        if tensor_name.removesuffix(".weight") not in quantized and not tensor_name.endswith("proj.bias"):
            assert torch.equal(copied[checkpoint.output_name(tensor_name)], tensor), tensor_name

    pair = load_pair(str(target), str(tmp_path / "out"), device="cpu", dtype="float32", threads=1)
    assert pair.drafter is not None
    prompt = list(range(40, 60))
    drafted = ReferenceEngine(pair.target, pair.drafter)
    assert generated(drafted, prompt) == generated(ReferenceEngine(pair.target), prompt)
    assert drafted.stats.proposed > 0

    dequantize_drafter(str(tmp_path / "out"), tmp_path / "plain", dtype="float32")
    plain = DrafterCheckpoint.open(tmp_path / "plain")
    assert plain.config.raw.get("attention_value_scale") is None
    for tensor_name in plain.tensor_names():
        assert torch.equal(plain.load(tensor_name), checkpoint.load(tensor_name).to(plain.load(tensor_name).dtype))


def test_selector_proposals_are_what_fidelity_counts(target: Path, tmp_path: Path) -> None:
    """Another successor codebook changes what is proposed, and nothing of the logits before the selector."""
    pair = load_pair(
        str(target), str(make_family_drafter(tmp_path, "dflash2")), device="cpu", dtype="float32", threads=1
    )
    drafter = pair.drafter
    assert drafter is not None
    row = TokenRow(torch.arange(40, 80), 0, "text")
    before = measure_fidelity(pair.target, {"a": drafter, "b": drafter}, [row])
    assert (before.drafters[1].top1_agreement, before.drafters[1].kl) == (1.0, 0.0)
    other = load_pair(str(target), str(tmp_path), device="cpu", dtype="float32", threads=1).drafter
    assert other is not None
    assert other.candidate_selector is not None
    other.candidate_selector.successor_codebook = other.candidate_selector.successor_codebook.roll(1, 0)
    after = measure_fidelity(pair.target, {"a": drafter, "b": other}, [row]).drafters[1]
    assert after.top1_agreement < 1.0
    assert after.kl == 0.0


def test_labels_outside_a_reduced_vocabulary_are_simply_wrong(target: Path, tmp_path: Path) -> None:
    make_family_drafter(tmp_path, "speculators")
    pair = load_pair(str(target), str(tmp_path), device="cpu", dtype="float32", threads=1)
    assert pair.drafter is not None
    row = TokenRow(torch.arange(40, 80), 0, "text")
    table = tally_rows(pair.target, {"a": pair.drafter}, [row])
    (tally,) = table.tallies["a"]
    labels = pair.target.tap_rows(row.ids, (0,), want_logits=True).logits.argmax(-1)  # type: ignore[union-attr]
    assert not torch.isin(labels, torch.as_tensor(pair.drafter._token_ids)).all()
    assert np.isfinite(tally.label_nats).all()
    assert tally.label_nats.max() < 1e6

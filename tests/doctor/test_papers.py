"""The cheap half: what files tell, each fault named with its cause, and nothing raised on a pair in order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from exl3_dflash.doctor.checks import FAIL, PASS, WARN, Check
from exl3_dflash.doctor.papers import check_papers, open_drafter, require_papers, unused_window
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.target.load import TargetSketch, sketch_target
from tests.tiny_models import make_tiny_drafter, tiny_config, tiny_tensors
from tests.tiny_targets import make_tiny_llama

FITTING = TargetSketch("t", 32, 4, 288, 262, rope_theta=10000.0, special_tokens={260: "<|mask|>", 257: "<|im_end|>"})


def checks_of(drafter: Path, **changes: Any) -> dict[str, Check]:
    sketch = TargetSketch(**{**FITTING.__dict__, **changes})
    return {check.name: check for check in check_papers(DrafterCheckpoint.open(drafter), sketch)}


def test_a_pair_in_order_passes_everything(tmp_path: Path) -> None:
    opened, checkpoint = open_drafter(make_tiny_drafter(tmp_path / "d"))
    assert checkpoint is not None
    assert {check.status for check in (*opened, *check_papers(checkpoint, FITTING))} == {PASS}


@pytest.mark.parametrize("name", sorted(tiny_tensors(tiny_config(num_hidden_layers=1))))
@pytest.mark.parametrize("renamed", [False, True])
def test_every_missing_or_renamed_tensor_is_named(tmp_path: Path, name: str, renamed: bool) -> None:
    """FIELD_REPORTS 1: a skipped tensor costs all acceptance and nothing else."""
    drafter = make_tiny_drafter(tmp_path / "d", num_hidden_layers=1)
    tensors = load_file(drafter / "model.safetensors")
    taken = tensors.pop(name).clone()
    kept = {key: tensor.clone() for key, tensor in tensors.items()}
    if renamed:
        kept[f"{name}_old"] = taken
    save_file(kept, drafter / "model.safetensors")
    opened, checkpoint = open_drafter(drafter)
    assert checkpoint is None
    assert (opened[-1].name, opened[-1].status) == ("tensors", FAIL)
    assert name in opened[-1].seen
    assert opened[-1].advice


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"rope_theta": None}, "rope"),  # FIELD_REPORTS 4
        ({"dflash_config": {"mask_token_id": 260}}, "taps"),
        ({"dflash_config": {"mask_token_id": 260, "target_layer_ids": [0, 2, 4]}}, "taps"),
        ({"dflash_config": {"target_layer_ids": [0, 2, 3]}}, "mask token"),  # FIELD_REPORTS 5
        ({"block_size": None}, "block size"),  # FIELD_REPORTS 5
        ({"layer_types": ["sliding_attention", "full_attention"]}, "window"),
        ({"dflash_config": {"mask_token_id": 999, "target_layer_ids": [0, 2, 3]}}, "mask token"),
    ],
)
def test_a_config_is_blamed_on_the_fact_that_is_wrong(tmp_path: Path, changes: dict[str, Any], cause: str) -> None:
    drafter = make_tiny_drafter(tmp_path / "d")
    config = tiny_config() | changes
    (drafter / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    opened, checkpoint = open_drafter(drafter)
    assert checkpoint is None
    assert (opened[-1].status, opened[-1].likely_cause) == (FAIL, cause)


@pytest.mark.parametrize(
    ("sketch", "name"),
    [
        ({"hidden_size": 64}, "dimensions"),
        ({"num_layers": 6}, "layers"),
        ({"vocab_size": 4000, "tokenizer_size": 3900}, "vocabulary"),
    ],
)
def test_a_wrong_target_is_the_cause(tmp_path: Path, sketch: dict[str, int], name: str) -> None:
    """FIELD_REPORTS 8."""
    found = checks_of(make_tiny_drafter(tmp_path / "d"), **sketch)
    assert (found[name].status, found[name].likely_cause) == (FAIL, "target")


@pytest.mark.parametrize(("drafter_rows", "target_rows"), [(288, 320), (320, 288)])
def test_a_padded_vocabulary_is_told_and_works(tmp_path: Path, drafter_rows: int, target_rows: int) -> None:
    """FIELD_REPORTS 8: padding either way is no other vocabulary."""
    found = checks_of(make_tiny_drafter(tmp_path / "d", vocab_size=drafter_rows), vocab_size=target_rows)
    assert found["vocabulary"].status == WARN
    assert "padding" in found["vocabulary"].seen
    assert FAIL not in {check.status for check in found.values()}


def test_an_ordinary_token_as_mask_and_another_theta_are_suspicious(tmp_path: Path) -> None:
    drafter = make_tiny_drafter(tmp_path / "d", dflash_config={"mask_token_id": 101, "target_layer_ids": [0, 2, 3]})
    found = checks_of(drafter, rope_theta=1e6)
    assert found["mask token"].status == WARN
    assert "260" in found["mask token"].advice
    assert found["rope"].status == WARN


def test_a_window_that_no_layer_uses_is_suspicious(tmp_path: Path) -> None:
    """FIELD_REPORTS 6: sliding layers run as full attention."""
    lost = make_tiny_drafter(tmp_path / "lost", sliding_window=16)
    off = make_tiny_drafter(tmp_path / "off", sliding_window=16, use_sliding_window=False)
    assert checks_of(lost)["window"].status == WARN
    assert checks_of(off)["window"].status == PASS
    assert unused_window(DrafterCheckpoint.open(lost).config) == 16


def test_require_papers_stops_at_a_pair_that_does_not_fit_and_tells_what_is_odd(tmp_path: Path) -> None:
    checkpoint = DrafterCheckpoint.open(make_tiny_drafter(tmp_path / "d", sliding_window=16))
    assert any("window of 16" in note for note in require_papers(checkpoint, FITTING))
    with pytest.raises(Exl3DflashError, match="does not fit"):
        require_papers(checkpoint, TargetSketch("t", 64, 4, 288, 262))


def test_a_sketch_reads_what_the_checks_need(tmp_path: Path) -> None:
    sketch = sketch_target(make_tiny_llama(tmp_path / "target"))
    assert sketch.rope_theta == 10000.0
    assert sketch.has_chat_template
    assert sketch.supports_thinking
    assert len(sketch.special_tokens) == sketch.tokenizer_size - 256

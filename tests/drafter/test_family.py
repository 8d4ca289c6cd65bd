"""Every member of the family: read from its own layout, and computed as an independent float64 reference does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.errors import Exl3DflashError
from tests.drafter.reference import reference_block
from tests.family_models import (
    FAMILY,
    FULL,
    SLIDING,
    family_config,
    family_tensors,
    flat_config,
    make_family_drafter,
    suffix_codebooks,
)
from tests.tiny_models import FakeTarget, write_drafter

# What the reference needs to know in the plain keys of `tiny_config`, where the dialect says it otherwise.
MEANINGS: dict[str, dict[str, Any]] = {
    "mimo": {"layer_types": [SLIDING] * 2, "sliding_window": 5, "is_causal": False, "attention_value_scale": 0.612},
    "laguna": {"is_causal": True},
    "muse-glimmer": {"is_causal": False},
    "speculators dflash2": {"is_causal": False},
    "causal head": {"is_causal": True},
}
PLAIN_ROPE = [name for name in FAMILY if name not in ("gpt-oss", "nemotron")]  # YaRN is tested in test_rope.py


def load(path: Path, dtype: torch.dtype = torch.float64) -> DrafterModel:
    return DrafterModel.from_checkpoint(DrafterCheckpoint.open(path), dtype)


@pytest.mark.parametrize("name", PLAIN_ROPE)
def test_both_forwards_equal_the_reference(name: str, tmp_path: Path) -> None:
    model = load(make_family_drafter(tmp_path, name, torch.float32))
    meaning = {**flat_config(name), **MEANINGS.get(name, {})}
    tensors = family_tensors(name, torch.float32)
    generator = torch.Generator().manual_seed(3)
    taps, anchors = torch.randn(9, 96, generator=generator), torch.tensor([7, 2, 9, 7])
    blocks = torch.randn(len(anchors), 4, 32, generator=generator)
    expected = torch.stack(
        [reference_block(tensors, meaning, taps, block, int(a)) for a, block in zip(anchors, blocks, strict=True)]
    )
    close = {"rtol": 1e-5, "atol": 1e-6} if name == "mimo" else {}  # its o_proj is folded in the stored type
    for chunk in (None, 3):
        torch.testing.assert_close(model.forward_anchors(taps, blocks, anchors, chunk), expected, **close)
    cache = model.new_cache()
    model.extend_context(cache, taps[:4])
    model.extend_context(cache, taps[4:7])
    torch.testing.assert_close(model.draft(cache, blocks[0], 7), expected[0], **close)


@pytest.mark.parametrize("name", FAMILY)
def test_every_stored_tensor_is_read_and_has_a_written_name(name: str, tmp_path: Path) -> None:
    checkpoint = DrafterCheckpoint.open(make_family_drafter(tmp_path, name))
    expected = family_tensors(name)
    assert set(checkpoint.tensor_names()) == set(expected)
    for tensor in checkpoint.tensor_names():
        if name != "mimo" or not tensor.endswith("o_proj.weight"):  # holds the scale on V
            assert torch.equal(checkpoint.load(tensor), expected[tensor]), tensor
    assert sum(map(checkpoint.nbytes, checkpoint.tensor_names())) == checkpoint.directory.nbytes()
    written = set(map(checkpoint.output_name, checkpoint.tensor_names()))
    stored = set(checkpoint.directory.names())
    if name == "muse-glimmer":
        assert written == stored
        assert checkpoint.output_name("fc") == "encoder.fc"
    else:
        assert written == set(expected)


@pytest.mark.parametrize("name", [name for name in FAMILY if name not in ("speculators",)])
def test_each_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    path = make_family_drafter(tmp_path, name)
    tensors = load_file(path / "model.safetensors")
    for missing in tensors:
        if missing != "mask_embedding":  # optional: the mask token's row is as good
            save_file({n: t for n, t in tensors.items() if n != missing}, path / "model.safetensors")
            with pytest.raises(Exl3DflashError, match=r"does not hold the drafter.*missing"):
                DrafterCheckpoint.open(path)


def test_value_scale_and_sinks_matter(tmp_path: Path) -> None:
    """The scale on V is in o_proj when it is read, once, and not in biases; sinks take weight from the keys."""
    scale = 0.612
    checkpoint = DrafterCheckpoint.open(make_family_drafter(tmp_path, "mimo", torch.float32, attention_bias=True))
    plain = family_tensors("mimo", torch.float32, attention_bias=True)
    name = "layers.0.self_attn.o_proj"
    torch.testing.assert_close(checkpoint.load(f"{name}.weight"), plain[f"{name}.weight"] * scale)
    assert torch.equal(checkpoint.load(f"{name}.bias"), plain[f"{name}.bias"])
    taps, block, anchor = torch.randn(5, 96), torch.randn(1, 4, 32), torch.tensor([5])
    model = DrafterModel.from_checkpoint(checkpoint)
    before = model.forward_anchors(taps, block, anchor)
    for layer in model.layers:
        layer.self_attn.attention_sink_bias -= 1e4
    without = model.forward_anchors(taps, block, anchor)
    assert not torch.allclose(before, without)
    for layer in model.layers:
        layer.self_attn.attention_sink_bias = None
    torch.testing.assert_close(without, model.forward_anchors(taps, block, anchor))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"attention_sink_bias": True}, "missing layers.1.self_attn.attention_sink_bias"),
        ({"attention_sink_bias": False}, "unexpected layers.0|not supported in this version .attention sinks"),
        ({"add_swa_attention_sink_bias": True}, None),
        ({}, "missing layers.1.self_attn.attention_sink_bias"),
    ],
)
def test_sinks_of_one_layer(keys: dict[str, Any], expected: str | None, tmp_path: Path) -> None:
    """The files have sinks in the first layer, which slides; the second is full."""
    nested = {"mask_token_id": 260, "target_layer_ids": [0, 2, 3], **keys}
    overrides = {"dflash_config": nested, "layer_types": [SLIDING, FULL], "sliding_window": 5, "block_size": 4}
    config = {**flat_config("mimo", **overrides), "layer_types": [SLIDING, FULL]}
    tensors = {n: t for n, t in family_tensors("mimo").items() if n != "layers.1.self_attn.attention_sink_bias"}
    write_drafter(tmp_path, config, tensors)
    if expected is None:
        model = load(tmp_path)
        assert [layer.self_attn.attention_sink_bias is None for layer in model.layers] == [False, True]
        return
    with pytest.raises(Exl3DflashError, match=expected):
        DrafterCheckpoint.open(tmp_path)


def test_own_embedding_and_reduced_vocabulary_propose_target_ids(tmp_path: Path) -> None:
    """FIELD_REPORTS 9: the drafter's own head scores, and its rows are mapped to the target's ids."""
    tensors = family_tensors("speculators", torch.float32)
    model, target = load(make_family_drafter(tmp_path, "speculators", torch.float32), torch.float32), FakeTarget()
    anchors = torch.tensor([3, 200])
    blocks = model.block_embeddings(target, anchors)  # type: ignore[arg-type]
    assert torch.equal(blocks[:, 0], tensors["embed_tokens.weight"][anchors])
    assert torch.equal(blocks[0, 1], tensors["embed_tokens.weight"][260])
    hidden = torch.randn(2, 3, 32)
    proposal = model.propose(target, anchors, hidden)  # type: ignore[arg-type]
    ids, logits, _ = proposal
    expected = hidden @ tensors["lm_head.weight"].T
    torch.testing.assert_close(logits, expected)
    best = expected.argmax(-1)
    assert torch.equal(ids, best + tensors["d2t"][best])
    assert tensors["t2d"][ids].all()
    assert not torch.equal(ids, best)
    assert torch.equal(proposal.columns(ids), best)
    unknown = (~tensors["t2d"]).nonzero().flatten()
    assert proposal.columns(unknown).eq(-1).all()
    assert torch.equal(model.draft_columns(torch.tensor([-1, int(ids[0, 0])])), torch.tensor([-1, int(best[0, 0])]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d2t": None}, "missing d2t .draft_vocab_size is 40 of 288"),
        ({"lm_head.weight": None}, "missing lm_head.weight .the drafter has a vocabulary of its own"),
        ({"d2t": torch.zeros(39, dtype=torch.int64)}, r"d2t has shape \[39\], expected \[40\]"),
        ({"d2t": torch.zeros(40)}, "d2t is torch.float32, expected int64"),
        (
            {"d2t": torch.full((40,), 260, dtype=torch.int64)},
            "leads to token 260 to 299; expected ids below vocab_size",
        ),
        ({"t2d": torch.ones(288, dtype=torch.bool)}, "t2d .* marks 288 tokens, but d2t leads to 40"),
    ],
)
def test_a_broken_vocabulary_map_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    tensors = {**family_tensors("speculators"), **change}
    write_drafter(tmp_path, family_config("speculators"), {n: t for n, t in tensors.items() if t is not None})
    with pytest.raises(Exl3DflashError, match=message):
        load(tmp_path)


def test_codebooks_under_both_names_are_refused(tmp_path: Path) -> None:
    """FIELD_REPORTS 17: either name is read; both at once would be a guess."""
    tensors = family_tensors("dflash2")
    suffixed = suffix_codebooks(tensors)
    one = load(write_drafter(tmp_path / "bare", family_config("dflash2"), tensors))
    other = load(write_drafter(tmp_path / "suffixed", family_config("dflash2"), suffixed))
    assert one.candidate_selector is not None
    assert other.candidate_selector is not None
    assert torch.equal(one.candidate_selector.successor_codebook, other.candidate_selector.successor_codebook)
    write_drafter(
        tmp_path / "both", family_config("dflash2"), {**suffixed, **{n: t.clone() for n, t in tensors.items()}}
    )
    with pytest.raises(Exl3DflashError, match=r"predecessor_codebook is there twice"):
        load(tmp_path / "both")


def test_a_file_with_a_gap_in_its_data_is_one_clear_error(tmp_path: Path) -> None:
    """FIELD_REPORTS 17."""
    path = make_family_drafter(tmp_path, "dflash2") / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    path.write_bytes(data[: 8 + size] + data[8 + size :] + bytes(16))
    with pytest.raises(Exl3DflashError, match=r"model\.safetensors"):
        DrafterCheckpoint.open(tmp_path)

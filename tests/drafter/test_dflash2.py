"""DFlash 2: convolutions that stay inside their block, the selector's greedy path, and its identity with v1."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exl3_dflash.calibration.capture import HessianCapture
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.convolution import convolve
from exl3_dflash.drafter.layout import output_linears
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.errors import Exl3DflashError
from tests.drafter.reference import selected
from tests.family_models import family_config, family_tensors, flat_config, make_family_drafter
from tests.tiny_models import FakeTarget, tiny_config, write_drafter

CONVOLUTIONS = ("attention_conv", "mlp_conv")


class MatrixTarget(FakeTarget):
    """A target whose head caps its logits, unlike its output matrix."""

    def output_matrix(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().head(hidden)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().head(hidden))


def load(path: Path, dtype: torch.dtype = torch.float64) -> DrafterModel:
    return DrafterModel.from_checkpoint(DrafterCheckpoint.open(path), dtype)


def test_the_training_identity_is_v1_exactly(tmp_path: Path) -> None:
    """Base tap 0 of 1, projections and successors of 0: hidden states, logits and proposals are those of v1."""
    tensors = family_tensors("dflash2", torch.float32)
    for name, tensor in tensors.items():
        if name.endswith(("kernel_projection.weight", "successor_codebook", "base_kernel")):
            tensor.zero_()
        if name.endswith("base_kernel"):
            tensor[:, 0] = 1.0
    extra = ("attention_conv", "mlp_conv", "candidate_selector")
    plain = {name: tensor for name, tensor in tensors.items() if not any(part in name for part in extra)}
    keys = ("layer_types", "sliding_window", "is_causal")
    config = tiny_config(**{key: flat_config("dflash2")[key] for key in keys})
    two = load(write_drafter(tmp_path / "two", family_config("dflash2"), tensors), torch.float32)
    one = load(write_drafter(tmp_path / "one", config, plain), torch.float32)
    target, taps = FakeTarget(), torch.randn(20, 96)
    anchors = torch.tensor([5, 20, 1, 13])
    ids = torch.tensor([7, 90, 12, 200])
    hidden = [m.forward_anchors(taps, m.block_embeddings(target, ids), anchors) for m in (one, two)]  # type: ignore[arg-type]
    assert torch.equal(*hidden)
    proposals = [m.propose(target, ids, h[:, 1:]) for m, h in zip((one, two), hidden, strict=True)]  # type: ignore[arg-type]
    assert torch.equal(proposals[0].ids, proposals[1].ids)
    assert torch.equal(proposals[0].logits, proposals[1].logits)


@pytest.mark.parametrize("name", ["dflash2", "dflash2 scaled"])
def test_proposals_follow_the_selectors_path(name: str, tmp_path: Path) -> None:
    model, target = load(make_family_drafter(tmp_path, name, torch.float32)), MatrixTarget()
    tensors, hidden = family_tensors(name, torch.float32), torch.randn(5, 3, 32, dtype=torch.float64)
    anchors = torch.tensor([0, 287, 31, 5, 77])
    ids, logits, _ = model.propose(target, anchors, hidden)  # type: ignore[arg-type]
    expected = target.head(hidden)  # where it says nothing about logits: the target's own scale and softcap
    if name == "dflash2 scaled":
        expected = 5 * torch.tanh(0.25 * target.output_matrix(hidden) / 5)  # its own, and those alone
    torch.testing.assert_close(logits, expected)
    paths = [selected(tensors, expected[i], hidden[i], int(a), 6) for i, a in enumerate(anchors)]
    assert ids.tolist() == paths
    assert not torch.equal(ids, expected.argmax(-1))
    shorter = model.propose(target, anchors, hidden[:, :2]).ids  # type: ignore[arg-type]
    assert torch.equal(shorter, ids[:, :2])


def test_padding_rows_of_the_targets_head_are_no_candidates(tmp_path: Path) -> None:
    model, target = load(make_family_drafter(tmp_path, "dflash2", torch.float32)), FakeTarget(vocab_size=320)
    target.head_weight[288:] *= 100
    ids, *_ = model.propose(target, torch.arange(9), torch.randn(9, 3, 32, dtype=torch.float64))  # type: ignore[arg-type]
    assert int(ids.max()) < 288


def test_input_embedding_scale(tmp_path: Path) -> None:
    model, target = load(make_family_drafter(tmp_path, "dflash2 scaled")), FakeTarget()
    rows = model.block_embeddings(target, torch.tensor([5]))[0]  # type: ignore[arg-type]
    assert torch.equal(rows[0], 2 * target.table[5].double())
    assert torch.equal(rows[3], 2 * target.table[260].double())


def test_convolutions_never_cross_blocks_and_start_from_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    z, dynamic = torch.randn(3, 5, 8, generator=generator), torch.randn(3, 5, 3, 2, generator=generator)
    base = torch.randn(3, 8, generator=generator)
    mixed = convolve(z, dynamic, base)
    weights = base.view(3, 2, 4) + dynamic[..., None]  # (block, row, offset, group, feature)
    torch.testing.assert_close(mixed[:, 0], (weights[:, 0, 0] * z[:, 0].view(3, 2, 4)).flatten(1))
    for block in range(3):
        torch.testing.assert_close(convolve(z[block : block + 1], dynamic[block : block + 1], base)[0], mixed[block])
    later = z.clone()
    later[:, 3:] += 1
    assert torch.equal(convolve(later, dynamic, base)[:, :3], mixed[:, :3])
    torch.testing.assert_close(convolve(z[:, :1], dynamic[:, :1], base), mixed[:, :1])  # fewer rows than the kernel


def test_a_causal_block_may_be_cut_short(tmp_path: Path) -> None:
    """What the engine does where few tokens are wanted: the first rows do not depend on the rest."""
    model = load(make_family_drafter(tmp_path, "dflash2", is_causal=True))
    taps, blocks, anchors = torch.randn(8, 96), torch.randn(2, 4, 32), torch.tensor([8, 3])
    whole = model.forward_anchors(taps, blocks, anchors)
    torch.testing.assert_close(model.forward_anchors(taps, blocks[:, :2], anchors), whole[:, :2])


def test_projections_see_their_own_inputs(tmp_path: Path) -> None:
    """kernel_projection reads the normed input of its sublayer, before the convolution that q reads behind."""
    checkpoint = DrafterCheckpoint.open(make_family_drafter(tmp_path, "dflash2", torch.float32))
    model = DrafterModel.from_checkpoint(checkpoint)
    groups = {spec.name: spec.group for spec in checkpoint.linears}
    assert groups["layers.1.attention_conv.kernel_projection"] == "layers.1.attention_conv"
    assert groups["layers.1.mlp_conv.kernel_projection"] == "layers.1.mlp_conv"
    assert groups["candidate_selector.hidden_projection"] == "candidate_selector"
    assert output_linears(model.config, has_head=False) == ("candidate_selector.hidden_projection",)
    capture, seen = HessianCapture(checkpoint.linears), {}

    def note(name: str, stream: str, x: torch.Tensor) -> None:
        capture(name, stream, x)
        seen[name] = x

    blocks = torch.randn(3, 4, 32)
    with model.observe(note):
        model.forward_anchors(torch.randn(12, 96), blocks, torch.tensor([3, 5, 12]))
    expected = model.layers[0].input_layernorm(blocks.flatten(0, 1))
    torch.testing.assert_close(seen["layers.0.attention_conv.kernel_projection"].sort(0)[0], expected.sort(0)[0])
    assert not torch.allclose(seen["layers.0.self_attn.q_proj"].sort(0)[0], expected.sort(0)[0])
    hessians = capture.finish(2.0)
    assert set(hessians) == {spec.group for spec in checkpoint.linears} - {"candidate_selector"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"selector_rank": None}, "no 'selector_rank'"),
        ({"selector_top_k": None}, "no 'selector_top_k'"),
        ({"selector_top_k": 289}, "selector_top_k in config.json is 289; expected at most 288"),
        ({"conv_group_size": 5}, "conv_group_size in config.json is 5; expected a divisor of 32"),
        ({"conv_kernel_size": 9}, "conv_kernel_size in config.json is 9; expected at most block_size 4"),
        ({"conv_kernel_size": 3}, r"base_kernel has shape \[2, 2, 32\], expected \[2, 3, 32\]"),
        ({"selector_rank": 9}, r"successor_codebook has shape \[288, 8\], expected \[288, 9\]"),
    ],
)
def test_settings_without_a_right_answer(keys: dict[str, int | None], message: str, tmp_path: Path) -> None:
    config = family_config("dflash2")
    nested = {**config["dflash_config"], **keys}
    config["dflash_config"] = {key: value for key, value in nested.items() if value is not None}
    write_drafter(tmp_path, config, family_tensors("dflash2"))
    with pytest.raises(Exl3DflashError, match=message):
        load(tmp_path)


def test_settings_with_a_default(tmp_path: Path) -> None:
    config = family_config("dflash2")
    for key in ("conv_kernel_size", "conv_group_size"):
        del config["dflash_config"][key]
    model = load(write_drafter(tmp_path, config, family_tensors("dflash2")))
    assert model.config.convolutions is not None
    assert (model.config.convolutions.kernel_size, model.config.convolutions.group_size) == (2, 16)

"""The torch drafter against an independent float64 forward, and its two forwards against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from exl3_dflash.drafter.attention import block_mask, first_visible
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.errors import Exl3DflashError
from tests.drafter.reference import reference_block, sees
from tests.tiny_models import FakeTarget, make_tiny_drafter, tiny_config, tiny_tensors

SLIDING = ["sliding_attention", "full_attention"]
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "full causal": {"is_causal": True},
    "sliding, causality not given": {"layer_types": SLIDING, "sliding_window": 5},
    "sliding causal": {"layer_types": SLIDING, "sliding_window": 5, "is_causal": True},
    "sliding bidirectional": {"layer_types": SLIDING, "sliding_window": 5, "is_causal": False},
    "window below the block": {"layer_types": SLIDING, "sliding_window": 2, "is_causal": False},
    "half rotary": {"partial_rotary_factor": 0.5},
    "biases": {"attention_bias": True},
    "one head per key head": {"num_key_value_heads": 4},
    "all heads on one key head": {"num_key_value_heads": 1},
}


def tiny_model(directory: Path, dtype: torch.dtype = torch.float64, **overrides: Any) -> DrafterModel:
    checkpoint = DrafterCheckpoint.open(make_tiny_drafter(directory, dtype=torch.float32, **overrides))
    return DrafterModel.from_checkpoint(checkpoint, dtype=dtype)


def random_taps(rows: int, width: int = 96, seed: int = 3) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def random_blocks(count: int, rows: int = 4, seed: int = 4) -> torch.Tensor:
    return torch.randn(count, rows, 32, generator=torch.Generator().manual_seed(seed))


def drafted(model: DrafterModel, taps: torch.Tensor, block: torch.Tensor, anchor: int) -> torch.Tensor:
    cache = model.new_cache()
    model.extend_context(cache, taps[:anchor])
    return model.draft(cache, block, anchor)


@pytest.mark.parametrize("name", VARIANTS)
def test_both_forwards_equal_the_reference(name: str, tmp_path: Path) -> None:
    overrides = VARIANTS[name]
    config = tiny_config(**overrides)
    tensors = tiny_tensors(config, dtype=torch.float32)
    model = tiny_model(tmp_path, **overrides)
    taps, anchors = random_taps(13), torch.tensor([7, 0, 13, 1, 7, 5])
    blocks = random_blocks(len(anchors))
    expected = torch.stack(
        [reference_block(tensors, config, taps, block, int(a)) for a, block in zip(anchors, blocks, strict=True)]
    )
    for chunk in (None, 1, 4):
        torch.testing.assert_close(model.forward_anchors(taps, blocks, anchors, chunk), expected)
    for block, anchor, row in zip(blocks, anchors, expected, strict=True):
        torch.testing.assert_close(drafted(model, taps, block, int(anchor)), row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_stays_near_the_reference(dtype: torch.dtype, tmp_path: Path) -> None:
    config = tiny_config()
    model = tiny_model(tmp_path, dtype)
    taps, block = random_taps(9), random_blocks(1)[0]
    expected = reference_block(tiny_tensors(config, dtype=torch.float32), config, taps, block, 9)
    tolerance = 2e-5 if dtype == torch.float32 else 0.1
    for hidden in (drafted(model, taps, block, 9), model.forward_anchors(taps, block[None], torch.tensor([9]))[0]):
        assert hidden.dtype == torch.float32
        torch.testing.assert_close(hidden.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [3, 7, 8, 9, 17])  # window 8: far below, window-1, window, window+1, twice
def test_windows_are_exact(length: int, causal: bool, tmp_path: Path) -> None:
    overrides: dict[str, Any] = {"layer_types": SLIDING[:1] * 2, "sliding_window": 8, "is_causal": causal}
    config = tiny_config(**overrides)
    model = tiny_model(tmp_path, **overrides)
    taps, block = random_taps(length), random_blocks(1)[0]
    expected = reference_block(tiny_tensors(config, dtype=torch.float32), config, taps, block, length)
    torch.testing.assert_close(drafted(model, taps, block, length), expected)
    full = tiny_model(tmp_path / "full", is_causal=causal)
    same = torch.allclose(drafted(full, taps, block, length), expected)
    assert same == (length + 4 <= 8)  # the window changes nothing exactly while context and block fit into it


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 6, 50])
def test_masks_list_what_each_row_sees(window: int | None, causal: bool) -> None:
    rows = 3
    for anchors in ([6], [2, 6, 6], [0, 5]):
        end, first = max(anchors), first_visible(min(anchors), window)
        mask = block_mask(torch.tensor(anchors), rows, first, end, window, causal)
        keys = [(None, k) for k in range(first, end)] + [(o, a + j) for o, a in enumerate(anchors) for j in range(rows)]
        for owner, anchor in enumerate(anchors):
            for i in range(rows):
                expected = [
                    (o == owner or (o is None and k < anchor)) and sees(anchor + i, k, o is not None, causal, window)
                    for o, k in keys
                ]
                seen = [True] * len(keys) if mask is None else mask[owner * rows + i].tolist()
                assert seen == expected
                assert not any(sees(anchor + i, k, False, causal, window) for k in range(min(first, anchor)))


def test_no_mask_is_built_where_every_key_is_visible() -> None:
    anchor = torch.tensor([6])
    assert block_mask(anchor, 4, 0, 6, None, causal=False) is None
    assert block_mask(anchor, 4, 0, 6, 10, causal=False) is None
    assert block_mask(anchor, 4, 0, 6, 9, causal=False) is not None


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_a_shorter_block_is_a_block_of_that_size(rows: int, tmp_path: Path) -> None:
    config = tiny_config()
    model = tiny_model(tmp_path)
    taps, block = random_taps(6), random_blocks(1)[0, :rows]
    expected = reference_block(tiny_tensors(config, dtype=torch.float32), config, taps, block, 6)
    torch.testing.assert_close(drafted(model, taps, block, 6), expected)
    torch.testing.assert_close(model.forward_anchors(taps, block[None], torch.tensor([6]))[0], expected)


def test_the_cache_grows_step_by_step_and_rolls_back(tmp_path: Path) -> None:
    """Appended in uneven steps with drafts between, cropped, extended with other rows, reset: always as if fresh."""
    model = tiny_model(tmp_path, layer_types=SLIDING, sliding_window=5)
    blocks = random_blocks(1)[0]
    one, other = random_taps(600), random_taps(600, seed=5)
    cache = model.new_cache()
    for stop in (3, 4, 300, 301, 600):
        model.extend_context(cache, one[cache.length : stop])
        torch.testing.assert_close(model.draft(cache, blocks, stop), drafted(model, one, blocks, stop))
        torch.testing.assert_close(model.draft(cache, blocks, stop), drafted(model, one, blocks, stop))
    cache.crop(290)
    torch.testing.assert_close(model.draft(cache, blocks, 290), drafted(model, one, blocks, 290))
    model.extend_context(cache, other[290:296])
    mixed = torch.cat([one[:290], other[290:296]])
    torch.testing.assert_close(model.draft(cache, blocks, 296), drafted(model, mixed, blocks, 296))
    cache.reset()
    assert cache.length == 0
    model.extend_context(cache, other[:2])
    torch.testing.assert_close(model.draft(cache, blocks, 2), drafted(model, other, blocks, 2))


def test_the_cache_grows_by_doubling(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    cache = model.new_cache()
    capacities = set()
    for _ in range(1500):
        model.extend_context(cache, random_taps(1))
        capacities.add(cache.capacity)
    assert len(capacities) <= 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e5, 1e8])
def test_outlier_features_do_not_overflow(size: float, dtype: torch.dtype, tmp_path: Path) -> None:
    config = tiny_config()
    model = tiny_model(tmp_path, dtype)
    taps = random_taps(20)
    taps[0] *= size  # as the first token's residual
    taps[7, 5] = -size
    block = random_blocks(1)[0]
    expected = reference_block(tiny_tensors(config, dtype=torch.float32), config, taps, block, 20)
    hidden = drafted(model, taps, block, 20)
    assert hidden.isfinite().all()
    torch.testing.assert_close(hidden.double(), expected, rtol=0, atol=1e-4 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_types_without_the_range_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    with pytest.raises(Exl3DflashError, match=r"cannot run in (float16|int8).*float32 or bfloat16"):
        tiny_model(tmp_path, dtype)


def test_the_context_never_holds_the_anchor(tmp_path: Path) -> None:
    """Features of the anchor and of later rows change nothing (a known leak where they do)."""
    model = tiny_model(tmp_path)
    taps, blocks, anchors = random_taps(10), random_blocks(2), torch.tensor([4, 10])
    before = model.forward_anchors(taps, blocks, anchors)
    taps[4:] += 100
    after = model.forward_anchors(taps, blocks, anchors)
    assert torch.equal(before[0], after[0])
    assert not torch.allclose(before[1], after[1])


def test_every_linear_input_is_shown_once_with_its_stream(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, optional=("lm_head.weight",))
    seen: dict[tuple[str, str], list[torch.Size]] = {}

    def note(name: str, stream: str, x: torch.Tensor) -> None:
        seen.setdefault((name, stream), []).append(x.shape)

    blocks = random_blocks(3)
    with model.observe(note):
        model.logits(FakeTarget(), model.forward_anchors(random_taps(12), blocks, torch.tensor([3, 5, 12]), chunk=2))
    model.forward_anchors(random_taps(12), blocks, torch.tensor([3, 5, 12]))  # not watched any more
    rows = {key: sum(shape[:-1].numel() for shape in shapes) for key, shapes in seen.items()}
    expected = {("fc", "context"): 12, ("lm_head", "block"): 12}
    for layer in ("layers.0", "layers.1"):
        for name in ("self_attn.k_proj", "self_attn.v_proj"):
            expected[f"{layer}.{name}", "context"] = 12
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                     "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):  # fmt: skip
            expected[f"{layer}.{name}", "block"] = 12
    assert rows == expected
    assert {shape[-1] for shape in seen["fc", "context"]} == {96}


def test_a_replaced_weight_is_used(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = tiny_tensors(config, dtype=torch.float32)
    model = tiny_model(tmp_path)
    name = "layers.1.mlp.down_proj"
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].roll(1, 0)
    model.set_linear_weight(name, tensors[f"{name}.weight"].T)
    taps, block = random_taps(5), random_blocks(1)[0]
    torch.testing.assert_close(drafted(model, taps, block, 5), reference_block(tensors, config, taps, block, 5))


def test_embedding_and_head_are_the_targets(tmp_path: Path) -> None:
    model, target = tiny_model(tmp_path, torch.float32), FakeTarget()
    blocks = model.block_embeddings(target, torch.tensor([5, 9]))  # type: ignore[arg-type]
    assert blocks.shape == (2, 4, 32)
    assert torch.equal(blocks[:, 0], target.table[[5, 9]])
    assert torch.equal(blocks[:, 1:], target.table[260].expand(2, 3, -1))
    assert model.block_embeddings(target, torch.tensor([5]), rows=2).shape == (1, 2, 32)  # type: ignore[arg-type]
    hidden = random_blocks(1)
    assert torch.equal(model.logits(target, hidden), target.head(hidden))  # type: ignore[arg-type]


def test_own_embedding_head_and_mask_embedding_come_first(tmp_path: Path) -> None:
    optional = ("embed_tokens.weight", "lm_head.weight", "mask_embedding")
    own = tiny_tensors(tiny_config(), optional=optional, dtype=torch.float32)
    model, target = tiny_model(tmp_path, torch.float32, optional=optional), FakeTarget()
    blocks = model.block_embeddings(target, torch.tensor([5, 9]))  # type: ignore[arg-type]
    assert torch.equal(blocks[:, 0], own["embed_tokens.weight"][[5, 9]])
    assert torch.equal(blocks[:, 1:], own["mask_embedding"].expand(2, 3, -1))
    hidden = random_blocks(1)
    expected = hidden @ own["lm_head.weight"].T
    torch.testing.assert_close(model.logits(target, hidden), expected)  # type: ignore[arg-type]
    capped = tiny_model(tmp_path / "capped", torch.float32, optional=optional, final_logit_softcapping=5.0)
    expected = 5 * torch.tanh(expected / 5)
    torch.testing.assert_close(capped.logits(target, hidden), expected)  # type: ignore[arg-type]


def test_taps_of_another_width_than_the_drafter(tmp_path: Path) -> None:
    """Own embedding and head allow a target of another width: Ht follows fc or target_hidden_size."""
    optional = ("embed_tokens.weight", "lm_head.weight")
    path = make_tiny_drafter(tmp_path, target_hidden_size=40, optional=optional)
    checkpoint = DrafterCheckpoint.open(path)
    assert checkpoint.target_hidden_size == 40
    model = DrafterModel.from_checkpoint(checkpoint)
    assert drafted(model, random_taps(4, 120), random_blocks(1)[0], 4).shape == (4, 32)

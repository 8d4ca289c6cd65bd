"""Anchors lie where generation would draft from."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from exl3_dflash.calibration.anchors import sample_anchors, valid_anchors


def test_first_anchor_is_the_first_token_after_the_prompt() -> None:
    assert valid_anchors(20, 7, 1).start == 7
    assert valid_anchors(20, 0, 1).start == 1, "a text row needs at least one context row"


def test_last_anchor_leaves_room_for_its_labels() -> None:
    assert max(valid_anchors(20, 7, 7)) + 7 == 19


@given(
    length=st.integers(0, 200),
    prompt=st.integers(0, 220),
    span=st.integers(1, 16),
    count=st.one_of(st.none(), st.integers(1, 50)),
    seed=st.integers(0, 2**31),
)
def test_samples_are_distinct_sorted_and_valid(
    length: int, prompt: int, span: int, count: int | None, seed: int
) -> None:
    anchors = sample_anchors(length, prompt, span, count, torch.Generator().manual_seed(seed)).tolist()
    allowed = set(valid_anchors(length, prompt, span))
    assert anchors == sorted(set(anchors))
    assert set(anchors) <= allowed
    assert len(anchors) == (len(allowed) if count is None else min(count, len(allowed)))

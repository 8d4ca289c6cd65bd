"""Which positions of a token row are drafted from.

An anchor `a` is the last token known when a block is drafted: the context is rows `0..a-1`, the block starts at `a`.
In generation the first anchor is the first token after the prompt, so anchors are drawn from the answer; rows of plain
text (`prompt_length` 0) use every position with at least one context row.
"""

from __future__ import annotations

import torch


def valid_anchors(length: int, prompt_length: int, label_span: int) -> range:
    """All anchors of a row.

    Args:
        length: tokens in the row.
        prompt_length: tokens that the target did not write (0 for plain text).
        label_span: tokens after the anchor that must lie inside the row (block_size - 1 for measurement, 1 for
            calibration, which needs no labels).

    Returns:
        The positions, possibly empty.
    """
    return range(max(1, prompt_length), max(length - label_span, 0))


def sample_anchors(
    length: int, prompt_length: int, label_span: int, count: int | None, generator: torch.Generator
) -> torch.Tensor:
    """Draw `count` distinct anchors of a row, sorted; all of them if `count` is None or there are no more.

    Returns:
        int64 `(N,)`.
    """
    positions = torch.tensor(list(valid_anchors(length, prompt_length, label_span)), dtype=torch.int64)
    if count is None or len(positions) <= count:
        return positions
    chosen = torch.randperm(len(positions), generator=generator)[:count]
    return positions[chosen].sort().values

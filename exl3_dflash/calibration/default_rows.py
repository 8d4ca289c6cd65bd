"""`default`: the corpora of the installed exllamav3 mixed with prompts under the target's chat template.

Every source gets its share of the rows by weight, on both sides; a source that runs out of text leaves the rest of its
share to the others. Prompts are rendered without their answers (which only `chat` has the target write) and packed
into full rows like documents, so that the drafter also sees the template's own tokens; prompts that are longer than a
row are left out, or a few long ones would be most of the prompt rows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from calibration_data.corpora import standard_corpora
from calibration_data.prompts import Prompt
from exl3_dflash.calibration.conversations import render
from exl3_dflash.calibration.packing import DocumentSource, PackedRows, pack_documents, special_prefix
from exl3_dflash.calibration.rowset import RowPools, RowRequest
from exl3_dflash.target.base import Target, TargetTokenizer

PROMPT_WEIGHT = 25.0  # beside the corpora's 95


def default_rows(target: Target, prompts: Sequence[Prompt], request: RowRequest) -> RowPools:
    """Rows of the mix; see the module docstring."""
    tokenizer = target.tokenizer
    prefix = special_prefix(tokenizer)
    sources = [
        (DocumentSource.of_texts(corpus.name, corpus.documents(), tokenizer), corpus.weight)
        for corpus in standard_corpora()
    ]
    pools = RowPools()
    if tokenizer.has_chat_template:
        sources.append((_prompt_source(tokenizer, prompts, prefix, request), PROMPT_WEIGHT))
    else:
        pools.notes.append("the target has no chat template, so the rows hold no prompts")
    for packed in mix(sources, prefix, request):
        pools.rows += packed.rows
        pools.held_out += packed.held_out
    for rows in (pools.rows, pools.held_out):
        random.Random(request.seed).shuffle(rows)
    return pools


def _prompt_source(
    tokenizer: TargetTokenizer, prompts: Sequence[Prompt], prefix: list[int], request: RowRequest
) -> DocumentSource:
    """Rendered prompts as documents; the tokenizer's prefix is taken off, for every row gets one."""
    rendered = [render(tokenizer, prompt.messages, request.thinking_of(prompt.messages), False) for prompt in prompts]
    without_prefix = [ids[len(prefix) :] if prefix and ids[: len(prefix)] == prefix else ids for ids in rendered]
    fitting = [ids for ids in without_prefix if len(ids) + len(prefix) <= request.cols]
    return DocumentSource("prompts", len(fitting), lambda index: fitting[index])


def mix(sources: Sequence[tuple[DocumentSource, float]], prefix: list[int], request: RowRequest) -> list[PackedRows]:
    """Pack every source's share; shares that a source cannot fill go to those that can, until nothing is missing."""
    weights = [weight for _, weight in sources]
    limits_rows: list[int | None] = [None] * len(sources)
    limits_held: list[int | None] = [None] * len(sources)
    while True:
        rows = shares(request.rows, weights, limits_rows)
        held = shares(request.held_out, weights, limits_held)
        packed = [
            pack_documents(source, held_out=h, rows=r, cols=request.cols, prefix=prefix, seed=request.seed)
            for (source, _), h, r in zip(sources, held, rows, strict=True)
        ]
        short = [i for i, part in enumerate(packed) if len(part.rows) < rows[i] or len(part.held_out) < held[i]]
        if not short or all(limits_rows[i] is not None for i in short):
            return packed
        for i in short:
            limits_rows[i], limits_held[i] = len(packed[i].rows), len(packed[i].held_out)


def shares(count: int, weights: Sequence[float], limits: Sequence[int | None]) -> list[int]:
    """Divide `count` by weight: largest remainders, earlier ones first in a tie; no share exceeds its limit."""
    result = [0] * len(weights)
    open_indices = list(range(len(weights)))
    left = count
    while open_indices:
        total = sum(weights[i] for i in open_indices)
        exact = {i: left * weights[i] / total for i in open_indices}
        over = [i for i in open_indices if (limit := limits[i]) is not None and exact[i] > limit]
        if not over:
            break
        for i in over:
            result[i] = limits[i] or 0
            left -= result[i]
            open_indices.remove(i)
    for i in open_indices:
        result[i] = int(exact[i])
    by_remainder = sorted(open_indices, key=lambda i: (result[i] - exact[i], i))
    for i in by_remainder[: count - sum(result)]:
        result[i] += 1
    return result

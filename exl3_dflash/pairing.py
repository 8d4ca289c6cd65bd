"""Does a drafter fit a target? Decided from configs and shapes, before anyone waits for anything.

A drafter that does not fit still runs if the shapes happen to agree, and its output stays right because the target
verifies: only the acceptance is lost, in silence. So everything that can be known without a forward is an error here:

- width: fc reads K taps of the target's hidden size; without its own embedding and head the drafter shares the
target's;
- depth: the tapped layers exist, and the target has as many layers as the drafter was trained for;
- vocabulary: equal, or different only in padding rows (both tables cover every id of the tokenizer);
- mask token: a row of the table that the drafter embeds with.

What only a forward can show (a fine-tuned target of the same shape, a wrong tap shift) is the business of `doctor`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from exl3_dflash.errors import Exl3DflashError

if TYPE_CHECKING:
    from exl3_dflash.drafter.config import DrafterConfig

MAX_PADDING_ROWS = 1024  # tables are padded to multiples of 64 to 1,024; more apart is another vocabulary


class DrafterSide(Protocol):
    """What is looked at of a drafter; `drafter.checkpoint.DrafterCheckpoint` has it."""

    @property
    def config(self) -> DrafterConfig: ...
    @property
    def target_hidden_size(self) -> int: ...
    @property
    def has_embedding(self) -> bool: ...
    @property
    def has_head(self) -> bool: ...
    @property
    def has_mask_embedding(self) -> bool: ...


class TargetSide(Protocol):
    """What is looked at of a target: `target.base.TargetFacts`, or `target.load.sketch_target` without any weights."""

    @property
    def name(self) -> str: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tokenizer_size(self) -> int: ...


@dataclass(frozen=True)
class Finding:
    """One thing about a pair: a problem, or a note where `fits`.

    area is `dimensions`, `layers`, `vocabulary` or `mask token`.
    """

    text: str
    fits: bool = False
    area: str = ""


def check_pairing(drafter: DrafterSide, target: TargetSide) -> tuple[str, ...]:
    """Notes about a pair that fits.

    Raises:
        Exl3DflashError: the pair does not fit; one message with every reason.
    """
    findings = find_pairing(drafter, target)
    problems = [finding.text for finding in findings if not finding.fits]
    if problems:
        raise Exl3DflashError(
            f"the drafter does not fit the target {target.name}: {'; '.join(problems)}",
            expected="the target that the drafter was trained for",
            fix="choose that target (the drafter's model card names it)",
        )
    return tuple(finding.text for finding in findings)


def find_pairing(drafter: DrafterSide, target: TargetSide) -> tuple[Finding, ...]:
    """Every finding about a pair, problems and notes, without raising."""
    areas = {
        "dimensions": _check_width(drafter, target),
        "layers": _check_depth(drafter.config, target),
        "vocabulary": _check_vocabulary(drafter.config, target),
        "mask token": _check_mask_token(drafter, target),
    }
    return tuple(replace(finding, area=area) for area, findings in areas.items() for finding in findings)


def _check_width(drafter: DrafterSide, target: TargetSide) -> Iterator[Finding]:
    taps, width = len(drafter.config.target_layer_ids), drafter.target_hidden_size
    if width != target.hidden_size:
        yield Finding(f"fc reads {taps} taps of width {width}, the target's layers have width {target.hidden_size}")
    elif drafter.config.hidden_size != target.hidden_size and not (drafter.has_embedding and drafter.has_head):
        shared = "head" if drafter.has_embedding else "embedding" if drafter.has_head else "embedding and head"
        yield Finding(
            f"the drafter's hidden size is {drafter.config.hidden_size}, but it uses the target's {shared} "
            f"of width {target.hidden_size}"
        )


def _check_depth(config: DrafterConfig, target: TargetSide) -> Iterator[Finding]:
    from exl3_dflash.drafter.taps import tap_layer_indices

    trained = config.num_target_layers
    if trained is not None and trained != target.num_layers:
        yield Finding(f"it was trained for a target of {trained} layers, this one has {target.num_layers}")
    outside = [layer for layer in tap_layer_indices(config) if not 0 <= layer < target.num_layers]
    if outside:
        yield Finding(f"it taps layer {outside[0]}, the target has layers 0 to {target.num_layers - 1}")


def _check_vocabulary(config: DrafterConfig, target: TargetSide) -> Iterator[Finding]:
    rows, target_rows, known = config.vocab_size, target.vocab_size, target.tokenizer_size
    if rows is None or rows == target_rows:
        return
    if min(rows, target_rows) >= known and abs(rows - target_rows) <= MAX_PADDING_ROWS:
        yield Finding(
            f"vocabularies of {rows} (drafter) and {target_rows} (target) rows differ only in padding: "
            f"the tokenizer knows {known} ids",
            fits=True,
        )
    else:
        yield Finding(
            f"its vocabulary has {rows} rows, the target's {target_rows} (the tokenizer knows {known} ids), "
            "which is more than a difference in padding"
        )


def _check_mask_token(drafter: DrafterSide, target: TargetSide) -> Iterator[Finding]:
    rows = (drafter.config.vocab_size or 0) if drafter.has_embedding else target.vocab_size
    if not drafter.has_mask_embedding and not 0 <= drafter.config.mask_token_id < rows:
        owner = "its own embedding" if drafter.has_embedding else "the target's embedding"
        yield Finding(f"mask_token_id {drafter.config.mask_token_id} is no row of {owner} ({rows} rows)")

"""What calibration and measurement run on: rows of token ids, and the request they are made for."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.progress import Reporter

# Rows shorter than this hold no block with labels and are not worth a forward.
MIN_ROW_TOKENS = 16
ANSWER_TOKENS = 512


@dataclass(frozen=True, eq=False)
class TokenRow:
    """One sequence as the target reads it.

    Attributes:
        ids: (S,) int64 on the CPU, without padding.
        prompt_length: tokens before the answer; 0 where all of the row is text. Anchors are sampled after it.
        kind: what sort of text it is: a corpus, a kind of prompt, or `text` and `rows` of a file.
    """

    ids: torch.Tensor
    prompt_length: int
    kind: str


@dataclass(frozen=True)
class RowSet:
    """Rows for calibration and, disjoint from them, for measurement.

    Attributes:
        rows: calibration rows in a seeded order.
        source: `default`, `chat` or the path.
        held_out: rows of which no document, prompt or file row is among the calibration rows.
        notes: what a report should say: fewer rows than asked, clamped lengths, skipped prompts.
    """

    rows: tuple[TokenRow, ...]
    source: str
    held_out: tuple[TokenRow, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of the calibration rows."""
        return sum(len(row.ids) for row in self.rows)


@dataclass(frozen=True)
class RowRequest:
    """How many rows of what size are wanted.

    Attributes:
        rows, held_out: calibration and held-out rows.
        cols: most tokens of a row.
        seed: of every choice and of sampled answers.
        thinking: the chat template's thinking switch; None leaves its default.
        answer_tokens: most tokens the target writes for one prompt.
        batch_tokens: bounds the cached tokens of answers that are generated at once.
        reporter: where progress is shown.

    Raises:
        Exl3DflashError: a number out of its range.
    """

    rows: int
    cols: int
    held_out: int = 0
    seed: int = 0
    thinking: bool | None = None
    answer_tokens: int = ANSWER_TOKENS
    batch_tokens: int = 16384
    reporter: Reporter = field(default_factory=lambda: Reporter(quiet=True))

    def __post_init__(self) -> None:
        for name, value, least in (
            ("calibration rows", self.rows, 0),
            ("held-out rows", self.held_out, 0),
            ("tokens per calibration row", self.cols, 2 * MIN_ROW_TOKENS),
            ("tokens per answer", self.answer_tokens, MIN_ROW_TOKENS),
        ):
            if value < least:
                raise Exl3DflashError(f"{value} {name}", f"at least {least}", "ask for more")


@dataclass
class RowPools:
    """Rows under construction: the two sides and the notes that go with them."""

    rows: list[TokenRow] = field(default_factory=list)
    held_out: list[TokenRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

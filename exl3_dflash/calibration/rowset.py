"""What calibration and measurement run on: rows of token ids, and the request they are made for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from calibration_data.messages import Message
from exl3_dflash.calibration.answers import AnswerStore
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.progress import Reporter

# Rows shorter than this hold no block with labels and are not worth a forward.
MIN_ROW_TOKENS = 16
ANSWER_TOKENS = 512
# What `--thinking` may say, and the switch of the chat template that it stands for; None is the template's default.
THINKING: dict[str, tuple[bool | None, ...]] = {
    "default": (None,),
    "on": (True,),
    "off": (False,),
    "both": (True, False),
}


def check_thinking(thinking: str, supported: bool = True, target: str = "the target") -> None:
    """Refuse a `--thinking` that there is not, or for which the target's chat template has no switch.

    Args:
        thinking: what the user gave.
        supported: whether the template reads a switch; True before that is known.
        target: what the message calls the target.

    Raises:
        Exl3DflashError: it cannot be done.
    """
    if thinking not in THINKING:
        raise Exl3DflashError(f"--thinking {thinking!r}", f"one of {', '.join(THINKING)}", "use --thinking both")
    if thinking in ("on", "both") and not supported:
        raise Exl3DflashError(
            f"--thinking {thinking}: the chat template of {target} has no thinking switch",
            expected="a target whose template has one",
            fix="leave --thinking out",
        )


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
        thinking: the chat template's thinking switch, None leaves its default; of several, each conversation gets one.
        answer_tokens: most tokens the target writes for one prompt.
        batch_tokens: bounds the cached tokens of answers that are generated at once.
        reporter: where progress is shown.
        answers: where the target's answers are kept while they are written; None keeps nothing.

    Raises:
        Exl3DflashError: a number out of its range.
    """

    rows: int
    cols: int
    held_out: int = 0
    seed: int = 0
    thinking: tuple[bool | None, ...] = (None,)
    answer_tokens: int = ANSWER_TOKENS
    batch_tokens: int = 16384
    reporter: Reporter = field(default_factory=lambda: Reporter(quiet=True))
    answers: AnswerStore | None = None

    def __post_init__(self) -> None:
        for name, value, least in (
            ("calibration rows", self.rows, 0),
            ("held-out rows", self.held_out, 0),
            ("tokens per calibration row", self.cols, 2 * MIN_ROW_TOKENS),
            ("tokens per answer", self.answer_tokens, MIN_ROW_TOKENS),
        ):
            if value < least:
                raise Exl3DflashError(f"{value} {name}", f"at least {least}", "ask for more")

    def thinking_of(self, messages: Sequence[Message]) -> bool | None:
        """The switch of one conversation: one of `thinking`, drawn by what it says, so that it never changes."""
        said = repr([(message["role"], message["content"]) for message in messages])
        return random.Random(f"{self.seed} thinking {said}").choice(self.thinking)


@dataclass
class RowPools:
    """Rows under construction: the two sides and the notes that go with them."""

    rows: list[TokenRow] = field(default_factory=list)
    held_out: list[TokenRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

"""The engine interface: what chat, benchmarks, evaluation and the server know about generation.

A request is a list of token ids, sampling settings and stop settings; the answer is an iterator of steps. The first
step is the prefill, with one token (none in an engine that verifies from the prompt's last token on, `runtime.stats`);
each later step is one target forward with one or more tokens:

    prompt ids --generate--> Step(prefill, 1 token), Step(verify, 1..m+1 tokens), ... ; `engine.stats` counts

Settings are checked here and nowhere else. The stop token, where one ended the answer, is the last emitted id; text
consumers leave it out (`runtime.streaming`). Nothing is ever emitted after a stop.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.runtime.stats import GenerationStats, longest_repeated_run

if TYPE_CHECKING:
    from exl3_dflash.target.base import TargetTokenizer

__all__ = ["Engine", "GenerationStats", "SamplingSettings", "Step", "StopSettings", "longest_repeated_run"]

Phase = Literal["prefill", "verify", "decode"]


def _check(name: str, value: float, valid: bool, expected: str) -> None:
    if not (isinstance(value, (int, float)) and math.isfinite(value) and valid):
        raise Exl3DflashError(f"{name} is {value!r}", expected=expected, fix=f"pass another {name}")


@dataclass(frozen=True)
class SamplingSettings:
    """How a token is drawn from the target's logits; temperature 0 is greedy and ignores the filters and the seed.

    Args:
        temperature: 0 or more; logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches p, in (0, 1].
        min_p: drop tokens below min_p times the most likely one's probability, in [0, 1].
        repetition_penalty: divides positive and multiplies negative logits of every token seen so far; 1 is off.
        seed: seeds the request; None draws a fresh seed for each request.

    Raises:
        Exl3DflashError: a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, self.temperature >= 0, "a number of 0 or more")
        _check("top_k", self.top_k, self.top_k >= 0 and int(self.top_k) == self.top_k, "a whole number, 0 or more")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "a number above 0 and at most 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "a number from 0 to 1")
        _check("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "a number above 0")
        if self.seed is not None:
            _check("seed", self.seed, 0 <= self.seed < 2**63, "a whole number from 0 to 2^63 - 1")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0


@dataclass(frozen=True)
class StopSettings:
    """When an answer ends: after exactly `max_new_tokens`, at a token of `token_ids`, or at one of `strings`.

    The token that ends the answer is emitted; text from the stop string on is not shown.

    Raises:
        Exl3DflashError: max_new_tokens below 1, a negative token id, or an empty stop string.
    """

    max_new_tokens: int = 512
    token_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        whole = isinstance(self.max_new_tokens, int) and self.max_new_tokens >= 1
        _check("max_new_tokens", self.max_new_tokens, whole, "a whole number, 1 or more")
        for token_id in self.token_ids:
            _check("a stop token id", token_id, token_id >= 0, "a token id, 0 or more")
        if any(not string for string in self.strings):
            raise Exl3DflashError("a stop string is empty", expected="at least one character", fix="leave it out")


@dataclass(frozen=True)
class Step:
    """One target forward: the tokens it emitted and what the drafter had to do with them.

    `proposed` draft tokens were verified, the first `accepted` of `token_ids` are draft tokens; `seconds` is the work
    of this step (drafting, verification and bookkeeping).
    """

    token_ids: tuple[int, ...]
    proposed: int
    accepted: int
    seconds: float
    phase: Phase


class Engine(Protocol):
    """A target, an optional drafter and one sequence of cached tokens."""

    @property
    def tokenizer(self) -> TargetTokenizer:
        """The target's tokenizer."""

    @property
    def stats(self) -> GenerationStats:
        """Counters of the running or the last request."""

    @property
    def context_limit(self) -> int | None:
        """Tokens that fit into the target's positions, prompt and answer together; None if unlimited."""

    @property
    def max_draft_tokens(self) -> int:
        """The most tokens a step can draft; 0 without a drafter."""

    @property
    def draft_tokens(self) -> int:
        """Tokens drafted per step; 0 means plain decoding, in which the drafter is never run."""

    @draft_tokens.setter
    def draft_tokens(self, count: int) -> None: ...

    def generate(self, ids: Sequence[int], sampling: SamplingSettings, stops: StopSettings) -> Generator[Step]:
        """Generate after the prompt `ids`; closing the iterator stops the answer and leaves the engine usable.

        Raises:
            Exl3DflashError: an empty prompt, a token id outside the vocabulary, or a prompt that fills the context.
        """

    def reset(self) -> None:
        """Forget every cached token."""

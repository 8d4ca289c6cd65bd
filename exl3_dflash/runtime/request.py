"""The state of one running request: its prompt, what was emitted, what may still be, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.runtime.engine import StopSettings
from exl3_dflash.runtime.sampling import Sampler
from exl3_dflash.runtime.stats import GenerationStats
from exl3_dflash.runtime.streaming import TextStream
from exl3_dflash.target.base import TargetFacts


def check_prompt(ids: Sequence[int], facts: TargetFacts, context_limit: int | None) -> None:
    """Raise Exl3DflashError for an empty prompt, an id outside the vocabulary, or a prompt that fills the context."""
    if not ids:
        raise Exl3DflashError("the prompt has no tokens", expected="at least one", fix="write something")
    outside = [token for token in (min(ids), max(ids)) if not 0 <= token < facts.vocab_size]
    if outside:
        raise Exl3DflashError(
            f"the prompt has the token id {outside[0]}",
            expected=f"ids 0 to {facts.vocab_size - 1} of {facts.name}",
            fix="use the target's own tokenizer",
        )
    if context_limit is not None and len(ids) >= context_limit:
        raise Exl3DflashError(
            f"the context is full: the prompt has {len(ids)} tokens",
            expected=f"fewer than the target's {context_limit} positions",
            fix="shorten the prompt or start a new conversation",
        )


def check_draft_tokens(count: int, most: int) -> None:
    """Raise `Exl3DflashError` unless 0 <= count <= most, which is block_size - 1, or 0 without a drafter."""
    if not 0 <= count <= most:
        expected = f"0 to {most}, the drafter's block size less one" if most else "0: no drafter is loaded"
        raise Exl3DflashError(f"draft tokens: {count}", expected, "pass another number of draft tokens")


def token_limit(prompt_tokens: int, stops: StopSettings, context_limit: int | None) -> tuple[int, str]:
    """The most tokens that an answer may have, and the stop reason where it reaches that: "length" or "context"."""
    room = stops.max_new_tokens if context_limit is None else context_limit - prompt_tokens
    return min(stops.max_new_tokens, room), "length" if stops.max_new_tokens <= room else "context"


@dataclass(kw_only=True)
class Emission:
    """A prompt, its stops and the tokens so far; `limit` is the most tokens it may emit, for `limit_reason`."""

    ids: list[int]
    stops: StopSettings
    limit: int
    limit_reason: str
    draft_tokens: int
    text: TextStream
    stats: GenerationStats
    emitted: list[int] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.limit - len(self.emitted)

    def emit(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Record tokens up to the first stop and return those that were emitted."""
        taken: list[int] = []
        for token in tokens:
            taken.append(token)
            self.emitted.append(token)
            self.stats.stop_reason = self._stop_reason(token)
            if self.stats.stop_reason:
                break
        self.stats.new_tokens = len(self.emitted)
        return tuple(taken)

    def _stop_reason(self, token: int) -> str:
        if token in self.stops.token_ids:
            return "token"
        if self.stops.strings:
            self.text.push((token,))
            if self.text.stopped:
                return "string"
        return "" if self.remaining else self.limit_reason


@dataclass(kw_only=True)
class Request(Emission):
    """What the reference engine keeps of a request: its sampler, too."""

    sampler: Sampler

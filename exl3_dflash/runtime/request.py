"""The state of one running request: what was emitted, what may still be, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from exl3_dflash.runtime.engine import StopSettings
from exl3_dflash.runtime.sampling import Sampler
from exl3_dflash.runtime.stats import GenerationStats
from exl3_dflash.runtime.streaming import TextStream


@dataclass
class Request:
    """A prompt, its settings and the tokens so far; `limit` is the most tokens it may emit, for `limit_reason`."""

    ids: list[int]
    stops: StopSettings
    limit: int
    limit_reason: str
    draft_tokens: int
    sampler: Sampler
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

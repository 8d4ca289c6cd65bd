"""One request in ExLlamaV3's generator: its job, and what an iteration of the generator did for it.

A job's facts that are read, in 1.6.5 and 1.4.2 alike: `sequences[0].sequence_ids`, prompt and answer so far;
`draft_stats`, one entry (position, proposed, accepted, ..) per verification where the generator records them;
`time_first_token`, when the prefill was done; `cached_pages` and `cached_tokens`, what the prefix cache gave;
`is_finished`, whether it ended by itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.runtime.engine import SamplingSettings, Step, StopSettings
from exl3_dflash.runtime.exllama_model import PAGE_TOKENS
from exl3_dflash.runtime.request import Emission
from exl3_dflash.runtime.stats import longest_repeated_run

JOB_FACTS = ("sequences", "draft_stats", "cached_pages", "cached_tokens", "time_first_token", "is_finished")


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt and its settings, for `ExllamaEngine.generate_many`."""

    ids: Sequence[int]
    sampling: SamplingSettings
    stops: StopSettings


@dataclass(kw_only=True, eq=False)
class ExllamaRequest(Emission):
    """A request in the generator; `stats` counts it, and `stats.stop_reason` is set when it has ended.

    `waiting` are steps that came while another request's iterator ran the generator.
    """

    job: Any
    submitted: float = field(default_factory=time.time)
    prefilled: bool = False
    rounds: int = 0
    error: Exl3DflashError | None = None
    waiting: deque[Step] = field(default_factory=deque)

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return bool(self.stats.stop_reason)

    def check(self) -> None:
        """Raise what this request failed of, if it did."""
        if self.error is not None:
            raise self.error

    def take_window(self) -> int:
        """Tokens that the iteration just done proposed for this request; 0 where the generator did not draft."""
        if len(self.job.draft_stats) == self.rounds:
            return 0
        self.rounds = len(self.job.draft_stats)
        return int(self.job.draft_stats[-1][1])

    def advance(self, draft: Sequence[int], began: float) -> list[Step]:
        """The steps of one iteration, which began at `began` (seconds since the epoch) and proposed `draft`."""
        now, steps = time.time(), []
        if not self.prefilled:
            began = self.job.time_first_token
            steps.append(self._end_prefill(began))
            self.stats.first_step_seconds = now - began
        known = len(self.ids) + len(self.emitted)
        tokens = self.emit(self.job.sequences[0].sequence_ids.torch()[0, known:].tolist())
        agreed = [token == drafted for token, drafted in zip(tokens, draft, strict=False)]
        accepted = agreed.index(False) if False in agreed else len(agreed)
        self.stats.decode_seconds += now - began
        self.stats.decode_steps += 1
        self.stats.verify_steps += 1 if self.draft_tokens else 0
        self.stats.proposed += len(draft)
        self.stats.accepted += accepted
        steps.append(Step(tokens, len(draft), accepted, now - began, "verify" if self.draft_tokens else "decode"))
        return steps

    def end(self, reason: str) -> None:
        """Nothing more will come, for `reason` unless there is another one already."""
        self.stats.stop_reason = self.stats.stop_reason or reason
        self.stats.repeated_run = longest_repeated_run(self.emitted)

    def _end_prefill(self, done: float) -> Step:
        """The step without a token that an answer begins with."""
        self.prefilled = True
        self.stats.prefill_seconds = done - self.submitted
        self.stats.reused_tokens = self.job.cached_pages * PAGE_TOKENS + self.job.cached_tokens
        return Step((), 0, 0, self.stats.prefill_seconds, "prefill")

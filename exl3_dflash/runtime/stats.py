"""What one request cost and how well its drafts did, with the definitions of the project written beside each number.

Engines disagree about these names, so every number here is defined once:

- verify step: one target forward over [anchor, draft_1..draft_m] of a decoding with a drafter (m is 0 for the last
  token that a limit allows, and where a dynamic draft expects nothing).
- prefill token: the one that the prefill of a prompt gives. ExLlamaV3's prefill leaves the prompt's last token out, so
  that its first verify step begins there: it has no prefill token (`prefill_tokens` is 0).
- accept length: tokens emitted after the prefill token / verify steps. Tokens that a stop cut away are not counted.
- accept rate: accepted draft tokens / proposed draft tokens. A draft token that a stop cut away is not accepted.
- tokens per second: tokens emitted after the prefill token / seconds of decoding. Prefill is reported apart.
- time to first token: seconds of work from the call to the first token: prompt prefill and its sampling, and the first
  step where there is no prefill token. Of several requests at once it includes their wait for each other.

Plain decoding has no verify steps: its accept length and accept rate are None, not 1 or 0.
Time that the consumer of the stream spends between two steps is not counted.

Looping text inflates acceptance, so the longest repeated run of the output is measured with every request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_PERIOD = 64
MIN_REPEATS = 3
LOOPING_TOKENS = 32


def longest_true_run(flags: np.ndarray) -> int:
    """Length of the longest run of True in a bool array (n,)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False]))))
    return int((edges[1::2] - edges[0::2]).max(initial=0))


def longest_repeated_run(token_ids: Sequence[int], max_period: int = MAX_PERIOD) -> int:
    """Tokens in the longest stretch that is one unit repeated back to back, at least `MIN_REPEATS` times.

    Units of 1 to `max_period` tokens are tried: a stretch of period p and n tokens has n - p positions that equal the
    token p before them. Returns 0 where nothing repeats. O(len * max_period) in numpy.
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    best = 0
    for period in range(1, min(max_period, len(ids) // MIN_REPEATS) + 1):
        run = longest_true_run(ids[period:] == ids[:-period]) + period
        if run >= MIN_REPEATS * period:
            best = max(best, run)
    return best


@dataclass
class GenerationStats:
    """Counters of one request; the module docstring defines every derived number.

    `first_step_seconds` are those of the first decoding step, which are also part of `decode_seconds`.
    `stop_reason` is "" while the request runs, then "token", "string", "length" (token limit), "context" (the model's
    positions, or its cache, are used up) or "interrupted" (the consumer closed the stream).
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    verify_steps: int = 0
    decode_steps: int = 0
    proposed: int = 0
    accepted: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    stop_reason: str = ""
    repeated_run: int = 0
    prefill_tokens: int = 1
    first_step_seconds: float = 0.0

    @property
    def decoded_tokens(self) -> int:
        """Tokens emitted after the prefill token."""
        return max(0, self.new_tokens - self.prefill_tokens)

    @property
    def accept_length(self) -> float | None:
        """Tokens emitted after the prefill token per verify step, or None where nothing was verified."""
        return self.decoded_tokens / self.verify_steps if self.verify_steps else None

    @property
    def accept_rate(self) -> float | None:
        """Accepted / proposed draft tokens, or None where nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed without prefill, or None where nothing was decoded after the prefill token."""
        return self.decoded_tokens / self.decode_seconds if self.decoded_tokens and self.decode_seconds else None

    @property
    def time_to_first_token(self) -> float:
        """Seconds of work until the first token."""
        return self.prefill_seconds + (0.0 if self.prefill_tokens else self.first_step_seconds)

    @property
    def looping(self) -> bool:
        """Whether the output repeats itself so much that its acceptance and speed say nothing about the drafter."""
        return self.repeated_run >= LOOPING_TOKENS

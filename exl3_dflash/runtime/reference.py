"""The reference engine: draft, verify and accept with a torch drafter and any target session, on any device.

One request:

    prefill   target.forward(prompt, taps) -> drafter context;  first token from the last logits
    repeat    anchor = last emitted token (in neither cache yet)
              drafter: block [anchor, mask..] over its context -> d_1..d_m (`DrafterModel.propose`)
              target.forward([anchor, d_1..d_m], taps) -> logits (m+1, V)
              draw while the draw equals the draft (`runtime.sampling`): e tokens
              both caches keep the anchor and the first e-1 of them

Between requests both caches keep their tokens, and the next prompt reuses the longest common prefix. The drafter's
context is always a prefix of the target session's tokens: a plain request lets it fall behind, and a drafted request
then rolls the session back to it. Plain decoding asks for no taps and never runs the drafter.

A drafter that looks ahead inside its block always gets the whole block it was trained with, however few tokens are
wanted; a causal one gets only the rows that are needed, which changes nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import takewhile
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from exl3_dflash.drafter.taps import tap_layer_indices
from exl3_dflash.runtime.engine import Phase, SamplingSettings, Step, StopSettings
from exl3_dflash.runtime.request import Request, check_draft_tokens, check_prompt, token_limit
from exl3_dflash.runtime.sampling import Sampler, check_finite
from exl3_dflash.runtime.stats import GenerationStats, longest_repeated_run
from exl3_dflash.runtime.streaming import TextStream
from exl3_dflash.target.base import TapRows, Target, TargetTokenizer

if TYPE_CHECKING:
    from exl3_dflash.drafter.model import DrafterModel

# Bounds the taps of a prefill forward, K*Ht values per row. Not smaller than needed: some recurrent layers can only
# continue token by token, so that every forward after the first is slow on them.
PREFILL_ROWS = 4096


def shared_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of leading tokens that two sequences share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


class ReferenceEngine:
    """`Engine` over a target session and, optionally, a drafter.

    Args:
        target: the model whose text is generated.
        drafter: proposes tokens; None is plain decoding.
        draft_tokens: tokens drafted per step, at most block_size - 1, which is the default; 0 is plain decoding.

    Raises:
        Exl3DflashError: draft_tokens out of range, or taps outside the target.
    """

    def __init__(self, target: Target, drafter: DrafterModel | None = None, draft_tokens: int | None = None) -> None:
        self._target = target
        self._drafter = drafter
        self._tap_ids = tap_layer_indices(drafter.config) if drafter else ()
        self._causal_block = drafter is not None and all(
            map(drafter.config.layer_is_causal, range(drafter.config.num_layers))
        )
        self._stats = GenerationStats()
        self._active: Request | None = None
        self.draft_tokens = self.max_draft_tokens if draft_tokens is None else draft_tokens
        self.reset()

    @property
    def tokenizer(self) -> TargetTokenizer:
        """The target's tokenizer."""
        return self._target.tokenizer

    @property
    def stats(self) -> GenerationStats:
        """Counters of the running or the last request."""
        return self._stats

    @property
    def context_limit(self) -> int | None:
        """The target's number of positions."""
        return self._target.facts.max_position_embeddings

    @property
    def max_draft_tokens(self) -> int:
        """block_size - 1 of the drafter, 0 without one."""
        return self._drafter.config.block_size - 1 if self._drafter else 0

    @property
    def draft_tokens(self) -> int:
        """Tokens drafted per step from the next request on; 0 is plain decoding."""
        return self._draft_tokens

    @draft_tokens.setter
    def draft_tokens(self, count: int) -> None:
        check_draft_tokens(count, self.max_draft_tokens)
        self._draft_tokens: int = count

    def reset(self) -> None:
        """Forget every cached token."""
        self._session = self._target.new_session()
        self._cache = self._drafter.new_cache() if self._drafter else None

    def generate(self, ids: Sequence[int], sampling: SamplingSettings, stops: StopSettings) -> Generator[Step]:
        """Generate after the prompt `ids`; see `Engine.generate`. The prompt is checked before the first step.

        Raises:
            Exl3DflashError: an empty prompt, a token id outside the vocabulary, or a prompt that fills the context.
        """
        check_prompt(ids, self._target.facts, self.context_limit)
        limit, reason = token_limit(len(ids), stops, self.context_limit)
        request = Request(
            ids=list(ids),
            stops=stops,
            limit=limit,
            limit_reason=reason,
            draft_tokens=self._draft_tokens,
            sampler=Sampler(sampling, ids),
            text=TextStream(self.tokenizer, stops),
            stats=GenerationStats(prompt_tokens=len(ids)),
        )
        return self._run(request)

    def _run(self, request: Request) -> Generator[Step]:
        """Yield the steps; between two of them the caches are always consistent."""
        self._stats, self._active = request.stats, request
        try:
            yield self._guarded(request, first=True)
            while not request.stats.stop_reason:
                assert self._active is request, "another request was started on this engine"
                yield self._guarded(request, first=False)
        finally:
            request.stats.stop_reason = request.stats.stop_reason or "interrupted"
            request.stats.repeated_run = longest_repeated_run(request.emitted)

    def _guarded(self, request: Request, first: bool) -> Step:
        """One step; whatever breaks it (also Ctrl-C) may leave half a forward in a cache, so both are dropped then."""
        started = perf_counter()
        try:
            with torch.inference_mode():
                tokens, proposed, accepted = self._prefill(request) if first else self._advance(request)
        except BaseException:
            self.reset()
            raise
        seconds = perf_counter() - started
        self._count(request, first, proposed, accepted, seconds)
        phase: Phase = "prefill" if first else "verify" if request.draft_tokens else "decode"
        return Step(tokens, proposed, accepted, seconds, phase)

    def _count(self, request: Request, first: bool, proposed: int, accepted: int, seconds: float) -> None:
        stats = request.stats
        if first:
            stats.prefill_seconds = seconds
            return
        stats.decode_seconds += seconds
        stats.decode_steps += 1
        stats.verify_steps += 1 if request.draft_tokens else 0
        stats.proposed += proposed
        stats.accepted += accepted

    def _prefill(self, request: Request) -> tuple[tuple[int, ...], int, int]:
        """Run what the caches lack of the prompt and draw the first token."""
        reused = min(shared_prefix(self._session.ids, request.ids), len(request.ids) - 1)
        if self._cache is not None:
            if request.draft_tokens:
                reused = min(reused, self._cache.length)
            self._cache.crop(min(reused, self._cache.length))
        self._session.rollback(reused)
        request.stats.reused_tokens = reused
        for start in range(reused, len(request.ids), PREFILL_ROWS):
            chunk = request.ids[start : start + PREFILL_ROWS]
            rows = self._forward(request, chunk, logit_rows=int(start + len(chunk) == len(request.ids)))
            self._extend_context(request, rows, len(chunk))
        return request.emit([request.sampler.sample(self._logits(rows)[-1])]), 0, 0

    def _advance(self, request: Request) -> tuple[tuple[int, ...], int, int]:
        """Draft, verify and keep what was emitted: tokens, number proposed, number accepted and emitted."""
        anchor, start = request.emitted[-1], self._session.length
        draft = self._draft(anchor, min(request.draft_tokens, request.remaining - 1))
        rows = self._forward(request, [anchor, *draft], logit_rows=1 + len(draft))
        verified = request.sampler.verify(self._logits(rows), draft)
        tokens = request.emit(verified)
        if len(tokens) <= len(draft):
            self._session.rollback(start + len(tokens))
        self._extend_context(request, rows, len(tokens))
        return tokens, len(draft), min(len(verified) - 1, len(tokens))

    def _draft(self, anchor: int, count: int) -> list[int]:
        """What the drafter proposes for the `count` positions after the anchor."""
        if count == 0:
            return []
        assert self._drafter is not None
        assert self._cache is not None
        assert self._cache.length == self._session.length, "the drafter's context and the session differ"
        rows = count + 1 if self._causal_block else self._drafter.config.block_size
        anchors = self._ids([anchor])
        block = self._drafter.block_embeddings(self._target, anchors, rows)[0]  # (rows, H)
        hidden = self._drafter.draft(self._cache, block, self._cache.length)  # (rows, H)
        proposal = self._drafter.propose(self._target, anchors, hidden[None, 1 : count + 1])
        check_finite(proposal.logits.amax(-1), "drafter")
        draft: list[int] = proposal.ids[0].tolist()
        return draft

    def _forward(self, request: Request, ids: Sequence[int], logit_rows: int) -> TapRows:
        return self._session.forward(self._ids(ids), self._tap_ids if request.draft_tokens else None, logit_rows)

    def _extend_context(self, request: Request, rows: TapRows, count: int) -> None:
        """Give the first `count` rows to the drafter's context; a plain request leaves the drafter alone."""
        if request.draft_tokens:
            assert self._drafter is not None
            assert self._cache is not None
            self._drafter.extend_context(self._cache, rows.taps[:count])

    def _ids(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self._target.device)

    @staticmethod
    def _logits(rows: TapRows) -> torch.Tensor:
        assert rows.logits is not None
        return rows.logits

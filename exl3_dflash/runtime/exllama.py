"""The engine on CUDA: ExLlamaV3's generator and its kernels behind `Engine`, with as many requests at once as fit.

    submit(prompt)  -> a job in the generator's queue        step() -> one iteration of the generator for all jobs
    generate        -> one request, as `Engine` says         generate_many -> several, as they go on

The generator prefills all of a prompt but its last token and drafts from there: a request's prefill step has no token,
and every later step is one verification [last token, draft_1..draft_m]. How many tokens a verification proposed is what
the generator records per round (`record_draft_stats`), and how many of them it emitted follows from the drafted ids
themselves, so that a stop token that was drafted counts as accepted, as in the reference engine.

What was cached is reused page by page, until `reset` or another number of draft tokens, which begin with a new
generator on the same cache: a drafter's context has no rows for tokens that were decoded without it.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

import torch

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.runtime.engine import SamplingSettings, Step, StopSettings
from exl3_dflash.runtime.exllama_errors import guarded_run, require_facts, run_failure
from exl3_dflash.runtime.exllama_generator import make_generator, spare_tokens
from exl3_dflash.runtime.exllama_model import ExllamaDrafter
from exl3_dflash.runtime.exllama_request import JOB_FACTS, ExllamaRequest, GenerationRequest
from exl3_dflash.runtime.exllama_sampling import make_sampler
from exl3_dflash.runtime.request import check_draft_tokens, check_prompt, token_limit
from exl3_dflash.runtime.stats import GenerationStats
from exl3_dflash.runtime.streaming import TextStream
from exl3_dflash.target.base import TargetTokenizer
from exl3_dflash.target.exllama import ExllamaTarget

__all__ = ["ExllamaEngine", "ExllamaRequest", "GenerationRequest"]


class ExllamaEngine:
    """`Engine` over ExLlamaV3's generator; several requests may run at once, in one thread.

    Args:
        target: the model whose text is generated, with the cache for it.
        drafter: its drafter, loaded with it; None is plain decoding.
        draft_tokens: tokens drafted per step, at most block_size - 1, which is the default; 0 is plain decoding.
        dynamic_draft: verify fewer tokens where the drafter's own confidence says that the rest would be rejected.

    Raises:
        Exl3DflashError: draft_tokens out of range.
    """

    def __init__(
        self,
        target: ExllamaTarget,
        drafter: ExllamaDrafter | None = None,
        draft_tokens: int | None = None,
        dynamic_draft: bool = False,
    ) -> None:
        self._target = target
        self._model = target.loaded
        self._drafter = drafter
        self._dynamic = dynamic_draft
        self._their_tokenizer: Any = None
        self._generator: Any = None
        self._running: list[ExllamaRequest] = []
        self._counted: tuple[GenerationStats, ...] = ()
        self.draft_tokens = self.max_draft_tokens if draft_tokens is None else draft_tokens

    @property
    def tokenizer(self) -> TargetTokenizer:
        """The target's tokenizer."""
        return self._target.tokenizer

    @property
    def stats(self) -> GenerationStats:
        """Counters of the running or the last request."""
        return self._counted[-1] if self._counted else GenerationStats(prefill_tokens=0)

    @property
    def many_stats(self) -> tuple[GenerationStats, ...]:
        """Counters of all requests of the running or the last `generate_many` or `generate`, in their order."""
        return self._counted

    @property
    def context_limit(self) -> int:
        """The target's positions, or what the cache holds beside the tokens that a verification writes ahead."""
        held = self._model.cache_tokens - 1 - self.max_draft_tokens
        positions = self._target.facts.max_position_embeddings
        return held if positions is None else min(held, positions)

    @property
    def max_draft_tokens(self) -> int:
        """block_size - 1 of the drafter, 0 without one."""
        return self._drafter.block_size - 1 if self._drafter else 0

    @property
    def draft_tokens(self) -> int:
        """Tokens drafted per step from the next request on; 0 is plain decoding."""
        return self._draft_tokens

    @draft_tokens.setter
    def draft_tokens(self, count: int) -> None:
        check_draft_tokens(count, self.max_draft_tokens)
        if count != getattr(self, "_draft_tokens", count):
            self.reset()
        self._draft_tokens: int = count

    def reset(self) -> None:
        """Forget every cached token; requests that are running end here."""
        for request in list(self._running):
            self.cancel(request)
        self._drop_generator()

    def generate(self, ids: Sequence[int], sampling: SamplingSettings, stops: StopSettings) -> Generator[Step]:
        """Generate after the prompt `ids`; see `Engine.generate`. The prompt is checked before the first step.

        Raises:
            Exl3DflashError: an empty prompt, a token id outside the vocabulary, or a prompt that fills the context.
        """
        self._check_prompt(ids)
        return self._one(GenerationRequest(ids, sampling, stops))

    def generate_many(self, requests: Sequence[GenerationRequest]) -> Generator[tuple[int, Step]]:
        """Generate for several prompts at once: (index of the request, its next step), as the steps come.

        Closing the iterator ends all of them. `many_stats` counts each.

        Raises:
            Exl3DflashError: as for `generate`, before the first step.
        """
        for request in requests:
            self._check_prompt(request.ids)
        return self._steps(requests)

    def submit(self, ids: Sequence[int], sampling: SamplingSettings, stops: StopSettings) -> ExllamaRequest:
        """Queue a request; `step` runs it.

        Raises:
            Exl3DflashError: as for `generate`.
        """
        self._check_prompt(ids)
        limit, reason = token_limit(len(ids), stops, self.context_limit)
        generator = self._ready_generator()
        job = self._model.library.Job(
            input_ids=torch.tensor([list(ids)], dtype=torch.int64),
            max_new_tokens=limit + spare_tokens(generator, self.max_draft_tokens, self._draft_tokens),
            sampler=make_sampler(self._model.library, sampling),
            seed=sampling.seed,
            stop_conditions=sorted(stops.token_ids) or None,
        )
        require_facts(job, JOB_FACTS)
        request = ExllamaRequest(
            ids=list(ids),
            stops=stops,
            limit=limit,
            limit_reason=reason,
            draft_tokens=self._draft_tokens,
            text=TextStream(self.tokenizer, stops),
            stats=GenerationStats(prompt_tokens=len(ids), prefill_tokens=0),
            job=job,
        )
        guarded_run(lambda: generator.enqueue(job))
        self._running.append(request)
        return request

    def _check_prompt(self, ids: Sequence[int]) -> None:
        check_prompt(ids, self._target.facts, self._target.facts.max_position_embeddings)
        if len(ids) >= self.context_limit:
            raise Exl3DflashError(
                f"the cache is too small for the prompt, which has {len(ids)} tokens",
                expected=f"fewer than {self.context_limit}",
                fix="shorten it, or in `chat` start a new conversation or give more --cache-tokens",
            )

    def cancel(self, request: ExllamaRequest) -> None:
        """End a request that has not finished; its pages are free again."""
        if request in self._running:
            self._generator.cancel(request.job)
            self._end(request, "interrupted")

    def step(self) -> list[tuple[ExllamaRequest, Step]]:
        """One iteration of the generator: the steps of every request that got on. Nothing to do gives an empty list.

        A request that alone failed ends with its `error` set.

        Raises:
            Exl3DflashError: the generator failed; every running request has ended.
        """
        if not self._running:
            return []
        generator = self._ready_generator()
        began = time.time()
        try:
            results = guarded_run(generator.iterate)
        except BaseException:
            self._abandon()
            raise
        by_job = {id(request.job): request for request in self._running}
        for result in results:
            if result["stage"] == "error":  # of one job; the others go on
                request = by_job[id(result["job"])]
                request.error = run_failure(result["error"])
                self._end(request, "interrupted")
        if (
            self._running
            and not generator.num_remaining_jobs()
            and not any(result["stage"] == "streaming" for result in results)
        ):
            self._abandon()
            raise run_failure(RuntimeError("it ended an answer before its limit"))
        streamed = list(dict.fromkeys(id(result["job"]) for result in results if result["stage"] == "streaming"))
        steps: list[tuple[ExllamaRequest, Step]] = []
        for row, key in enumerate(streamed):
            request = by_job[key]
            steps += ((request, step) for step in self._advance(request, row, began))
        return steps

    def _one(self, wanted: GenerationRequest) -> Generator[Step]:
        with closing(self._steps([wanted])) as steps:
            yield from (step for _, step in steps)

    def _steps(self, wanted: Sequence[GenerationRequest]) -> Generator[tuple[int, Step]]:
        """The steps of some requests, each with its request's index; those of others wait for who asks for them."""
        requests: list[ExllamaRequest] = []
        try:
            for one in wanted:
                requests.append(self.submit(one.ids, one.sampling, one.stops))
            self._counted = tuple(request.stats for request in requests)
            while any(request.waiting or not request.finished for request in requests):
                for owner, step in self.step():
                    owner.waiting.append(step)
                for index, request in enumerate(requests):
                    while request.waiting:
                        yield index, request.waiting.popleft()
            for request in requests:
                request.check()
        finally:
            for request in requests:
                self.cancel(request)

    def _advance(self, request: ExllamaRequest, row: int, began: float) -> list[Step]:
        """What one iteration did for a request, whose row in the drafted batch is `row`."""
        window = request.take_window()
        draft = self._generator.draft_ids_pinned[row, :window].tolist() if window else []
        steps = request.advance(draft, began)
        if request.finished:
            if not request.job.is_finished:
                self._generator.cancel(request.job)
            self._end(request, request.stats.stop_reason)
        return steps

    def _end(self, request: ExllamaRequest, reason: str) -> None:
        request.end(reason)
        self._running.remove(request)

    def _abandon(self) -> None:
        """After a failure nothing is known of the cache: start over with the next request."""
        for request in list(self._running):
            self._end(request, "interrupted")
        self._drop_generator()

    def _drop_generator(self) -> None:
        if self._generator is not None and self._model.lease.owner is self._generator:
            self._model.lease.end()
        self._generator = None

    def _ready_generator(self) -> Any:
        """The generator, new where another user of the cache has written to it."""
        lease = self._model.lease
        if self._generator is None or lease.owner is not self._generator:
            assert not self._running, "the cache was taken while requests were running"
            lease.end()
            self._generator = guarded_run(self._new_generator)
            lease.take(self._generator, getattr(self._generator, "close", None))
        return self._generator

    def _new_generator(self) -> Any:
        if self._their_tokenizer is None:
            self._their_tokenizer = self._model.library.Tokenizer.from_config(self._model.config)
        drafter = self._drafter if self._draft_tokens else None
        return make_generator(self._model, self._their_tokenizer, drafter, self._draft_tokens, self._dynamic)

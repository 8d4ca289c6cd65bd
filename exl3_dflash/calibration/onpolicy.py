"""The target's own answers to prompts: many at once where that changes nothing, else one by one.

A drafter is trained on, and only ever continues, what its target writes, so rows for it are best written by the target.
Plain decoding of one sequence leaves most of a machine idle. On a transformers target several prompts are padded on the
left and decoded together:

    ids   [ .  .  p0 p1 p2 ]    mask [ 0 0 1 1 1 ]    positions [ 0 0 0 1 2 ]      answers that have ended are taken
          [ q0 q1 q2 q3 q4 ]         [ 1 1 1 1 1 ]              [ 0 1 2 3 4 ]      out of the batch and its cache

Whether an architecture ignores padding (recurrent layers, position schemes of its own) is not looked up but tried:
`padding_is_neutral` compares a padded with an unpadded forward once. Where it is not, only prompts of equal length
share a batch. Other targets answer through the reference engine without a drafter. These ways draw with the runtime's
sampler, so that the same seed gives the same answer (numerical near-ties aside). A target on ExLlamaV3 answers through
its generator, which batches continuously and draws its own random numbers.

Left out: continuous batching elsewhere. Prompts are sorted by length, so that little is padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

from exl3_dflash.calibration.answers import AnswerRequest, AnswerStore
from exl3_dflash.progress import Reporter
from exl3_dflash.runtime.engine import StopSettings
from exl3_dflash.runtime.exllama import ExllamaEngine, GenerationRequest
from exl3_dflash.runtime.reference import ReferenceEngine
from exl3_dflash.runtime.sampling import Sampler
from exl3_dflash.target.anatomy import cache_argument, find_decoder, text_config
from exl3_dflash.target.base import Target
from exl3_dflash.target.exllama import ExllamaTarget
from exl3_dflash.target.transformers_target import TransformersTarget

MAX_BATCH = 16
_PROBE_PADDING = 3
_PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # relative; half precision below
_PROBE_TOLERANCE_HALF = 0.05


def generate_answers(
    target: Target,
    requests: Sequence[AnswerRequest],
    *,
    batch_tokens: int,
    reporter: Reporter,
    label: str,
    store: AnswerStore | None = None,
) -> list[list[int]]:
    """Let the target answer every prompt.

    Args:
        target: who answers.
        requests: the prompts; each has at least one token.
        batch_tokens: most tokens, prompts and answers together, whose keys and values are cached at once.
        reporter: shows the progress in tokens, of the most that there can be.
        label: of the progress bar.
        store: where finished batches are kept and taken from (of a target on ExLlamaV3 all answers are one batch).

    Returns:
        Answers in the order of `requests`, each with the stop token that ended it, if one did.

    Raises:
        Exl3DflashError: the target gives logits that are not finite.
    """
    answers: list[list[int]] = [[] for _ in requests]
    with reporter.bar(label, sum(request.max_new_tokens for request in requests), "token") as advance:
        if isinstance(target, TransformersTarget):
            decoder = _BatchedDecoder(target)
            batches, answer = _batches(requests, batch_tokens, decoder.padding_is_neutral()), decoder.answer
        elif isinstance(target, ExllamaTarget):
            batches, answer = iter([list(range(len(requests)))]), partial(_answer_with_exllama, target)
        else:
            batches, answer = ([index] for index in range(len(requests))), partial(_answer_alone, target)
        for batch in batches:
            written = _kept_or_made([requests[index] for index in batch], answer, store, advance)
            for index, tokens in zip(batch, written, strict=True):
                answers[index] = tokens
    return answers


def _kept_or_made(
    batch: Sequence[AnswerRequest],
    answer: Callable[[Sequence[AnswerRequest], Callable[[float], None]], list[list[int]]],
    store: AnswerStore | None,
    advance: Callable[[float], None],
) -> list[list[int]]:
    """The answers to a batch, from the store where it has them."""
    kept = store.load(batch) if store is not None else None
    if kept is not None:
        advance(sum(request.max_new_tokens for request in batch))
        return kept
    written = answer(batch, advance)
    if store is not None:
        store.save(batch, written)
    return written


def _answer_alone(
    target: Target, requests: Sequence[AnswerRequest], advance: Callable[[float], None]
) -> list[list[int]]:
    """Plain decoding by the reference engine, one after the other."""
    answers = []
    for request in requests:
        stops = StopSettings(request.max_new_tokens, frozenset(target.facts.eos_token_ids))
        steps = ReferenceEngine(target).generate(request.prompt, request.sampling, stops)
        answers.append([token for step in steps for token in step.token_ids])
        advance(request.max_new_tokens)
    return answers


def _answer_with_exllama(
    target: ExllamaTarget, requests: Sequence[AnswerRequest], advance: Callable[[float], None]
) -> list[list[int]]:
    """Plain decoding of all requests by ExLlamaV3's generator, as many at once as its cache holds."""
    eos = frozenset(target.facts.eos_token_ids)
    wanted = [GenerationRequest(r.prompt, r.sampling, StopSettings(r.max_new_tokens, eos)) for r in requests]
    engine = ExllamaEngine(target)
    answers: list[list[int]] = [[] for _ in requests]
    for index, step in engine.generate_many(wanted):
        answers[index] += step.token_ids
        ended = bool(engine.many_stats[index].stop_reason)
        advance(len(step.token_ids) + (requests[index].max_new_tokens - len(answers[index]) if ended else 0))
    return answers


def _batches(requests: Sequence[AnswerRequest], batch_tokens: int, padded: bool) -> Iterator[list[int]]:
    """Indices of requests that are answered together: neighbours in length, within the bounds."""
    batch: list[int] = []
    most = 0  # new tokens of the batch
    for index in sorted(range(len(requests)), key=lambda i: len(requests[i].prompt)):
        length = len(requests[index].prompt)
        wanted = max(most, requests[index].max_new_tokens)
        too_large = (len(batch) + 1) * (length + wanted) > batch_tokens or len(batch) == MAX_BATCH
        if batch and (too_large or (not padded and len(requests[batch[0]].prompt) != length)):
            yield batch
            batch, wanted = [], requests[index].max_new_tokens
        batch.append(index)
        most = wanted
    if batch:
        yield batch


class _BatchedDecoder:
    """Decodes several sequences of a transformers model together."""

    def __init__(self, target: TransformersTarget) -> None:
        self._target = target
        self._decoder = find_decoder(target.model)
        self._config = text_config(target.model)
        self._cache_argument = cache_argument(self._decoder)
        self._takes_positions = "position_ids" in inspect.signature(self._decoder.forward).parameters

    @torch.inference_mode()
    def padding_is_neutral(self) -> bool:
        """Whether left padding leaves the last hidden state of a prompt, and of one more token, as it is."""
        if not self._takes_positions:
            return False
        ids = [1 + 7 * k % max(2, self._target.facts.vocab_size - 1) for k in range(6)]
        tolerance = _PROBE_TOLERANCE.get(self._target.dtype, _PROBE_TOLERANCE_HALF)
        states = []
        for padding in (0, _PROBE_PADDING):
            batch = _Batch.of_prompts([ids], padding, self._target.device)
            cache = self._new_cache()
            first = self._forward(batch, cache)
            batch.append(torch.tensor([ids[0]]))
            states.append(torch.cat([first, self._forward(batch, cache)]).float())
        difference = (states[1] - states[0]).norm() / states[0].norm().clamp_min(1e-30)
        return bool(difference < tolerance)  # a NaN is not

    @torch.inference_mode()
    def answer(self, requests: Sequence[AnswerRequest], advance: Callable[[float], None]) -> list[list[int]]:
        """Answers to `requests`; `advance` is given the tokens, with those that an early end leaves unwritten."""
        stops = frozenset(self._target.facts.eos_token_ids)
        samplers = [Sampler(request.sampling, request.prompt) for request in requests]
        answers: list[list[int]] = [[] for _ in requests]
        live = list(range(len(requests)))
        batch = _Batch.of_prompts([request.prompt for request in requests], 0, self._target.device)
        cache = self._new_cache()
        while True:
            logits = self._target.head(self._forward(batch, cache))  # (live, V)
            for row, index in enumerate(live):
                answers[index].append(samplers[index].sample(logits[row]))
            ended = [answers[i][-1] in stops or len(answers[i]) >= requests[i].max_new_tokens for i in live]
            kept = [row for row in range(len(live)) if not ended[row]]
            unwritten = sum(
                requests[i].max_new_tokens - len(answers[i]) for i, over in zip(live, ended, strict=True) if over
            )
            advance(len(live) + unwritten)
            if not kept:
                return answers
            if len(kept) < len(live):
                live = [live[row] for row in kept]
                batch.select(kept)
                cache.reorder_cache(torch.tensor(kept, device=self._target.device))
            batch.append(torch.tensor([answers[index][-1] for index in live]))

    def _new_cache(self) -> Any:
        return DynamicCache(config=self._config)

    def _forward(self, batch: _Batch, cache: Any) -> torch.Tensor:
        """Run the batch's new tokens: hidden state (rows, Ht) of the last one, after the final norm."""
        options: dict[str, Any] = {self._cache_argument: cache, "use_cache": True}
        if not bool(batch.mask.all()):
            options["attention_mask"] = batch.mask
        if self._takes_positions:
            options["position_ids"] = batch.positions
        hidden: torch.Tensor = self._decoder(input_ids=batch.ids, **options).last_hidden_state
        return hidden[:, -1]


@dataclass
class _Batch:
    """The next tokens of several sequences.

    Attributes:
        ids, positions: (rows, new tokens).
        mask: (rows, all tokens so far), 0 where padded.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of_prompts(cls, prompts: Sequence[Sequence[int]], padding: int, device: torch.device) -> _Batch:
        """Prompts padded on the left to the longest one plus `padding`."""
        width = max(len(prompt) for prompt in prompts) + padding
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros(len(prompts), width, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        return cls(ids.to(device), positions.to(device), mask.to(device))

    def append(self, tokens: torch.Tensor) -> None:
        """Make tokens (rows,) the next ones."""
        self.ids = tokens[:, None].to(self.mask.device)
        self.positions = self.positions[:, -1:] + 1
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], dim=1)

    def select(self, rows: list[int]) -> None:
        """Keep these rows."""
        self.ids, self.positions, self.mask = self.ids[rows], self.positions[rows], self.mask[rows]

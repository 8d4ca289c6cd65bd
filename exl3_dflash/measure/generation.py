"""Real runs compared: the same prompts through several engines, alternating, in one process.

The first engine is the baseline (plain decoding, no drafter is run). Engines take turns prompt by prompt, each starts
every prompt from an empty cache, and one untimed warm-up prompt precedes the rest, so that a busy machine hits all of
them alike. Figures:

- accept length: mean over requests of emitted tokens after the prefill token / verify steps; `token_weighted` beside it
  is the ratio of the sums.
- accept rate: accepted / proposed draft tokens, over all requests.
- tokens per second: decoded tokens / decoding seconds, over all requests; speedup is its ratio to the baseline's.
- break-even accept length: seconds of a verify step, drafting included / seconds of a plain token. A drafter speeds
  decoding up only where its token-weighted accept length is above that; the speedup is the ratio of the two.
- identical: requests whose token ids equal the baseline's.
- looping: requests whose output repeats itself (such text inflates acceptance).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from exl3_dflash.runtime.engine import Engine, GenerationStats, SamplingSettings, StopSettings

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class EngineRun:
    """One engine over all prompts (definitions in the module's docstring)."""

    name: str
    requests: int
    tokens: int
    accept_length: float | None
    accept_length_token_weighted: float | None
    accept_rate: float | None
    tokens_per_second: float
    speedup: float
    identical: int
    looping: int
    break_even_accept_length: float | None = None


@dataclass
class _Collected:
    outputs: list[list[int]]
    stats: list[GenerationStats]


def run_request(
    engine: Engine, ids: Sequence[int], sampling: SamplingSettings, stops: StopSettings
) -> tuple[list[int], GenerationStats]:
    """One answer from an empty cache: its token ids and a copy of its counters."""
    engine.reset()
    output = [token for step in engine.generate(ids, sampling, stops) for token in step.token_ids]
    return output, replace(engine.stats)


def compare_engines(
    engines: Mapping[str, Engine],
    prompts: Sequence[Sequence[int]],
    sampling: SamplingSettings,
    stops: StopSettings,
    progress: Callable[[], None] = lambda: None,
) -> list[EngineRun]:
    """Run every prompt through every engine, alternating.

    Args:
        engines: by name, the baseline first.
        prompts: token ids of each prompt.
        sampling, stops: as for `Engine.generate`; the same for all.
        progress: called after each request.

    Returns:
        One run per engine, in order.
    """
    collected = {name: _Collected([], []) for name in engines}
    warm_up = replace(stops, max_new_tokens=min(WARM_UP_TOKENS, stops.max_new_tokens))
    for engine in engines.values():
        run_request(engine, prompts[0], sampling, warm_up)
    order = list(engines)
    for number, ids in enumerate(prompts):
        turn = number % len(order)
        for name in order[turn:] + order[:turn]:
            output, stats = run_request(engines[name], ids, sampling, stops)
            collected[name].outputs.append(output)
            collected[name].stats.append(stats)
            progress()
    baseline = collected[order[0]]
    return [_summarize(name, collected[name], baseline) for name in order]


def _summarize(name: str, run: _Collected, baseline: _Collected) -> EngineRun:
    lengths = [stats.accept_length for stats in run.stats if stats.accept_length is not None]
    steps = sum(stats.verify_steps for stats in run.stats)
    proposed = sum(stats.proposed for stats in run.stats)
    decoded = sum(stats.decoded_tokens for stats in run.stats)
    decode_seconds = sum(stats.decode_seconds for stats in run.stats)
    return EngineRun(
        name=name,
        requests=len(run.stats),
        tokens=sum(stats.new_tokens for stats in run.stats),
        accept_length=sum(lengths) / len(lengths) if lengths else None,
        accept_length_token_weighted=decoded / steps if steps else None,
        accept_rate=sum(stats.accepted for stats in run.stats) / proposed if proposed else None,
        tokens_per_second=_speed(run),
        speedup=_speed(run) / _speed(baseline),
        identical=sum(ours == theirs for ours, theirs in zip(run.outputs, baseline.outputs, strict=True)),
        looping=sum(stats.looping for stats in run.stats),
        break_even_accept_length=decode_seconds / steps * _speed(baseline) if steps else None,
    )


def _speed(run: _Collected) -> float:
    return sum(stats.decoded_tokens for stats in run.stats) / sum(stats.decode_seconds for stats in run.stats)

"""The costly half of the doctor: what a few forwards show on rows that the target wrote.

- `features`: are the target's features finite and unclipped? FP16 ends at 65,504, and real features get near it.
- `acceptance`: low at the first position means taps, embedding, mask or the wrong target.
- one check per area of `alternatives`: does another setting accept clearly more on the same anchors?
- `decay`: healthy first and falling fast is the workload, not a fault of the pair.
- `long context`: fine short and bad long is a window or RoPE.
- `thinking`: acceptance with the template's thinking switch on against off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from exl3_dflash.doctor.alternatives import AREAS, Alternative
from exl3_dflash.doctor.checks import FAIL, PASS, SKIP, WARN, Check
from exl3_dflash.measure.candidates import Candidate, CandidateFigures, CandidateProbe, Gain
from exl3_dflash.measure.statistics import ratio_interval, resample_weights
from exl3_dflash.measure.tallies import RowTally, add_tallies, anchors_and_emitted

FP16_LIMIT = 65504.0
CLIPPED_RANGE = (60000.0, 66000.0)  # ceilings that FP16 code clamps to, also after a cast to BF16
LOW_FIRST_ACCEPTANCE = 0.25
TELLING_FIRST_ACCEPTANCE = 0.2  # a better setting must itself accept this much, else it explains nothing
FAST_DECAY = 0.6  # acceptance of later positions over the first one's
LONG_CONTEXT_LOSS = 0.4  # accept length on the longer half of contexts over the shorter half's
THINKING_RATIO = 1.5
NEARLY_AS_GOOD = 0.02  # of the largest gain: settings that close are one and the same to the drafter
ALTERNATIVE_LEVEL = 0.99  # of the intervals by which alternatives are judged: there are many of them


@dataclass(frozen=True)
class Tried:
    """One alternative with its figures and its gain over the configured setting; `clear` if it is no coincidence."""

    alternative: Alternative
    figures: CandidateFigures
    gain: Gain
    clear: bool


def check_features(probe: CandidateProbe) -> Check:
    """Range and completeness of the tapped features."""
    taps = [row.taps.float().abs() for row in probe.rows]
    largest = max(float(values.max()) for values in taps)
    at_ceiling = sum(int((values == largest).sum()) for values in taps)
    if probe.dropped_rows:
        return Check(
            "features",
            FAIL,
            f"{probe.dropped_rows} of {probe.dropped_rows + len(probe.rows)} rows have features that are not finite",
            "run the target in BF16 or FP32 (--dtype)",
        )
    if at_ceiling > 1 and CLIPPED_RANGE[0] <= largest <= CLIPPED_RANGE[1]:
        return Check(
            "features",
            FAIL,
            f"{at_ceiling} features are clipped at {largest:,.0f}, the end of FP16's range",
            "run the target in BF16 or FP32, and do not pass its features through FP16",
        )
    if largest > FP16_LIMIT:
        seen = f"features reach {largest:,.0f}, beyond FP16's {FP16_LIMIT:,.0f}"
        return Check("features", WARN, seen, "fine here; an engine that keeps them in FP16 loses them")
    return Check("features", PASS, f"finite, largest {largest:,.0f}")


def check_acceptance(figures: CandidateFigures) -> Check:
    """Acceptance of the first draft token, and the accept length."""
    first = figures.position_acceptance[0]
    low, high = figures.ci95
    seen = (
        f"accept length {figures.accept_length:.2f} (95 % interval {low:.2f} to {high:.2f}), first draft token "
        f"accepted {100 * first:.0f} %"
    )
    if first < LOW_FIRST_ACCEPTANCE:
        return Check(
            "acceptance",
            FAIL,
            seen,
            "pair it with the target that it was trained for (not a fine-tuned one), or download the drafter again",
            "target",
        )
    return Check("acceptance", PASS, seen)


def try_alternatives(probe: CandidateProbe, base: Candidate, tried: Sequence[Alternative]) -> list[Tried]:
    """Figures of every alternative.

    One is `clear` if it makes the target's tokens likelier beyond chance and accepts enough more to be the explanation.
    """
    base_length = probe.figures(base).accept_length
    results = []
    for item in tried:
        figures = probe.figures(item.candidate)
        gain = probe.gain(item.candidate, base, ALTERNATIVE_LEVEL)
        clear = (
            gain.nats_interval[0] > 0
            and gain.value >= item.least_gain * base_length
            and figures.position_acceptance[0] >= TELLING_FIRST_ACCEPTANCE
        )
        results.append(Tried(item, figures, gain, clear))
    return results


def check_alternatives(results: Sequence[Tried], base: CandidateFigures) -> list[Check]:
    """One check per area: the area of the best clear alternative fails, that of a lesser one is only noted."""
    clear = [tried for tried in results if tried.clear]
    best = _best(clear) if clear else None
    checks = []
    for area in AREAS:
        own = [tried for tried in results if tried.alternative.area == area]
        if own:
            checks.append(_area_check(area, own, best, base))
    return checks


def _best(tried: Sequence[Tried]) -> Tried:
    """The largest gain; of those that come near it the first, since the likelier settings are tried first."""
    largest = max(item.gain.value for item in tried)
    return next(item for item in tried if item.gain.value >= largest - NEARLY_AS_GOOD * abs(largest))


def _area_check(area: str, own: Sequence[Tried], best: Tried | None, base: CandidateFigures) -> Check:
    name = f"{area}, tried"
    top = _best([tried for tried in own if tried.clear] or own)
    low, high = top.gain.nats_interval
    seen = (
        f"{top.alternative.candidate.name} accepts {top.figures.accept_length:.2f}, as configured "
        f"{base.accept_length:.2f}; a block is {top.gain.nats:+.2f} nats likelier (99 % interval {low:+.2f} to "
        f"{high:+.2f})"
    )
    if best is not None and top is best:
        return Check(name, FAIL, seen, top.alternative.advice, area)
    if top.clear:
        return Check(name, PASS, f"{seen}; another setting explains more")
    return Check(name, PASS, f"best of {len(own)} others: {seen}")


def check_decay(tallies: Sequence[RowTally]) -> Check:
    """Later draft tokens against the first."""
    total = add_tallies(tallies)
    first = total.accepted[0] / max(total.reached[0], 1.0)
    reached = total.reached[1:].sum()
    if not reached or first < LOW_FIRST_ACCEPTANCE:
        return Check("decay", SKIP, "too few drafts get past the first token")
    later = total.accepted[1:].sum() / reached
    seen = f"{100 * first:.0f} % of first and {100 * later:.0f} % of later draft tokens are accepted"
    if later < FAST_DECAY * first:
        advice = "the text is hard to draft (or of a kind the drafter was not trained on): draft fewer tokens"
        return Check("decay", WARN, seen, advice, "workload")
    return Check("decay", PASS, seen)


@torch.inference_mode()
def check_long_context(probe: CandidateProbe, base: Candidate) -> Check:
    """The longer half of the contexts against the shorter half."""
    middle = int(torch.cat([row.anchors for row in probe.rows]).median())
    halves = []
    for keep_short in (True, False):
        rows = [replace(row, anchors=row.anchors[(row.anchors <= middle) == keep_short]) for row in probe.rows]
        halves.append(probe.tally([row for row in rows if len(row.anchors)], base))
    short, long = (add_tallies(half) for half in halves)
    if not (short.anchors and long.anchors):
        return Check("long context", SKIP, "all contexts are of one length")
    lengths = short.emitted / short.anchors, long.emitted / long.anchors
    seen = f"{lengths[0]:.2f} up to {middle} tokens of context, {lengths[1]:.2f} beyond"
    anchors, emitted = anchors_and_emitted(halves[1])
    _, high = ratio_interval(emitted, anchors, resample_weights(len(anchors)))
    if high < LONG_CONTEXT_LOSS * lengths[0]:
        advice = "compare rope_theta, rope scaling, layer_types and sliding_window with the drafter's card"
        return Check("long context", WARN, f"accept length {seen}", advice, "window or rope")
    return Check("long context", PASS, f"accept length {seen}")


def check_thinking(tallies: Sequence[RowTally], thinking: Sequence[bool]) -> Check:
    """Acceptance with the thinking switch on against off; `thinking` says it for every row."""
    lengths = {}
    for switch in (True, False):
        chosen = [tally for tally, on in zip(tallies, thinking, strict=True) if on == switch]
        if not chosen:
            return Check("thinking", SKIP, "no row of one of the two was long enough")
        total = add_tallies(chosen)
        lengths[switch] = total.emitted / total.anchors
    on, off = lengths[True], lengths[False]
    seen = f"accept length {on:.2f} with thinking on, {off:.2f} with it off"
    if max(on, off) > THINKING_RATIO * min(on, off):
        better = "--think" if on > off else "--no-think"
        return Check("thinking", WARN, seen, f"the drafter was trained for {better}: it is much faster that way")
    return Check("thinking", PASS, seen)

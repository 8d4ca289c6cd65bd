"""Prompts, with or without an answer, to rows: dealt by prompt, answered by the target where nobody has.

All answers to one prompt stay on one side, so no held-out prompt is among the calibration prompts. The held-out side is
dealt first: its rows do not depend on how many calibration rows are wanted. Where there are too few prompts for
both, the held-out side gets its share.

An open prompt is answered greedily. Where more calibration rows are wanted than there are prompts, further answers to
the open calibration prompts are sampled with a temperature, never a row twice; held-out rows are always greedy.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from exl3_dflash.calibration.onpolicy import AnswerRequest, generate_answers
from exl3_dflash.calibration.rowset import MIN_ROW_TOKENS, RowPools, RowRequest, TokenRow
from exl3_dflash.runtime.engine import SamplingSettings
from exl3_dflash.runtime.stats import longest_repeated_run
from exl3_dflash.target.base import Target

FURTHER_TEMPERATURE = 0.8
FURTHER_TOP_P = 0.95
_LEAST_ANSWER = 2  # an anchor and one label
_LOOPING_SHARE = 0.5


@dataclass(frozen=True)
class Candidate:
    """A row to be: prompt ids, and the ids of the answer, None where the target still has to write it.

    A row of plain tokens has an empty prompt.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...] | None
    kind: str

    @property
    def ids(self) -> tuple[int, ...]:
        """The whole row."""
        return self.prompt + (self.answer or ())

    @property
    def key(self) -> tuple[int, ...]:
        """What must not be on both sides."""
        return self.prompt or self.ids

    def row(self) -> TokenRow:
        """As a token row."""
        return TokenRow(torch.tensor(self.ids, dtype=torch.int64), len(self.prompt), self.kind)


def rows_of_candidates(target: Target, candidates: Sequence[Candidate], request: RowRequest) -> RowPools:
    """Rows of both sides from candidates, which are preferred in the given order; see the module docstring."""
    unique = list(dict.fromkeys(candidates))
    held, calibration = deal(unique, request.held_out, request.rows)
    pools = RowPools()
    if len(unique) < len(candidates):
        pools.notes.append(f"{len(candidates) - len(unique)} repeated rows were left out")
    chosen = [*held, *calibration]
    answered = _answer(target, chosen, request, None, "answer prompts")
    pools.held_out = _rows(answered[: len(held)], pools, "held-out")
    pools.rows = _rows(answered[len(held) :], pools, "calibration")
    missing = request.rows - len(pools.rows)
    open_prompts = [candidate for candidate in calibration if candidate.answer is None]
    if missing > 0 and open_prompts:
        _add_further_answers(target, open_prompts, missing, request, pools)
    return pools


def deal(candidates: Sequence[Candidate], held_out: int, rows: int) -> tuple[list[Candidate], list[Candidate]]:
    """Deal whole prompts, first to the held-out side; at most `held_out` and `rows` candidates."""
    groups: dict[tuple[int, ...], list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.key, []).append(candidate)
    wanted = held_out
    if len(candidates) < held_out + rows:
        wanted = max(len(candidates) * held_out // (held_out + rows), min(1, held_out))
    sides: tuple[list[Candidate], list[Candidate]] = ([], [])
    left = list(groups.values())
    while left and len(sides[0]) < wanted and (len(left) > 1 or not rows):  # the last prompt is for calibration
        sides[0].extend(left.pop(0))
    for group in left:
        sides[1].extend(group)
    return sides[0][:held_out], sides[1][:rows]


def _answer(
    target: Target, candidates: Sequence[Candidate], request: RowRequest, attempt: int | None, label: str
) -> list[Candidate]:
    """The candidates with answers: their own or the target's; attempt None is greedy, a number seeds a sampled one."""
    open_prompts = [candidate for candidate in candidates if candidate.answer is None]
    if not open_prompts:
        return list(candidates)
    requests = [
        AnswerRequest(
            candidate.prompt,
            min(request.answer_tokens, request.cols - len(candidate.prompt)),
            _sampling(candidate, request.seed, attempt),
        )
        for candidate in open_prompts
    ]
    answers = iter(
        generate_answers(
            target,
            requests,
            batch_tokens=request.batch_tokens,
            reporter=request.reporter,
            label=label,
            store=request.answers,
        )
    )
    return [
        Candidate(candidate.prompt, tuple(next(answers)), candidate.kind) if candidate.answer is None else candidate
        for candidate in candidates
    ]


def _sampling(candidate: Candidate, seed: int, attempt: int | None) -> SamplingSettings:
    if attempt is None:
        return SamplingSettings()
    own_seed = zlib.crc32(repr((seed, attempt, candidate.prompt)).encode())
    return SamplingSettings(temperature=FURTHER_TEMPERATURE, top_p=FURTHER_TOP_P, seed=own_seed)


def _add_further_answers(
    target: Target, open_prompts: Sequence[Candidate], missing: int, request: RowRequest, pools: RowPools
) -> None:
    """Add up to `missing` rows with sampled answers that no row has yet; stops when a round brings nothing new."""
    seen = {tuple(row.ids.tolist()) for row in pools.rows}
    added: list[Candidate] = []
    attempt = 0
    while len(added) < missing:
        batch = open_prompts[: missing - len(added)]
        sampled = _answer(target, batch, request, attempt, f"further answers, round {attempt + 1}")
        new = [
            candidate for candidate in dict.fromkeys(sampled) if candidate.ids not in seen and _long_enough(candidate)
        ]
        if not new:
            break
        seen.update(candidate.ids for candidate in new)
        added += new
        attempt += 1
    pools.rows += [candidate.row() for candidate in added]
    if added:
        pools.notes.append(
            f"{len(added)} of {len(pools.rows)} calibration rows are further answers sampled at temperature "
            f"{FURTHER_TEMPERATURE:g}, as there are only {len(open_prompts)} prompts for them"
        )


def _long_enough(candidate: Candidate) -> bool:
    least = _LEAST_ANSWER if candidate.prompt else MIN_ROW_TOKENS
    return len(candidate.answer or ()) >= least and len(candidate.ids) >= MIN_ROW_TOKENS


def _rows(candidates: Sequence[Candidate], pools: RowPools, side: str) -> list[TokenRow]:
    """Rows of the candidates that are long enough; the others, and answers that loop, are noted."""
    usable = [candidate for candidate in candidates if _long_enough(candidate)]
    if len(usable) < len(candidates):
        pools.notes.append(f"{len(candidates) - len(usable)} {side} rows were too short and were left out")
    looping = sum(
        longest_repeated_run(candidate.answer or ()) > _LOOPING_SHARE * len(candidate.answer or ())
        for candidate in usable
        if candidate.prompt
    )
    if looping:
        pools.notes.append(
            f"{looping} of {len(usable)} {side} answers repeat themselves for more than half their length"
        )
    return [candidate.row() for candidate in usable]

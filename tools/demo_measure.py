"""Figures of a trained demo pair, taken with the product's own code from the written files.

- Real runs: greedy answers to held-out prompts, drafted and plain in turns (METRICS definitions of the product).
- Teacher-forced: the drafted answers (identical to plain ones in FP32) as token rows, every anchor of every row.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exl3_dflash.calibration.rows import TokenRow
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.measure.fidelity import measure_fidelity
from exl3_dflash.measure.generation import compare_engines, run_request
from exl3_dflash.runtime.engine import SamplingSettings, StopSettings
from exl3_dflash.runtime.reference import ReferenceEngine
from exl3_dflash.target.load import load_target

MAX_NEW_TOKENS = 384
TIMED_EVERY = 4


@dataclass(frozen=True)
class PairFigures:
    """What the demo's README states."""

    prompts: int
    anchors: int
    teacher_forced: float
    position_acceptance: list[float]
    accept_length: float
    accept_length_by_kind: dict[str, float]
    timed_prompts: int
    plain_tokens_per_second: float
    drafted_tokens_per_second: float
    speedup: float
    identical: int
    answer_bytes: float
    unfinished: int


def measure_pair(directory: Path) -> PairFigures:
    """Measure the pair in `directory` on its held-out prompts, in FP32 on the CPU."""
    target = load_target(directory / "target", device="cpu", dtype=torch.float32)
    drafter = DrafterModel.from_checkpoint(DrafterCheckpoint.open(directory / "drafter"))
    lines = (directory / "heldout_prompts.jsonl").read_text("utf-8").splitlines()
    prompts = [json.loads(line) for line in lines]
    ids = [target.tokenizer.apply_chat_template(prompt["messages"]) for prompt in prompts]
    stops = StopSettings(max_new_tokens=MAX_NEW_TOKENS, token_ids=frozenset(target.tokenizer.eos_token_ids))
    drafted = ReferenceEngine(target, drafter)
    rows, lengths, unfinished = _answer_all(drafted, prompts, ids, stops)
    fidelity = measure_fidelity(target, {"unquantized": drafter}, rows)
    plain_run, drafted_run = compare_engines(
        {"plain": ReferenceEngine(target), "drafted": drafted}, ids[::TIMED_EVERY], SamplingSettings(), stops
    )
    return PairFigures(
        prompts=len(prompts),
        anchors=fidelity.anchors,
        teacher_forced=fidelity.drafters[0].accept_length,
        position_acceptance=fidelity.drafters[0].position_acceptance,
        accept_length=_mean([value for values in lengths.values() for value in values]),
        accept_length_by_kind={kind: _mean(values) for kind, values in lengths.items()},
        timed_prompts=plain_run.requests,
        plain_tokens_per_second=plain_run.tokens_per_second,
        drafted_tokens_per_second=drafted_run.tokens_per_second,
        speedup=drafted_run.speedup,
        identical=drafted_run.identical,
        answer_bytes=_mean([len(row.ids) - row.prompt_length for row in rows]),
        unfinished=unfinished,
    )


def _answer_all(
    engine: ReferenceEngine, prompts: list[dict[str, Any]], ids: list[list[int]], stops: StopSettings
) -> tuple[list[TokenRow], dict[str, list[float]], int]:
    """Rows with the drafted answers, accept lengths by kind, and how many answers did not end by themselves."""
    rows: list[TokenRow] = []
    lengths: dict[str, list[float]] = {}
    unfinished = 0
    for prompt, prompt_ids in zip(prompts, ids, strict=True):
        output, stats = run_request(engine, prompt_ids, SamplingSettings(), stops)
        rows.append(TokenRow(torch.tensor(prompt_ids + output), len(prompt_ids), prompt["kind"]))
        unfinished += stats.stop_reason != "token"
        if stats.accept_length is not None:
            lengths.setdefault(prompt["kind"], []).append(stats.accept_length)
    return rows, lengths, unfinished


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)

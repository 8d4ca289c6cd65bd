"""The target's answers in the work directory, a file per batch: on a CPU they are the longest step of many jobs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from exl3_dflash.calibration.answers import AnswerRequest
from exl3_dflash.conversion.work_directory import WorkDirectory


class KeptAnswers:
    """Batches of answers by their requests; an `AnswerStore`."""

    def __init__(self, work: WorkDirectory) -> None:
        self._work = work

    def load(self, batch: Sequence[AnswerRequest]) -> list[list[int]] | None:
        """The answers to a batch, None where they are not there."""
        stored = self._work.load(_step(batch))
        if stored is None:
            return None
        return [part.tolist() for part in stored.tensors["ids"].split(stored.facts["lengths"])]

    def save(self, batch: Sequence[AnswerRequest], answers: list[list[int]]) -> None:
        """Keep the answers to a batch."""
        ids = torch.tensor([token for answer in answers for token in answer], dtype=torch.int64)
        self._work.save(_step(batch), {"ids": ids}, {"lengths": [len(answer) for answer in answers]})


def _step(batch: Sequence[AnswerRequest]) -> str:
    """A name for everything that the answers depend on, besides the target."""
    return f"answers-{hashlib.sha256(repr(list(batch)).encode()).hexdigest()[:16]}"

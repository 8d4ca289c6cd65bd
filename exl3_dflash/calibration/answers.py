"""What the target is asked to write (`calibration.onpolicy` lets it), and where its answers are kept meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from exl3_dflash.runtime.engine import SamplingSettings


@dataclass(frozen=True)
class AnswerRequest:
    """One prompt: its ids, the most tokens to answer with, and how they are drawn."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingSettings = field(default_factory=SamplingSettings)


class AnswerStore(Protocol):
    """Where answers are kept batch by batch, so that hours of writing can be interrupted. A batch is found again by all
    of its requests: what is decoded together is the same every time, and so are the answers."""

    def load(self, batch: Sequence[AnswerRequest]) -> list[list[int]] | None:
        """The answers to a batch, None where they are not there."""
        ...

    def save(self, batch: Sequence[AnswerRequest], answers: list[list[int]]) -> None:
        """Keep the answers to a batch."""
        ...

"""Chat sessions over table targets, with an interface that follows a script."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from exl3_dflash.chat.conversation import Conversation
from exl3_dflash.chat.session import ChatSession
from exl3_dflash.runtime.engine import SamplingSettings, StopSettings
from exl3_dflash.runtime.reference import ReferenceEngine
from tests.runtime.fakes import NoisyDrafter, TableTarget


class ScriptedUI:
    """Reads from a list of messages; records answers, notes and errors; stops the answer after `patience` pieces."""

    def __init__(self, messages: Sequence[str], patience: int | None = None) -> None:
        self._messages = list(messages)
        self._patience = patience
        self.answers: list[str] = []
        self.notes: list[str] = []
        self.errors: list[str] = []

    def read(self) -> str | None:
        return self._messages.pop(0) if self._messages else None

    @contextmanager
    def answering(self) -> Iterator[Callable[[], bool]]:
        self.answers.append("")
        pieces = 0

        def interrupted() -> bool:
            nonlocal pieces
            pieces += 1
            return self._patience is not None and pieces >= self._patience

        yield interrupted

    def write(self, text: str) -> None:
        self.answers[-1] += text

    def note(self, text: str) -> None:
        self.notes.append(text)

    def error(self, text: str) -> None:
        self.errors.append(text)


def make_session(
    *, drafted: bool = True, context: int | None = None, count: int = 12, seed: int | None = None
) -> ChatSession:
    target = TableTarget(26, context=context, sharpness=2.0)
    engine = ReferenceEngine(target, NoisyDrafter(target) if drafted else None)
    sampling = SamplingSettings(temperature=0.0 if seed is None else 1.0, seed=seed)
    return ChatSession(engine, Conversation(), sampling, StopSettings(count))


@pytest.fixture
def session() -> ChatSession:
    return make_session()

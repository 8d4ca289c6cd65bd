"""The chat loop over any user interface: read, run a command or answer, say how it went, until the user leaves."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

from exl3_dflash.chat.commands import Leave, Retry, run_command
from exl3_dflash.chat.report import stats_line
from exl3_dflash.chat.session import ChatSession
from exl3_dflash.chat.ui import ChatUI
from exl3_dflash.errors import Exl3DflashError


def run_chat(session: ChatSession, ui: ChatUI) -> None:
    """Talk until the input ends or the user leaves; the user's mistakes are shown and the talk goes on."""
    while (text := ui.read()) is not None:
        try:
            if not text.strip():
                continue
            if not text.startswith("/"):
                respond(session, ui, session.ask(text.strip()))
                continue
            outcome = run_command(text, session)
            if isinstance(outcome, Leave):
                return
            if isinstance(outcome, Retry):
                respond(session, ui, session.retry())
            else:
                ui.note(outcome)
        except Exl3DflashError as error:
            ui.error(str(error))


def respond(session: ChatSession, ui: ChatUI, answer: Generator[str]) -> None:
    """Stream `answer` of `session` until it ends or the user stops it, and show its statistics.

    Raises:
        Exl3DflashError: there is no answer; the conversation is as before.
    """
    answered = len(session.answers)
    with ui.answering() as interrupted, closing(answer) as pieces:
        for piece in pieces:
            ui.write(piece)
            if interrupted():
                break
    if len(session.answers) > answered:
        ui.note(stats_line(session.answers[-1].stats))

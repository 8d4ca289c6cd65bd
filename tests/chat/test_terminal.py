"""The terminal interface with typed keys, its history and Ctrl-C."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.document import Document
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from exl3_dflash.chat.loop import run_chat
from exl3_dflash.chat.paths import history_file, state_directory
from exl3_dflash.chat.terminal import CommandCompleter, TerminalUI
from tests.chat.conftest import make_session

ALT_ENTER, CTRL_C, CTRL_D = "\x1b\r", "\x03", "\x04"


@pytest.fixture
def keys() -> Iterator[PipeInput]:
    with create_pipe_input() as pipe:
        yield pipe


def make_ui(keys: PipeInput, history: Path | None = None) -> tuple[TerminalUI, io.StringIO]:
    screen = io.StringIO()
    return TerminalUI(history, Console(file=screen, highlight=False), keys, DummyOutput()), screen


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("hello\r", "hello"),
        (f"one{ALT_ENTER}two\r", "one\ntwo"),
        ("one\\\rtwo\r", "one\ntwo"),
        ("\x1b[200~pasted\nlines\x1b[201~\r", "pasted\nlines"),
        (f"wrong{CTRL_C}right\r", "right"),
        (CTRL_D, None),
    ],
)
def test_keys(keys: PipeInput, typed: str, message: str | None) -> None:
    ui, _ = make_ui(keys)
    keys.send_text(typed)
    assert ui.read() == message


def test_whole_chat(keys: PipeInput) -> None:
    ui, screen = make_ui(keys)
    session = make_session()
    keys.send_text("hello\r/temp\r/nope\r/exit\r")
    run_chat(session, ui)
    lines = screen.getvalue().splitlines()
    assert lines[0] == session.answers[0].text
    assert "accept length" in lines[1]
    assert lines[2] == "temperature: 0"
    assert lines[3].startswith("error: unknown command /nope")


def test_history_is_kept_privately(keys: PipeInput, tmp_path: Path) -> None:
    path = tmp_path / "state" / "history"
    ui, _ = make_ui(keys, path)
    keys.send_text("remember me\r")
    ui.read()
    assert "remember me" in path.read_text()
    if os.name == "posix":
        assert path.stat().st_mode & 0o077 == 0
    again, _ = make_ui(keys, path)
    keys.send_text("\x1b[A\r")  # arrow up
    assert again.read() == "remember me"


def test_history_that_cannot_be_written_is_no_obstacle(keys: PipeInput, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ui, screen = make_ui(keys, tmp_path / "file" / "history")
    assert "no history is kept" in screen.getvalue()
    keys.send_text("hello\r")
    assert ui.read() == "hello"


@pytest.fixture
def python_sigint() -> Iterator[None]:
    """Python's own handler, also where the tests run in the background of a shell, which ignores the signal there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_sigint")
def test_ctrl_c_stops_the_answer_and_a_second_one_the_step(keys: PipeInput) -> None:
    ui, screen = make_ui(keys)
    with ui.answering() as interrupted:
        assert not interrupted()
        ui.write("an answer")
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second Ctrl-C breaks the step off")
    assert screen.getvalue() == "an answer\n"
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_control_characters_do_not_reach_the_terminal(keys: PipeInput) -> None:
    ui, screen = make_ui(keys)
    with ui.answering():
        ui.write("a\x1b[31mb\x07\u009bc\r[bold]\t猫\n")
    assert screen.getvalue() == "a[31mbc[bold]\t猫\n"


def test_completion_of_commands() -> None:
    def complete(text: str) -> list[str]:
        return [completion.text for completion in CommandCompleter().get_completions(Document(text), None)]

    assert complete("/re") == ["/reset", "/retry"]
    assert complete("re") == complete("/temp 0") == []


def test_places_for_state() -> None:
    home = Path.home()
    assert state_directory("linux", {}) == home / ".local/state/exl3-dflash"
    assert state_directory("linux", {"XDG_STATE_HOME": "/s"}) == Path("/s/exl3-dflash")
    assert state_directory("darwin", {}) == home / "Library/Application Support/exl3-dflash"
    assert state_directory("win32", {"LOCALAPPDATA": "L"}) == Path("L/exl3-dflash")
    assert history_file({"EXL3_DFLASH_HISTORY": "~/h"}) == home / "h"

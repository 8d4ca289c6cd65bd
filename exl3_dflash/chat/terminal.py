"""The chat in a terminal: line editing and history by prompt_toolkit, colours by rich.

Enter sends; Alt-Enter, or a backslash at the end of a line, begins a new line; pasted text keeps its lines; Tab
completes commands. Ctrl-C at the prompt clears the line, Ctrl-C during an answer stops the answer after the running
step, and a second one stops it at once. Control characters of the answer are not passed to the terminal.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output
from prompt_toolkit.shortcuts import CompleteStyle
from rich.console import Console

from exl3_dflash.chat.commands import COMMANDS
from exl3_dflash.chat.paths import prepare_private_file
from exl3_dflash.chat.ui import InterruptCheck

PROMPT = "> "
CONTINUATION = "  "
_HIDDEN = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class CommandCompleter(Completer):
    """Completes the name of a slash command at the start of a message."""

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Commands that begin with what was typed."""
        text = document.text_before_cursor
        if not text.startswith("/") or " " in text or "\n" in text:
            return
        for command in COMMANDS.values():
            if command.name.startswith(text[1:]):
                yield Completion(f"/{command.name}", start_position=-len(text), display_meta=command.help)


def key_bindings() -> KeyBindings:
    """Enter sends unless a backslash precedes it; Alt-Enter begins a new line."""
    bindings = KeyBindings()

    @bindings.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return bindings


class TerminalUI:
    """`ChatUI` in a terminal.

    Args:
        history: the history file, or None to keep none.
        console: where to write; stdout by default.
        source, display: prompt_toolkit's input and output, for tests.
    """

    def __init__(
        self,
        history: Path | None,
        console: Console | None = None,
        source: Input | None = None,
        display: Output | None = None,
    ) -> None:
        self._console = console or Console(highlight=False)
        self._line_is_open = False
        self._session: PromptSession[str] = PromptSession(
            history=self._open_history(history),
            multiline=True,
            prompt_continuation=CONTINUATION,
            key_bindings=key_bindings(),
            completer=CommandCompleter(),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            reserve_space_for_menu=0,
            input=source,
            output=display,
        )

    def _open_history(self, path: Path | None) -> History:
        if path is not None and prepare_private_file(path):
            return FileHistory(str(path))
        if path is not None:
            self.note(f"no history is kept: {path} cannot be written")
        return InMemoryHistory()

    def read(self) -> str | None:
        """The next message; Ctrl-C clears the line, Ctrl-D ends."""
        while True:
            try:
                return self._session.prompt(PROMPT)
            except KeyboardInterrupt:
                self.note("Ctrl-D or /exit leaves")
            except EOFError:
                return None

    @contextmanager
    def answering(self) -> Iterator[InterruptCheck]:
        """Ctrl-C sets a flag; a second one breaks off the running step."""
        pressed = 0

        def on_interrupt(_number: int, _frame: FrameType | None) -> None:
            nonlocal pressed
            pressed += 1
            if pressed > 1:
                raise KeyboardInterrupt

        previous = signal.signal(signal.SIGINT, on_interrupt)
        try:
            yield lambda: pressed > 0
        except KeyboardInterrupt:
            pass
        finally:
            signal.signal(signal.SIGINT, previous)
            self._end_line()

    def write(self, text: str) -> None:
        """A piece of the answer, as it is."""
        text = text.translate(_HIDDEN)
        if text:
            self._console.file.write(text)
            self._line_is_open = not text.endswith("\n")
            self._console.file.flush()

    def note(self, text: str) -> None:
        """Dim text."""
        self._console.print(text, style="dim", markup=False, emoji=False, soft_wrap=True)

    def error(self, text: str) -> None:
        """Red text."""
        self._console.print(f"error: {text}", style="red", markup=False, emoji=False, soft_wrap=True)

    def _end_line(self) -> None:
        if self._line_is_open:
            self._console.print()
            self._line_is_open = False

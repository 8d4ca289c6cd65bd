"""What a chat needs from its user interface, and the plain one for pipes, files and tests.

The answer's text goes to stdout and everything else to stderr: stdout is data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO

InterruptCheck = Callable[[], bool]


class ChatUI(Protocol):
    """The terminal, a pipe, or a script in a test."""

    def read(self) -> str | None:
        """The user's next message, possibly of several lines; None at the end."""

    def answering(self) -> AbstractContextManager[InterruptCheck]:
        """Surrounds one answer; the function it gives tells whether the user wants the answer to stop."""

    def write(self, text: str) -> None:
        """Show a piece of the answer."""

    def note(self, text: str) -> None:
        """Show something that is not part of the answer."""

    def error(self, text: str) -> None:
        """Show what went wrong."""


class PlainUI:
    """Lines in, plain text out. A line that ends with a backslash continues on the next one.

    Args:
        source: where messages come from.
        sink: where answers go.
        notes: where notes and errors go.
        quiet: leave notes out.
    """

    def __init__(self, source: TextIO, sink: TextIO, notes: TextIO, quiet: bool = False) -> None:
        self._source, self._sink, self._notes, self._quiet = source, sink, notes, quiet

    def read(self) -> str | None:
        """One line, or several joined by trailing backslashes; None at the end of the input."""
        lines: list[str] = []
        while line := self._source.readline():
            line = line.rstrip("\r\n")
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])
        return "\n".join(lines) if lines else None

    @contextmanager
    def answering(self) -> Iterator[InterruptCheck]:
        """Ends the answer with a newline; Ctrl-C ends the program, as it does for any filter."""
        yield lambda: False
        self._sink.write("\n")
        self._sink.flush()

    def write(self, text: str) -> None:
        """Text to the sink at once."""
        self._sink.write(text)
        self._sink.flush()

    def note(self, text: str) -> None:
        """A line on stderr, unless quiet."""
        if not self._quiet:
            print(text, file=self._notes, flush=True)

    def error(self, text: str) -> None:
        """A line on stderr."""
        print(f"error: {text}", file=self._notes, flush=True)

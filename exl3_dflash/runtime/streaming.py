"""Turn a growing list of tokens into text that can be shown at once and never has to be taken back.

Two things make this hard. A character may span several tokens (byte-level and byte-fallback vocabularies), so text is
held back while it ends in U+FFFD. And some tokenizers drop a leading space, so a token is never decoded alone: a
small window of tokens before it is decoded with and without it, and the difference is the new text.

    ids    [ ... | window, already shown | pending ]
    text   decode(window + pending) minus decode(window)

Stop strings may start in one token and end in another: the longest tail of the text that could still grow into a stop
string is held back, so that no part of a stop string is ever shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from exl3_dflash.runtime.engine import StopSettings

if TYPE_CHECKING:
    from exl3_dflash.target.base import TargetTokenizer

REPLACEMENT = "\ufffd"


class IncrementalDecoder:
    """Text of a token stream, piece by piece; special tokens give no text."""

    def __init__(self, tokenizer: TargetTokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._window_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """New text that this token completes, possibly empty."""
        self._pending.append(token_id)
        text = self._decode(self._window + self._pending)
        if len(text) <= len(self._window_text) or text.endswith(REPLACEMENT):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """What is left at the end of the stream, incomplete characters included."""
        return self._advance(self._decode(self._window + self._pending))

    def _advance(self, text: str) -> str:
        new = text[len(self._window_text) :]
        self._window, self._pending = self._pending, []
        self._window_text = self._decode(self._window)
        return new

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=True) if ids else ""


class StopScanner:
    """Cuts text at the first stop string to be completed, however the text is divided into pieces."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Text that may be shown now; nothing any more once a stop string was found."""
        if self.found:
            return ""
        self._held += text
        matches = [(at + len(stop), at) for stop in self._strings if (at := self._held.find(stop)) >= 0]
        if matches:
            self.found = True
            return self._release(min(matches)[1])
        return self._release(len(self._held) - self._possible_start())

    def flush(self) -> str:
        """The text still held back, which is no stop string after all."""
        return self._release(len(self._held)) if not self.found else ""

    def _release(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        return shown

    def _possible_start(self) -> int:
        """Length of the longest tail of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._strings), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._strings):
                return length
        return 0


class TextStream:
    """The visible text of an answer: decoded, without stop tokens, cut before a stop string.

    `push` returns text to show now and `finish` the rest; both together are the whole answer.
    """

    def __init__(self, tokenizer: TargetTokenizer, stops: StopSettings) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._scanner = StopScanner(stops.strings)
        self._stop_ids = stops.token_ids

    @property
    def stopped(self) -> bool:
        """Whether a stop string was completed."""
        return self._scanner.found

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that these tokens add, as far as it can be shown."""
        pieces = (self._decoder.push(token_id) for token_id in token_ids if token_id not in self._stop_ids)
        return "".join([self._scanner.push(piece) for piece in pieces])

    def finish(self) -> str:
        """The rest of the text: incomplete characters and the held-back start of a stop string that never came."""
        return self._scanner.push(self._decoder.flush()) + self._scanner.flush()


def answer_text(tokenizer: TargetTokenizer, token_ids: Iterable[int], stops: StopSettings) -> str:
    """The visible text of a finished answer."""
    stream = TextStream(tokenizer, stops)
    return stream.push(token_ids) + stream.finish()

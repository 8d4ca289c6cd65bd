"""Notes and progress bars of long jobs, all on stderr (stdout is data)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


class Reporter:
    """Where a job tells what it is doing.

    Args:
        quiet: say nothing.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet

    def note(self, text: str) -> None:
        """One line, or several, for the person watching."""
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)

    @contextmanager
    def bar(self, label: str, total: float, unit: str) -> Iterator[Callable[[float], None]]:
        """A progress bar with the time left; yields a function that advances it."""
        with tqdm(
            total=total, desc=label, unit=unit, file=sys.stderr, disable=self._quiet, leave=False, dynamic_ncols=True
        ) as bar:

            def advance(amount: float = 1) -> None:
                bar.update(amount)

            yield advance

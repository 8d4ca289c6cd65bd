"""Which copies of a recurrent state to keep, so that rolling back re-runs few tokens and memory stays bounded.

Generation goes back a few tokens at a time (rejected drafts), a chat's next turn or a shorter second prompt goes back
far. The shelf keeps the two newest copies always (the state before the last forward, and one before that), and of the
older ones those that are spread most evenly: when it is full, it gives up the copy whose neighbours lie closest
together. Length 0 needs no copy: it is an empty cache.
"""

from __future__ import annotations

from typing import Generic, TypeVar

State = TypeVar("State")

MAX_SNAPSHOTS = 6
_ALWAYS_KEPT = 2


class SnapshotShelf(Generic[State]):
    """Copies of a state by the number of tokens it has seen."""

    def __init__(self, capacity: int = MAX_SNAPSHOTS) -> None:
        assert capacity > _ALWAYS_KEPT
        self._capacity = capacity
        self._states: dict[int, State] = {}  # ascending lengths: drop_after precedes every add of a smaller length

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths that have a copy, ascending."""
        return tuple(self._states)

    def add(self, length: int, state: State) -> None:
        """Keep `state`, taken after `length` > every kept length tokens."""
        self.drop_after(length - 1)
        self._states[length] = state
        if len(self._states) > self._capacity:
            del self._states[self._most_crowded()]

    def latest(self, length: int) -> tuple[int, State] | None:
        """The newest copy at or before `length`, with its length; None where there is none."""
        fitting = [kept for kept in self._states if kept <= length]
        return (fitting[-1], self._states[fitting[-1]]) if fitting else None

    def drop_after(self, length: int) -> None:
        """Forget copies of more than `length` tokens."""
        for kept in [kept for kept in self._states if kept > length]:
            del self._states[kept]

    def _most_crowded(self) -> int:
        lengths = [0, *self._states]
        removable = range(1, len(lengths) - _ALWAYS_KEPT)
        return lengths[min(removable, key=lambda index: lengths[index + 1] - lengths[index - 1])]

"""The shelf of recurrent states: what is kept, found and dropped."""

from __future__ import annotations

from exl3_dflash.target.snapshots import SnapshotShelf


def test_the_newest_copy_at_or_before_a_length_is_found() -> None:
    shelf: SnapshotShelf[str] = SnapshotShelf()
    for length in (5, 9, 14):
        shelf.add(length, f"after {length}")
    assert shelf.latest(13) == (9, "after 9")
    assert shelf.latest(14) == (14, "after 14")
    assert shelf.latest(4) is None


def test_copies_past_a_rollback_are_dropped() -> None:
    shelf: SnapshotShelf[int] = SnapshotShelf()
    for length in (5, 9, 14):
        shelf.add(length, length)
    shelf.drop_after(9)
    assert shelf.lengths == (5, 9)
    shelf.add(7, 7)
    assert shelf.lengths == (5, 7)


def test_memory_is_bounded_and_the_two_newest_stay() -> None:
    shelf: SnapshotShelf[int] = SnapshotShelf(capacity=5)
    for length in range(10, 1010, 10):
        shelf.add(length, length)
        assert len(shelf.lengths) <= 5
        assert shelf.lengths[-2:] == ((length - 10, length) if length > 10 else (length,))[-2:]


def test_what_is_given_up_leaves_the_rest_spread() -> None:
    shelf: SnapshotShelf[int] = SnapshotShelf(capacity=4)
    for length in (500, 1000, 1010, 1020, 1030):
        shelf.add(length, length)
    assert shelf.lengths == (500, 1000, 1020, 1030)

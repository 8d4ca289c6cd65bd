"""The parts of a card that survive its regeneration, and the mark by which a card is known as ours.

All are HTML comments, invisible where the card is shown:

    <!-- exl3-dflash:card report=<sha256> -->           first line of the body; which report the numbers come from
    <!-- exl3-dflash:keep --> ... <!-- /exl3-dflash:keep -->              a person's own text
    <!-- exl3-dflash:upstream --> ... <!-- /exl3-dflash:upstream -->      the source's card, copied once
"""

from __future__ import annotations

import re

from quantize.errors import Exl3DflashError

KEEP, UPSTREAM = "keep", "upstream"
_CARD = re.compile(r"<!-- exl3-dflash:card report=([0-9a-f]{64}) -->")
_ANY = re.compile(r"<!--\s*/?exl3-dflash:[^>]*-->")


def begin(part: str) -> str:
    """The comment that opens a part."""
    return f"<!-- exl3-dflash:{part} -->"


def end(part: str) -> str:
    """The comment that closes a part."""
    return f"<!-- /exl3-dflash:{part} -->"


def card_mark(fingerprint: str) -> str:
    """The comment that marks a card as made here, from the report of this SHA-256."""
    return f"<!-- exl3-dflash:card report={fingerprint} -->"


def card_fingerprint(text: str) -> str | None:
    """The report that a card was made from; None for a card that was not made here."""
    found = _CARD.search(text)
    return found[1] if found else None


def part_of(text: str, part: str, where: str) -> str | None:
    """What stands between the comments of a part, without the line breaks around it; None where there are none.

    Raises:
        Exl3DflashError: only one of the two comments is left, or they are there twice: guessing would lose text.
    """
    opened, closed = text.count(begin(part)), text.count(end(part))
    if opened == closed == 0:
        return None
    start, stop = text.find(begin(part)) + len(begin(part)), text.find(end(part))
    if opened != 1 or closed != 1 or stop < start:
        raise Exl3DflashError(
            f"{where} has {opened} times {begin(part)} and {closed} times {end(part)}",
            "each once, in this order",
            "repair the two lines by hand: the text between them is kept",
        )
    return text[start:stop].strip("\n")


def without_marks(text: str) -> str:
    """The text without any comment of ours, so that a card inside a card cannot be mistaken for it."""
    return _ANY.sub("", text)

"""Cut long text into documents that are small enough to be dealt to calibration and held-out rows."""

from __future__ import annotations

SEGMENT_CHARACTERS = 8192


def split_segments(text: str, limit: int = SEGMENT_CHARACTERS) -> list[str]:
    """Cut `text` into consecutive pieces of at most `limit` characters whose concatenation is `text`.

    Pieces end at the last line break that fits, else at the last space, else anywhere.
    """
    assert limit > 0
    segments: list[str] = []
    start = 0
    while start < len(text):
        end = min(start + limit, len(text))
        if end < len(text):
            cut = text.rfind("\n", start, end) + 1 or text.rfind(" ", start, end) + 1
            end = cut if cut > start else end
        segments.append(text[start:end])
        start = end
    return segments

"""Wording shared by the target's error messages."""

from __future__ import annotations


def first_line(error: Exception) -> str:
    """The first line of another library's error, or its class where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]

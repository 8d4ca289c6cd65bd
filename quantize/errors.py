"""The one error type for everything a user can cause.

It lives in the lowest package so that every layer can raise it; `exl3_dflash.errors` re-exports it. The command line
prints it as one line and exits with code 1 (see `exl3_dflash.cli.app`).
"""

from __future__ import annotations


class Exl3DflashError(Exception):
    """A problem with the user's input or environment, described so that the user can fix it.

    Args:
        what: the thing that is wrong, named (a file, a key, a tensor, an option) with what was seen.
        expected: what should have been there.
        fix: what to do about it.
    """

    def __init__(self, what: str, expected: str | None = None, fix: str | None = None) -> None:
        self.what = what
        self.expected = expected
        self.fix = fix
        parts = [what.rstrip(".")]
        if expected:
            parts.append(f"expected {expected.rstrip('.')}")
        if fix:
            parts.append(f"fix: {fix.rstrip('.')}")
        super().__init__("; ".join(parts))

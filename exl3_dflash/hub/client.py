"""What goes wrong between this machine and the Hugging Face Hub, in one line each, and a client that keeps quiet.

Messages are written here and never quote the Hub or its client, whose texts may carry URLs with signatures, headers and
tokens. Errors are raised `from None`, so that a traceback does not quote them either.
"""

from __future__ import annotations

import errno
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from exl3_dflash.errors import Exl3DflashError

AGAIN = "run the same command again: it continues where it stopped"
LOGIN = "run: hf auth login (or set HF_TOKEN)"
_QUOTA_WORDS = ("quota", "storage limit", "storage space", "payment", "exceeded your")
_METADATA_WORDS = ("yaml", "metadata", "license", "front matter", "base_model")
_NETWORK_ERROR = re.compile(r"Connect|Timeout|Network|Proxy|DNS")  # of the HTTP library, by name
_RESET_SECONDS = re.compile(r";\s*t\s*=\s*(\d+)")


@dataclass(frozen=True)
class Explanation:
    """One line: what is wrong, what was expected, what to do."""

    what: str
    expected: str | None = None
    fix: str | None = None


def http_error(error: BaseException) -> Exception | None:
    """The first exception with an HTTP response among an error and its causes."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if getattr(getattr(current, "response", None), "status_code", None) is not None:
            assert isinstance(current, Exception)
            return current
        current = current.__cause__ or current.__context__
    return None


def status_of(error: BaseException) -> int | None:
    """The HTTP status behind an error, if there is one."""
    found = http_error(error)
    return None if found is None else int(found.response.status_code)  # type: ignore[attr-defined]


def explain(error: Exception, repository: str) -> Explanation:
    """Why a request about `repository` that changes it failed."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalTokenNotFoundError):
        return Explanation("there is no Hugging Face token", "one that may write", LOGIN)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Explanation("the disk is full", "room for temporary files", "free some space")
    status = status_of(error)
    if status is None:
        return _explain_without_status(error)
    return _explain_status(status, error, repository)


def _explain_status(status: int, error: Exception, repository: str) -> Explanation:
    said = str(http_error(error) or error).lower()
    if status in (402, 403, 413) and any(word in said for word in _QUOTA_WORDS):
        return Explanation(
            f"the storage quota of {repository.partition('/')[0]} is exhausted (status {status})",
            "room for these files",
            "free some storage, or publish without --private",
        )
    if status == 403 and _method(error) == "PUT":  # the file's own upload address, which expires
        return Explanation("the storage refused the upload of a file (status 403)", None, AGAIN)
    if status == 400:
        about = "the card's metadata" if any(word in said for word in _METADATA_WORDS) else "the request"
        about = "the license in the card's metadata" if "license" in said else about
        return Explanation(f"the Hub refuses {about}", "what it documents", "make the card again: exl3-dflash card")
    known = {
        401: Explanation("the Hugging Face token is missing or not valid", "a valid token that may write", LOGIN),
        403: Explanation("this token may not write there", "a token with write permission", LOGIN),
        404: Explanation("there is no such repository or branch", "an existing one", "check the spelling"),
        409: Explanation("somebody else changes the repository at this moment", None, AGAIN),
        412: Explanation("the branch changed in the meantime", None, AGAIN),
        429: Explanation(f"the Hub's rate limit is reached{_reset(error)}", None, f"wait, then {AGAIN}"),
    }
    return known.get(status) or Explanation(f"the Hub answered with status {status}", None, AGAIN)


def _explain_without_status(error: Exception) -> Explanation:
    said = str(error).lower()
    if any(word in said for word in _QUOTA_WORDS):
        return Explanation("the storage quota is exhausted", "room for these files", "free some storage")
    if isinstance(error, (ConnectionError, TimeoutError)) or _NETWORK_ERROR.search(type(error).__name__):
        return Explanation(f"the Hub cannot be reached ({type(error).__name__})", "a network connection", AGAIN)
    return Explanation(f"the transfer was interrupted ({type(error).__name__})", None, AGAIN)


def _method(error: Exception) -> str | None:
    """The HTTP method of the request that failed."""
    request = getattr(getattr(http_error(error), "response", None), "request", None)
    return getattr(request, "method", None)


def _reset(error: Exception) -> str:
    """`, for another N seconds`, where the answer says so."""
    headers = getattr(getattr(http_error(error), "response", None), "headers", {})
    seconds = str(headers.get("retry-after", ""))
    if not seconds.isdigit():
        found = _RESET_SECONDS.search(str(headers.get("ratelimit", "")))
        seconds = found[1] if found else ""
    return f", for another {seconds} seconds" if seconds else ""


@contextmanager
def explained(action: str, repository: str) -> Iterator[None]:
    """Turn whatever a request raises into one line that begins with `action`; nothing of the client reaches stderr but
    its progress bars, and those only in a terminal."""
    try:
        with quiet_client():
            yield
    except Exl3DflashError:
        raise
    except Exception as error:
        found = explain(error, repository)
        if sys.stderr.isatty():
            print(file=sys.stderr)  # after a bar that was broken off
        raise Exl3DflashError(f"{action}: {found.what}", found.expected, found.fix) from None


@contextmanager
def quiet_client() -> Iterator[None]:
    """Silence the client's warnings, which quote signed addresses, and its bars where there is no terminal."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    hide_bars = not sys.stderr.isatty() and not are_progress_bars_disabled()
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if hide_bars:
                disable_progress_bars()
            yield
    finally:
        logger.setLevel(level)
        if hide_bars:
            enable_progress_bars()

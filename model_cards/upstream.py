"""Cards as files: front matter apart from the text, and the source's card made fit to stand inside another one.

Inside another card its front matter is gone and its links still lead where they led: links relative to the source's
repository become absolute (`/resolve/` for images, `/blob/` for the rest). Code blocks are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_cards.markers import KEEP, UPSTREAM, card_fingerprint, part_of, without_marks
from quantize.errors import Exl3DflashError

HUB = "https://huggingface.co"
_FRONT_MATTER = re.compile(r"\s*---[ \t]*\n(.*?\n)?---[ \t]*(\n|$)", re.DOTALL)
_CODE = re.compile(r"(^(?P<fence>```+|~~~+).*?^(?P=fence)[`~]*[ \t]*$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
_IMAGE = re.compile(r"(?P<before>!\[[^\[\]\n]*\]\()(?P<url>[^)\s]+)")
_LINK = re.compile(r"(?P<before>\]\()(?P<url>[^)\s]+)")  # images are absolute by then, also those inside links
_HTML_LINK = re.compile(r"(?P<name>\b(?:src|href))=(?P<quote>[\"'])(?P<url>[^\"'\n]+)(?P=quote)", re.IGNORECASE)
_ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*:|//|#|/", re.IGNORECASE)


@dataclass(frozen=True)
class UpstreamCard:
    """A card: `metadata` is its front matter, `text` everything below it."""

    metadata: Mapping[str, Any]
    text: str

    @property
    def fingerprint(self) -> str | None:
        """The report it was made from, if it was made here."""
        return card_fingerprint(self.text)

    def kept(self, where: str) -> str | None:
        """What a person added between the markers; None where the card has no markers."""
        return part_of(self.text, KEEP, where)

    def quoted(self, where: str) -> str | None:
        """The source's card inside this one; None where there is none."""
        return part_of(self.text, UPSTREAM, where)


def read_card(file: Path) -> UpstreamCard:
    """Read a card.

    Raises:
        Exl3DflashError: the file cannot be read, or its front matter is not a YAML mapping.
    """
    try:
        content = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise Exl3DflashError(f"{file} cannot be read: {error}", "a text file in UTF-8") from error
    return parse_card(content, str(file))


def parse_card(content: str, where: str) -> UpstreamCard:
    """Split a card into front matter and text; `where` names it in errors.

    Raises:
        Exl3DflashError: the front matter is not a YAML mapping.
    """
    import yaml

    content = content.replace("\r\n", "\n").replace("\r", "\n")
    found = _FRONT_MATTER.match(content)
    if found is None:
        return UpstreamCard({}, content)
    try:
        metadata = yaml.safe_load(found[1] or "") or {}
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        place = "" if line is None else f" (line {line + 2})"
        raise Exl3DflashError(f"the front matter of {where} is not YAML{place}", "key: value lines") from error
    if not isinstance(metadata, dict):
        raise Exl3DflashError(f"the front matter of {where} is a {type(metadata).__name__}", "key: value lines")
    return UpstreamCard(metadata, content[found.end() :])


def quotable(text: str, repository: str | None, revision: str | None) -> str:
    """A card's text for use inside another card: no marks of ours, and links that do not depend on where it stands.

    Args:
        text: without front matter.
        repository: `org/name` that the card belongs to; None leaves relative links as they are.
        revision: commit, branch or tag for the links; `main` by default.
    """
    text = without_marks(text).strip("\n")
    if repository is None:
        return text
    parts = _CODE.split(text)
    pieces: list[str] = []
    for index in range(0, len(parts), _CODE.groups + 1):
        pieces.append(_absolute_links(parts[index], f"{HUB}/{repository}", revision or "main"))
        if index + 1 < len(parts):
            pieces.append(parts[index + 1])
    return "".join(pieces)


def _absolute_links(text: str, repository: str, revision: str) -> str:
    def absolute(url: str, image: bool) -> str:
        if _ABSOLUTE.match(url):
            return url
        return f"{repository}/{'resolve' if image else 'blob'}/{revision}/{url.removeprefix('./')}"

    def image(found: re.Match[str]) -> str:
        return found["before"] + absolute(found["url"], True)

    def link(found: re.Match[str]) -> str:
        return found["before"] + absolute(found["url"], False)

    def html(found: re.Match[str]) -> str:
        url = absolute(found["url"], found["name"].lower() == "src")
        return f"{found['name']}={found['quote']}{url}{found['quote']}"

    return _HTML_LINK.sub(html, _LINK.sub(link, _IMAGE.sub(image, text)))

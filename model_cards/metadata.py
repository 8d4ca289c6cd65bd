"""The front matter of a card: what the Hub shows, searches and refuses.

The license is the one thing that cannot be derived: it comes from the source's card or from the user, and without it
there is no card. `check_metadata` holds a finished card against what the Hub demands, before any upload.
"""

from __future__ import annotations

import difflib
import importlib.resources
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantize.errors import Exl3DflashError

TAGS = ("exl3", "dflash", "speculative-decoding")
PIPELINE_TAG = "text-generation"
LIBRARY = "exllamav3"
TOOL = "exl3-dflash"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_LICENSE_ID = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_INHERITED = ("license", "license_name", "license_link", "language")
_OURS = ("base_model", "base_model_relation", "quantized_by", "pipeline_tag", "library_name", "tags")


@dataclass(frozen=True)
class License:
    """An identifier of the Hub (several where the source has several); `name` and `link` where it is `other`."""

    identifier: str | tuple[str, ...]
    name: str | None = None
    link: str | None = None


@dataclass(frozen=True)
class CardNames:
    """What a report does not know and a card needs.

    Attributes:
        title: heading of the card.
        license: of the drafter.
        base_model: Hub id of the source drafter; None where it has none.
        quantized_by: person or organisation; the tool's name where nobody is named.
        repository: `org/name` where the drafter is, or will be, published; None where that is not known.
        branch: its branch there.
        directory: name of the directory, for examples where there is no repository.
    """

    title: str
    license: License
    base_model: str | None
    quantized_by: str
    repository: str | None
    branch: str
    directory: str


def known_licenses() -> tuple[str, ...]:
    """The identifiers that the Hub knows by a name."""
    return tuple(importlib.resources.files("model_cards").joinpath("licenses.txt").read_text("utf-8").split())


def choose_license(asked: License | None, inherited: Mapping[str, Any]) -> License:
    """The license of a card: what was asked for, else what the source's front matter says.

    Raises:
        Exl3DflashError: neither names one, or what was asked for is not a license of the Hub.
    """
    if asked is not None:
        _check_asked(asked)
        return asked
    said = inherited.get("license")
    names = [said] if isinstance(said, str) else said if isinstance(said, list) else []
    names = [str(name).strip().lower() for name in names if name is not None]
    if not names or any(not _LICENSE_ID.fullmatch(name) or name in ("none", "null") for name in names):
        raise Exl3DflashError(
            f"the source's card names no license ({said!r})" if inherited else "the license is not known",
            "an identifier such as apache-2.0: the Hub refuses a card without one",
            "give --license, as the source's authors licensed it",
        )
    license_name, link = inherited.get("license_name"), inherited.get("license_link")
    return License(names[0] if len(names) == 1 else tuple(names), license_name, link)


def _check_asked(asked: License) -> None:
    known = known_licenses()
    identifier = asked.identifier
    if identifier not in known:
        near = difflib.get_close_matches(str(identifier).lower(), known, n=1)
        raise Exl3DflashError(
            f"--license {identifier!r} is not a license identifier of the Hub",
            f"for example {near[0] if near else 'apache-2.0'}",
            "use one of https://huggingface.co/docs/hub/repositories-licenses, or other with --license-name",
        )
    if identifier == "other" and not asked.name:
        raise Exl3DflashError("--license other has no name", "--license-name, and --license-link where there is one")


def front_matter(names: CardNames, previous: Mapping[str, Any]) -> Any:
    """The card's metadata as huggingface_hub's `ModelCardData`.

    Args:
        names: what the card is about.
        previous: front matter of the card that is replaced, or of the source's; its language is inherited. Of a card
            made here, keys and tags that a person added are kept.
    """
    from huggingface_hub import ModelCardData

    ours = previous.get("library_name") == LIBRARY and "quantized_by" in previous
    added = {key: value for key, value in previous.items() if key not in (*_INHERITED, *_OURS)} if ours else {}
    tags = list(TAGS) + [tag for tag in previous.get("tags") or [] if ours and tag not in TAGS]
    identifier = names.license.identifier
    return ModelCardData(
        license=list(identifier) if isinstance(identifier, tuple) else identifier,
        license_name=names.license.name,
        license_link=names.license.link,
        language=previous.get("language"),
        base_model=names.base_model,
        base_model_relation="quantized" if names.base_model else None,
        quantized_by=names.quantized_by,
        pipeline_tag=PIPELINE_TAG,
        library_name=LIBRARY,
        tags=tags,
        ignore_metadata_errors=True,
        **added,
    )


def check_metadata(metadata: Mapping[str, Any], where: str) -> None:
    """Hold a card's front matter against what the Hub demands and what this project promises.

    Raises:
        Exl3DflashError: with every problem.
    """
    problems = []
    try:
        license_ = choose_license(None, metadata)
        if license_.identifier == "other" and not license_.name:
            problems.append("license is other and license_name is missing")
    except Exl3DflashError:
        problems.append(f"license is {metadata.get('license')!r}")
    problems += [f"tag {tag} is missing" for tag in TAGS if tag not in (metadata.get("tags") or [])]
    if metadata.get("pipeline_tag") != PIPELINE_TAG:
        problems.append(f"pipeline_tag is {metadata.get('pipeline_tag')!r}")
    base = metadata.get("base_model")
    for name in base if isinstance(base, list) else [base] if base is not None else []:
        if not isinstance(name, str) or not HUB_ID.fullmatch(name):
            problems.append(f"base_model is {name!r}, not an org/name")
    if base is not None and metadata.get("base_model_relation") != "quantized":
        problems.append(f"base_model_relation is {metadata.get('base_model_relation')!r}")
    if not metadata.get("quantized_by"):
        problems.append("quantized_by is missing")
    if problems:
        raise Exl3DflashError(
            f"the front matter of {where} would be refused or misleading: {'; '.join(problems)}",
            "what exl3-dflash card writes",
            "make the card again with exl3-dflash card",
        )

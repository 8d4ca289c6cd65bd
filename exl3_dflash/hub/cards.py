"""`exl3-dflash card`: the README of a quantized drafter, or of a family of bit rates.

What a card needs beside the report is gathered here: the source's card (the `README.md` that went along, a file or
repository that was named, or the source's on the Hub), the license in it, and what a person added to an earlier card.
A `README.md` that was not made here is taken for the source's and quoted whole; one that was made here is replaced, and
its kept text, its source's card, its license and its added metadata go over into the new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.hub.resolve import download_card, is_hub_id
from model_cards import (
    CardFacts,
    CardNames,
    FamilyMember,
    License,
    UpstreamCard,
    branch_name,
    check_metadata,
    choose_license,
    read_card,
    read_report,
    render_drafter_card,
    render_family_card,
)
from model_cards.metadata import TOOL
from model_cards.upstream import parse_card, quotable

CARD_NAME = "README.md"
NO_UPSTREAM = "none"
MAIN = "main"


@dataclass(frozen=True)
class CardSettings:
    """What the reports do not say; the options of `exl3-dflash card`.

    Attributes:
        repository: `org/name` where the drafter is or will be published.
        branch: its branch there; for one drafter only.
        license: in place of the source's.
        base_model: the source's Hub id, where the report has only a directory's name.
        quantized_by: person or organisation; the repository's by default.
        upstream: the source's card: a file, `org/name[@revision]`, or `none`.
        offline: never ask the Hub for the source's card.
    """

    repository: str | None = None
    branch: str = MAIN
    license: License | None = None
    base_model: str | None = None
    quantized_by: str | None = None
    upstream: str | None = None
    offline: bool = False

    def __post_init__(self) -> None:
        for option, name in (("--repo", self.repository), ("--base-model", self.base_model)):
            if name is not None and not is_hub_id(name):
                raise Exl3DflashError(f"{option} {name!r}", "org/name", "give the repository's full name")


@dataclass(frozen=True)
class Card:
    """A finished card: its text, the file it belongs into, and what the user should know."""

    text: str
    file: Path
    metadata: dict[str, Any]
    notes: tuple[str, ...]

    def write(self) -> None:
        """Put the card in place, complete or not at all."""
        temporary = self.file.with_name(f".{self.file.name}.partial")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(self.text, encoding="utf-8", newline="\n")
            temporary.replace(self.file)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise Exl3DflashError(f"{self.file} cannot be written: {error.strerror}", fix="check the path") from error

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {"file": str(self.file), "metadata": self.metadata, "notes": list(self.notes), "text": self.text}


@dataclass(frozen=True)
class _Material:
    """What goes over into a card from other cards."""

    kept: str
    upstream: str
    inherited: dict[str, Any]  # front matter that may name the license
    previous: dict[str, Any]  # front matter of the card that is replaced, or else the source's
    notes: tuple[str, ...]


def make_card(directory: Path, settings: CardSettings, file: Path | None = None) -> Card:
    """The card of one quantized drafter; nothing is written.

    Args:
        directory: written by `exl3-dflash quantize`.
        settings: see there.
        file: where the card belongs; `README.md` in the directory by default. An existing one is the card that is
            replaced.

    Raises:
        Exl3DflashError: no report, a damaged card, an unknown license.
    """
    facts = read_report(directory)
    file = file or directory / CARD_NAME
    replaced = file if file.is_file() else directory / CARD_NAME
    material = _gather(replaced, facts, settings)
    names = _names(facts, settings, material, directory.resolve().name)
    text = render_drafter_card(facts, names, kept=material.kept, upstream=material.upstream, previous=material.previous)
    return _finished(text, file, names, material)


def make_drafter_and_family_cards(
    directories: Sequence[Path], settings: CardSettings, file: Path | None = None
) -> tuple[Card, ...]:
    """The card of one directory, or those of several and then that of their family, at `file`; nothing is written."""
    if len(directories) == 1:
        return (make_card(directories[0], settings, file),)
    assert file is not None, "a family's card has no place of its own"
    members = family_members(directories)
    cards = [
        make_card(directory, replace(settings, branch=member.branch))
        for directory, member in zip(directories, members, strict=True)
    ]
    return (*cards, make_family_card(directories, settings, file))


def make_family_card(directories: Sequence[Path], settings: CardSettings, file: Path) -> Card:
    """The card of a repository that has one bit rate per branch; nothing is written.

    Raises:
        Exl3DflashError: as for one; no repository; directories of different sources or with the same bit rate.
    """
    if settings.repository is None:
        raise Exl3DflashError("a family's card links its branches", "--repo org/name", "give --repo")
    members = family_members(directories)
    facts = members[0].facts
    replaced = file if file.is_file() else directories[0] / CARD_NAME
    material = _gather(replaced, facts, settings)
    if replaced != file:
        material = replace(material, kept="")  # the text that was added to a member's card stays there
    names = _names(facts, settings, material, directories[0].resolve().name)
    names = replace(names, title=f"{_short(facts.source)}, EXL3", branch=MAIN)
    text = render_family_card(
        members, names, kept=material.kept, upstream=material.upstream, previous=material.previous
    )
    return _finished(text, file, names, material)


def family_members(directories: Sequence[Path]) -> tuple[FamilyMember, ...]:
    """The members of a family, each on the branch of its bit rate.

    Raises:
        Exl3DflashError: they are not quantizations of one drafter, or two have the same bit rate.
    """
    members: dict[str, FamilyMember] = {}
    for directory in directories:
        facts = read_report(directory)
        branch = branch_name(facts)
        if branch in members:
            raise Exl3DflashError(f"{directory} is a second {branch}", "one directory per bit rate", "leave one out")
        members[branch] = FamilyMember(branch, facts)
    sources = {member.facts.source_sha256: member.facts.source for member in members.values()}
    if len(sources) > 1:
        raise Exl3DflashError(
            f"the directories come from different drafters: {', '.join(sorted(sources.values()))} "
            f"({', '.join(digest[:12] for digest in sources)})",
            "quantizations of the same weights",
            "publish them to different repositories",
        )
    return tuple(members.values())


def _finished(text: str, file: Path, names: CardNames, material: _Material) -> Card:
    metadata = dict(parse_card(text, str(file)).metadata)
    check_metadata(metadata, str(file))
    notes = list(material.notes)
    if names.base_model is None:
        notes.append("the source has no Hub id: give --base-model org/name to link the drafter it was made from")
    if names.repository is None:
        notes.append("no --repo: the card's examples use the local directory")
    return Card(text, file, metadata, tuple(notes))


def _gather(replaced: Path, facts: CardFacts, settings: CardSettings) -> _Material:
    """What goes over from the card at `replaced`, and from the source's card."""
    existing = read_card(replaced) if replaced.is_file() else None
    ours = existing is not None and existing.fingerprint is not None
    kept = existing.kept(str(replaced)) or "" if existing is not None and ours else ""
    notes: tuple[str, ...] = ()
    source: UpstreamCard | None = None
    if settings.upstream is not None:
        source = _named_upstream(settings)
    elif existing is not None and not ours:
        source = existing
    elif existing is None and is_hub_id(facts.source) and not settings.offline:
        try:
            source = read_card(download_card(facts.source, facts.source_revision))
        except Exl3DflashError as error:
            notes = (f"the source's card could not be had: {error}",)
    if source is not None:
        repository = settings.base_model or (facts.source if is_hub_id(facts.source) else None)
        upstream = quotable(source.text, repository, facts.source_revision)
    else:
        dropped = settings.upstream == NO_UPSTREAM
        upstream = existing.quoted(str(replaced)) or "" if existing is not None and ours and not dropped else ""
    own = dict(existing.metadata) if existing is not None else {}
    inherited = dict(source.metadata) if source is not None and "license" in source.metadata else own
    return _Material(kept, upstream.strip("\n"), inherited, own if ours else inherited, notes)


def _named_upstream(settings: CardSettings) -> UpstreamCard | None:
    """The source's card that `--upstream` names."""
    named = settings.upstream or NO_UPSTREAM
    if named == NO_UPSTREAM:
        return None
    if Path(named).is_file():
        return read_card(Path(named))
    if Path(named).is_dir():
        return read_card(Path(named) / CARD_NAME)
    repository, _, revision = named.partition("@")
    if not is_hub_id(repository) or settings.offline:
        raise Exl3DflashError(f"--upstream {named} does not exist", "a card's file, org/name, or none", "check it")
    return read_card(download_card(repository, revision or None))


def _names(facts: CardFacts, settings: CardSettings, material: _Material, directory: str) -> CardNames:
    previous = material.previous
    base_model = settings.base_model or (facts.source if is_hub_id(facts.source) else None)
    if base_model is None and "quantized_by" in previous:  # of a card made here, where --base-model was given once
        base_model = previous.get("base_model")
    owner = settings.repository.partition("/")[0] if settings.repository else None
    return CardNames(
        title=f"{_short(facts.source)}, EXL3, {facts.bits:g} bits",
        license=choose_license(settings.license, material.inherited),
        base_model=base_model,
        quantized_by=settings.quantized_by or owner or previous.get("quantized_by") or TOOL,
        repository=settings.repository,
        branch=settings.branch,
        directory=directory,
    )


def _short(name: str) -> str:
    return name.rpartition("/")[2]

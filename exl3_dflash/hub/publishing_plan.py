"""What `exl3-dflash publish` will do, decided completely before it does anything.

One directory goes to one branch. Several go to a branch each, named by bit rate, with the family's card on `main`.
The plan is made from local files alone, so `--dry-run` shows exactly what a real run sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.hub.cards import CARD_NAME, MAIN, CardSettings, family_members, make_family_card
from exl3_dflash.hub.preflight import CheckedDirectory, LocalFile, check_card, check_directory, local_file
from exl3_dflash.hub.resolve import split_name
from exl3_dflash.progress import Reporter
from model_cards.render import family_fingerprint

STALE_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


@dataclass(frozen=True)
class PublishSettings:
    """The options of `exl3-dflash publish`.

    Attributes:
        directories: from `exl3-dflash quantize`, each with its card.
        repository: `org/name`, or `org/name@branch`.
        branch: for one directory; `main` by default.
        private: make the repository private, if it is created.
        pull_request: open a pull request on `main` in place of writing to it.
        message: of the commits.
        card: the family's card; made anew by default.
    """

    directories: tuple[Path, ...]
    repository: str
    branch: str | None = None
    private: bool = False
    pull_request: bool = False
    message: str | None = None
    card: Path | None = None

    def __post_init__(self) -> None:
        repository, revision = split_name(self.repository)
        if revision is not None:
            if self.branch not in (None, revision):
                raise Exl3DflashError(f"{self.repository} and --branch {self.branch}", "one branch", "leave one out")
            object.__setattr__(self, "branch", revision)
        object.__setattr__(self, "repository", repository)
        family = len(self.directories) > 1
        if family and self.branch is not None:
            raise Exl3DflashError("--branch with several directories", "a branch for each, named by its bit rate")
        if self.pull_request and (family or self.branch not in (None, MAIN)):
            raise Exl3DflashError("--pr", "one directory for main: the Hub opens pull requests on main only")
        if self.card is not None and not family:
            raise Exl3DflashError("--card with one directory", "the card inside the directory", "leave it out")


@dataclass(frozen=True)
class PlannedUpload:
    """The files of one folder for one branch. `is_card` is the family's card, which leaves other files alone."""

    branch: str
    folder: Path
    files: tuple[LocalFile, ...]
    message: str
    is_card: bool = False

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        files = [{"path": file.name, "size": file.size, "sha256": file.sha256} for file in self.files]
        return {"branch": self.branch, "message": self.message, "size": self.size, "files": files}


@dataclass(frozen=True)
class PublishPlan:
    """A whole job: `uploads` in order, the family's card last, so that its links work when it appears."""

    repository: str
    private: bool
    pull_request: bool
    uploads: tuple[PlannedUpload, ...]

    @property
    def url(self) -> str:
        """Where the result will be seen."""
        from huggingface_hub import constants

        branch = self.uploads[-1].branch
        return f"{constants.ENDPOINT}/{self.repository}" + ("" if branch == MAIN else f"/tree/{branch}")

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            "repository": self.repository,
            "private": self.private,
            "pull_request": self.pull_request,
            "size": sum(upload.size for upload in self.uploads),
            "uploads": [upload.to_json() for upload in self.uploads],
            "url": self.url,
        }

    def describe(self) -> str:
        """Every step, in order."""
        kind = "private" if self.private else "public"
        lines = []
        if not self.pull_request:
            lines.append(f"create the {kind} model repository {self.repository}, unless it exists")
        for upload in self.uploads:
            if self.pull_request:
                lines.append(f"open a pull request on {self.repository}: {upload.message}")
            elif upload.branch != MAIN:
                lines.append(f"create the branch {upload.branch}, unless it exists")
            lines.append(f"upload to {upload.branch}, {upload.size:,} bytes, as {upload.message!r}:")
            lines += [f"  {file.size:>14,}  {file.sha256[:16]}  {file.name}" for file in upload.files]
            if not upload.is_card:
                lines.append(f"  remove from it any other {' and '.join(STALE_WEIGHTS)}")
        lines += ["check names, sizes and hashes of all files there", self.url]
        return "\n".join(lines)


def make_plan(settings: PublishSettings, scratch: Path, reporter: Reporter) -> PublishPlan:
    """Check every directory and decide what goes where; needs no network.

    Args:
        settings: what to publish.
        scratch: an empty directory for the family's card.
        reporter: where to tell.

    Raises:
        Exl3DflashError: whatever `preflight.check_directory` refuses.
    """
    for directory in settings.directories:
        reporter.note(f"checking {directory}")
    checked = [check_directory(directory) for directory in settings.directories]
    if len(checked) == 1:
        uploads = [_upload(checked[0], settings.branch or MAIN, settings)]
    else:
        members = family_members(settings.directories)
        uploads = [_upload(one, member.branch, settings) for one, member in zip(checked, members, strict=True)]
        uploads.append(_card_upload(settings, scratch))
    return PublishPlan(settings.repository, settings.private, settings.pull_request, tuple(uploads))


def _upload(checked: CheckedDirectory, branch: str, settings: PublishSettings) -> PlannedUpload:
    facts = checked.facts
    message = settings.message or f"EXL3, {facts.bits:g} bits, of {facts.source}"
    return PlannedUpload(branch, checked.path, checked.files, message)


def _card_upload(settings: PublishSettings, scratch: Path) -> PlannedUpload:
    """The family's card, taken from `--card` or made from the members."""
    file = scratch / CARD_NAME
    if settings.card is not None:
        check_card(settings.card, family_fingerprint(family_members(settings.directories)))
        file.write_bytes(settings.card.read_bytes())
    else:
        made = make_family_card(settings.directories, CardSettings(settings.repository, offline=True), file)
        made.write()
    return PlannedUpload(MAIN, scratch, (local_file(file),), settings.message or "Card of all bit rates", is_card=True)


def directories_of(names: Sequence[Path]) -> tuple[Path, ...]:
    """The directories that were named, each once.

    Raises:
        Exl3DflashError: one does not exist, or is named twice.
    """
    resolved = [name.expanduser().resolve() for name in names]
    for name, path in zip(names, resolved, strict=True):
        if not path.is_dir():
            raise Exl3DflashError(f"{name} is not a directory", "one that exl3-dflash quantize wrote", "check the path")
        if resolved.count(path) > 1:
            raise Exl3DflashError(f"{name} is named twice", "each directory once", "leave one out")
    return tuple(resolved)

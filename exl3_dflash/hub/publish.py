"""`exl3-dflash publish`: quantized drafters onto the Hugging Face Hub.

Order: everything local is checked and planned (`publishing_plan`); then token, permission and the cards' front matter
are checked with the Hub; only then are repository and branches created and files sent, and what arrived is compared
with what was meant to, by name, size and hash. Every step that finds its work done does nothing, so the same command
continues after any failure and ends in the same state.

Tokens come from `hf auth login` or HF_TOKEN, never from the command line, and no message here quotes the Hub's client.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.hub.cards import CARD_NAME, MAIN
from exl3_dflash.hub.client import AGAIN, LOGIN, explained, status_of
from exl3_dflash.hub.preflight import LocalFile
from exl3_dflash.hub.publishing_plan import STALE_WEIGHTS, PlannedUpload, PublishPlan, PublishSettings, make_plan
from exl3_dflash.progress import Reporter
from model_cards import read_card
from model_cards.upstream import UpstreamCard


@dataclass(frozen=True)
class UploadResult:
    """What became of one planned upload; `sent` is False where everything was there already."""

    branch: str
    commit: str
    url: str
    sent: bool
    other_files: tuple[str, ...]


@dataclass(frozen=True)
class PublishResult:
    """The plan, and what became of it; `uploads` is None after a dry run."""

    plan: PublishPlan
    uploads: tuple[UploadResult, ...] | None

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        result = self.plan.to_json() | {"dry_run": self.uploads is None}
        if self.uploads is not None:
            for planned, done in zip(result["uploads"], self.uploads, strict=True):
                planned |= {"commit": done.commit, "url": done.url, "sent": done.sent}
                planned |= {"other_files": list(done.other_files)}
            result["url"] = self.uploads[-1].url
        return result

    def summary(self) -> str:
        """The plan after a dry run, else the URL."""
        if self.uploads is None:
            return f"{self.plan.describe()}\n(dry run: nothing was sent)"
        return self.uploads[-1].url


def publish(settings: PublishSettings, *, dry_run: bool = False, reporter: Reporter | None = None) -> PublishResult:
    """Publish one drafter, or a family of bit rates.

    Args:
        settings: what and where.
        dry_run: stop after the plan; nothing is asked of the network.
        reporter: where to tell; silent by default.

    Raises:
        Exl3DflashError: something is wrong with a directory, the token or the transfer, in one line.
    """
    reporter = reporter or Reporter(quiet=True)
    with tempfile.TemporaryDirectory(prefix="exl3-dflash-publish-") as scratch:
        plan = make_plan(settings, Path(scratch), reporter)
        if dry_run:
            return PublishResult(plan, None)
        remote = _Remote(plan, reporter)
        remote.check_access()
        remote.check_cards()
        remote.create()
        return PublishResult(plan, tuple(remote.upload(upload) for upload in plan.uploads))


class _Remote:
    """The repository on the Hub, as one job sees it."""

    def __init__(self, plan: PublishPlan, reporter: Reporter) -> None:
        from huggingface_hub import HfApi

        self.plan = plan
        self.repository = plan.repository
        self.reporter = reporter
        self.api = HfApi(library_name="exl3-dflash")
        self.user = ""

    def check_access(self) -> None:
        """The token exists, is valid, and may write to the repository's owner."""
        with explained("the token was not accepted", self.repository):
            account = self.api.whoami()
        self.user = str(account.get("name"))
        if self.plan.pull_request:
            return
        token = (account.get("auth") or {}).get("accessToken") or {}
        if token.get("role") == "read":
            raise Exl3DflashError("this Hugging Face token can only read", "one with write permission", LOGIN)
        owner = self.repository.partition("/")[0]
        roles = {str(org.get("name")).lower(): org.get("roleInOrg") for org in account.get("orgs") or []}
        if owner.lower() not in (self.user.lower(), *roles):
            raise Exl3DflashError(
                f"{self.user} is not a member of {owner}", f"{self.user} or one of its organisations", "check REPO"
            )
        if roles.get(owner.lower()) == "read":
            raise Exl3DflashError(f"{self.user} can only read in {owner}", "the role write or contributor", "ask there")

    def check_cards(self) -> None:
        """The Hub accepts the front matter of every card that goes out, and no card there has text that it lacks."""
        for upload in self.plan.uploads:
            card = upload.folder / CARD_NAME
            with explained(f"the card of {upload.branch} was not accepted", self.repository):
                try:
                    _validate(card)
                except ValueError as error:  # the client's word for status 400 here
                    about = "license" if "license" in str(error).lower() else "front matter"
                    raise Exl3DflashError(
                        f"the Hub refuses the {about} of the card for {upload.branch}",
                        "an identifier it knows" if about == "license" else "metadata that it documents",
                        "make the card again: exl3-dflash card DIR --license ...",
                    ) from None
            self._check_kept(upload, read_card(card))

    def create(self) -> None:
        """Make the repository and the branches that are missing."""
        if self.plan.pull_request:
            return
        with explained(f"{self.repository} could not be created", self.repository):
            self.api.create_repo(self.repository, private=self.plan.private, repo_type="model", exist_ok=True)
            private = self.plan.private and self.api.repo_info(self.repository).private
        if self.plan.private and not private:
            raise Exl3DflashError(
                f"{self.repository} exists and is public", "a private repository", "change it there, or leave --private"
            )
        for upload in self.plan.uploads:
            if upload.branch != MAIN:
                with explained(f"the branch {upload.branch} could not be created", self.repository):
                    self.api.create_branch(self.repository, branch=upload.branch, exist_ok=True)

    def upload(self, upload: PlannedUpload) -> UploadResult:
        """Send one folder and compare what arrived; nothing is sent where everything is there already."""
        revision = self._open_pull_request(upload) if self.plan.pull_request else upload.branch
        sent, url = False, ""
        if revision is None or _differences(upload, self._tree(revision)):
            self.reporter.note(f"uploading {upload.size:,} bytes to {self.repository}, {upload.branch}")
            revision, url = self._send(upload, revision)
            sent = True
        tree = self._tree(revision)
        problems = _differences(upload, tree)
        if problems:
            raise Exl3DflashError(
                f"{self.repository}, {upload.branch}: {'; '.join(problems[:4])}", "what was sent", AGAIN
            )
        with explained(f"{self.repository} could not be read back", self.repository):
            commit = str(self.api.repo_info(self.repository, revision=revision).sha)
        tail = "" if revision == MAIN else f"/tree/{revision}"
        url = url or f"{self.api.endpoint}/{self.repository}{tail}"
        other = tuple(sorted(tree.keys() - {file.name for file in upload.files} - {".gitattributes"}))
        if other and not upload.is_card:
            self.reporter.note(f"note: {upload.branch} also holds {', '.join(other)}")
        return UploadResult(upload.branch, commit, url, sent, other)

    def _send(self, upload: PlannedUpload, revision: str | None) -> tuple[str, str]:
        """Upload a folder; the revision where it is then, and the URL of a new pull request."""
        new_pull_request = revision is None
        with explained(f"the upload to {self.repository}, {upload.branch} stopped", self.repository):
            info = self.api.upload_folder(
                repo_id=self.repository,
                folder_path=upload.folder,
                repo_type="model",
                revision=revision,
                create_pr=new_pull_request,
                commit_message=upload.message,
                allow_patterns=[file.name for file in upload.files],
                delete_patterns=None if upload.is_card else list(STALE_WEIGHTS),
            )
        if new_pull_request:
            return str(info.pr_revision), str(info.pr_url)
        assert revision is not None
        return revision, ""

    def _open_pull_request(self, upload: PlannedUpload) -> str | None:
        """The reference of this user's open pull request with the same title, which a rerun continues."""
        with explained(f"{self.repository} could not be read", self.repository):
            discussions = self.api.get_repo_discussions(
                self.repository, author=self.user, discussion_type="pull_request", discussion_status="open"
            )
            found = next((one for one in discussions if one.title == upload.message), None)
        return None if found is None else str(found.git_reference)

    def _tree(self, revision: str) -> Mapping[str, Any]:
        """Files of a revision by name; none where it does not exist."""
        from huggingface_hub.hf_api import RepoFile

        with explained(f"{self.repository} could not be read back", self.repository):
            try:
                entries = list(self.api.list_repo_tree(self.repository, recursive=True, revision=revision))
            except Exception as error:
                if status_of(error) != 404:
                    raise
                entries = []
        return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}

    def _check_kept(self, upload: PlannedUpload, card: UpstreamCard) -> None:
        """Text that somebody added to the published card must not be overwritten by a card without it."""
        there = self._published_card(upload.branch)
        if there is None or there.fingerprint is None:
            return
        kept, ours = there.kept("the published card") or "", card.kept(str(upload.folder / CARD_NAME)) or ""
        if kept and kept not in ours:
            raise Exl3DflashError(
                f"the card on {self.repository}, {upload.branch} has text between its markers that the new one lacks",
                "a new card with that text",
                "copy it between the markers of the local card"
                + (" and give it with --card" if upload.is_card else ""),
            )

    def _published_card(self, branch: str) -> UpstreamCard | None:
        """The card that a branch has now, if there is one."""
        with tempfile.TemporaryDirectory() as cache, explained("the published card", self.repository):
            try:
                return read_card(
                    Path(self.api.hf_hub_download(self.repository, CARD_NAME, revision=branch, cache_dir=cache))
                )
            except Exl3DflashError:
                return None  # damaged: nothing to keep
            except Exception as error:
                if status_of(error) in (401, 403, 404):  # 401 is also the answer for a repository that is not there
                    return None
                raise


def _validate(card: Path) -> None:
    from huggingface_hub import ModelCard

    ModelCard(card.read_text(encoding="utf-8"), ignore_metadata_errors=True).validate()


def _differences(upload: PlannedUpload, tree: Mapping[str, Any]) -> list[str]:
    """What is missing, differs, or should not be on a branch."""
    problems = [problem for file in upload.files if (problem := _difference(file, tree.get(file.name)))]
    if not upload.is_card:
        own = {file.name for file in upload.files}
        stale = sorted(name for name in tree if name not in own and any(Path(name).match(p) for p in STALE_WEIGHTS))
        problems += [f"{name} does not belong there" for name in stale]
    return problems


def _difference(file: LocalFile, entry: Any) -> str | None:
    if entry is None:
        return f"{file.name} is missing"
    if entry.size != file.size:
        return f"{file.name} has {entry.size:,} bytes, not {file.size:,}"
    same = entry.lfs.sha256 == file.sha256 if entry.lfs is not None else entry.blob_id == file.git_sha1
    return None if same else f"{file.name} has other content"

"""The names users give (`demo`, a directory, `org/name[@revision]`) to a directory on this machine.

The word `demo` is the embedded pair; a directory of that name is `./demo`. Everything else that exists is a
directory, and what remains must be a Hugging Face id. Downloads go to the Hugging Face cache, continue where they
were interrupted, and take only what is read here: JSON, safetensors, tokenizer and template files, and a drafter's
card and license, which go along with what is made from it. A branch or tag is resolved to its commit once, and the
commit is what is read and recorded. Whether every shard that the index names has arrived is checked by whoever opens
the tensors (`quantize.tensor_directory`).

Messages are written here and never quote the hub's, which may carry URLs and headers: no token is ever shown.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.resources
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.hub.client import quiet_client, status_of

Role = Literal["target", "drafter"]

DEMO = "demo"
WANTED_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken", "recipe.yaml")
CARD_FILES = ("README.md", "LICENSE*", "NOTICE*")
UNWANTED_FILES = ("original/*", "onnx/*", "consolidated*")
_HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CACHED_REPOSITORY = re.compile(r"models--(?P<organisation>.+?)--(?P<name>.+)")


@dataclass(frozen=True)
class ResolvedModel:
    """A model on this machine.

    path: its directory. name: for reports (`demo`, the directory's name, or `org/name`). revision: the commit where the
    directory came from the hub, else None.
    """

    path: Path
    name: str
    revision: str | None


def resolve(name: str, role: Role, *, local_files_only: bool = False) -> ResolvedModel:
    """The directory that `name` stands for, downloaded if need be.

    Args:
        name: `demo`, a directory, or `org/name` with an optional `@revision` (branch, tag or commit).
        role: which half of the embedded pair `demo` means; also used in messages.
        local_files_only: take a hub model from the cache only.

    Raises:
        Exl3DflashError: no such directory or repository, no access, no network and no copy, an interrupted download.
    """
    if name == DEMO:
        return _demo(role)
    path = Path(name).expanduser()
    if path.exists():
        return _local(path, role)
    found = _HUB_ID.fullmatch(name)
    if found is None:
        raise Exl3DflashError(
            f"{role} {name!r} is neither a directory nor a Hugging Face id",
            expected="an existing directory, org/name, org/name@revision, or demo",
            fix="check the spelling of the path",
        )
    path = _download(name, found["repo"], found["revision"], role, local_files_only)
    commit = path.name if _COMMIT.fullmatch(path.name) else None
    if role == "drafter" and commit is not None:
        _download_card_files(found["repo"], commit, local_files_only)
    return ResolvedModel(_with_config(path, role), found["repo"], commit)


def split_name(name: str) -> tuple[str, str | None]:
    """`org/name[@revision]` as repository and revision.

    Raises:
        Exl3DflashError: it is not a Hugging Face id.
    """
    found = _HUB_ID.fullmatch(name)
    if found is None:
        raise Exl3DflashError(
            f"{name!r} is not the name of a Hugging Face repository", "org/name or org/name@branch", "check the name"
        )
    return found["repo"], found["revision"]


def is_hub_id(name: str) -> bool:
    """Whether a name is `org/name`, without a revision."""
    found = _HUB_ID.fullmatch(name)
    return found is not None and found["revision"] is None


def download_card(repository: str, revision: str | None) -> Path:
    """The card of a repository on the Hub, as a file in the cache.

    Raises:
        Exl3DflashError: it has none, or it cannot be had; one line each as for `resolve`.
    """
    from huggingface_hub import errors, hf_hub_download

    try:
        with quiet_client():
            return Path(hf_hub_download(repository, "README.md", revision=revision))
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise _explained(repository, repository, "drafter", error) from None
        raise Exl3DflashError(f"{repository} has no card", "a README.md in the repository", "give --license") from None
    except Exception as error:
        raise _explained(repository, repository, "drafter", error) from None


def _demo(role: Role) -> ResolvedModel:
    path = Path(str(importlib.resources.files("exl3_dflash") / DEMO / role))
    if not (path / "config.json").is_file():
        raise Exl3DflashError(
            f"the embedded demo {role} is not part of this installation",
            expected=f"a directory at {path}",
            fix="install exl3-dflash again from its wheel",
        )
    return ResolvedModel(path, f"{DEMO}-{role}", None)


def _local(path: Path, role: Role) -> ResolvedModel:
    if not path.is_dir():
        raise Exl3DflashError(
            f"{role} {path} is a file", "the directory that holds config.json and the weights", f"give {path.parent}"
        )
    resolved = path.resolve()
    if resolved.parent.name != "snapshots" or not _COMMIT.fullmatch(resolved.name):
        return ResolvedModel(_with_config(path, role), resolved.name, None)
    cached = _CACHED_REPOSITORY.fullmatch(resolved.parent.parent.name)
    name = f"{cached['organisation']}/{cached['name']}" if cached else resolved.name
    return ResolvedModel(_with_config(path, role), name, resolved.name)


def _with_config(path: Path, role: Role) -> Path:
    if not (path / "config.json").is_file():
        raise Exl3DflashError(
            f"{role} {path} has no config.json",
            expected="a Hugging Face model directory (config.json and safetensors files)",
            fix="give the directory that holds the model's files",
        )
    return path


def _download(name: str, repo: str, revision: str | None, role: Role, local_files_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    try:
        with quiet_client():
            return Path(
                snapshot_download(
                    repo,
                    revision=revision,
                    allow_patterns=list(WANTED_FILES),
                    ignore_patterns=list(UNWANTED_FILES),
                    local_files_only=local_files_only,
                )
            )
    except Exception as error:  # the hub's client, its HTTP library and the disk each have their own exceptions
        raise _explained(name, repo, role, error) from None


def _download_card_files(repo: str, commit: str, local_files_only: bool) -> None:
    """Fetch the card and license files of a downloaded drafter, if they can be had: nothing depends on them here."""
    from huggingface_hub import snapshot_download

    with contextlib.suppress(Exception), quiet_client():
        snapshot_download(repo, revision=commit, allow_patterns=list(CARD_FILES), local_files_only=local_files_only)


def _explained(name: str, repo: str, role: Role, error: Exception) -> Exl3DflashError:
    """One clear line for whatever a download raised."""
    status = status_of(error)
    text, expected, fix = _explanation(error, status)
    return Exl3DflashError(f"{role} {name}: {text}", expected, fix.format(repo=repo))


def _explanation(error: Exception, status: int | None) -> tuple[str, str, str]:
    """What is wrong, what was expected, and the fix ({repo} is filled in)."""
    from huggingface_hub import errors

    restricted = isinstance(error, errors.GatedRepoError)
    if not isinstance(error, errors.RepositoryNotFoundError):  # an unknown repository answers 401, too
        restricted = status in (401, 403)
    if restricted:
        return (
            "access to this Hugging Face repository is restricted",
            "an account that was granted access",
            "accept its conditions at https://huggingface.co/{repo}, then run: hf auth login",
        )
    if status == 429:
        return "the Hub's rate limit is reached", "fewer requests", "wait, then run the command again to continue"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full", "room for the model in the Hugging Face cache", "free some, or set HF_HOME"
    known = (
        (
            errors.RepositoryNotFoundError,
            "no local directory and no such Hugging Face repository (or a private one)",
            "an existing directory, org/name, or demo",
            "check the spelling, or run: hf auth login",
        ),
        (
            errors.RevisionNotFoundError,
            "the repository has no such revision",
            "a branch, tag or commit",
            "check the part after @",
        ),
        (
            (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled),
            "no local directory, not in the Hugging Face cache, and the hub cannot be reached",
            "a network connection, or a complete copy in the cache",
            "go online (unset HF_HUB_OFFLINE), or give a local directory",
        ),
        (errors.HFValidationError, "not a valid Hugging Face id", "org/name", "check the spelling"),
    )
    for kind, text, expected, fix in known:
        if isinstance(error, kind):
            return text, expected, fix
    detail = f"{type(error).__name__}{f', status {status}' if status else ''}"
    return f"the download was interrupted ({detail})", "a complete download", "run the command again to continue"

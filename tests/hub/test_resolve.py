"""Names to directories: every spelling, every way a download can fail, and that no token reaches a message."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.hub import resolve as resolve_module
from exl3_dflash.hub.resolve import ResolvedModel, resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_SecretSecretSecret"


class FakeResponse:
    """Enough of an HTTP response for the hub's exceptions."""

    def __init__(self, status_code: int) -> None:
        self.status_code = status_code
        self.headers: dict[str, str] = {"authorization": f"Bearer {TOKEN}"}
        self.request = None


def hub_error(kind: type[Exception], status: int | None = None) -> Exception:
    """One of the hub's exceptions, with a message that holds a token."""
    error = kind.__new__(kind)
    Exception.__init__(error, f"request failed, Authorization: Bearer {TOKEN}")
    if status is not None:
        error.response = FakeResponse(status)  # type: ignore[attr-defined]
    return error


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "my-model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


def fail_with(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def download(*inputs: Any, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)


def test_a_directory_is_itself(model_directory: Path) -> None:
    assert resolve(str(model_directory), "target") == ResolvedModel(model_directory, "my-model", None)


def test_a_relative_directory_wins_over_a_hub_id(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model_directory.parent.parent)
    fail_with(monkeypatch, AssertionError("no download"))
    assert resolve(f"{model_directory.parent.name}/my-model", "drafter").name == "my-model"


def test_demo_is_the_embedded_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo" / "drafter").mkdir(parents=True)
    (tmp_path / "demo" / "drafter" / "config.json").write_text("{}")
    monkeypatch.setattr(resolve_module.importlib.resources, "files", lambda package: tmp_path)
    assert resolve("demo", "drafter") == ResolvedModel(tmp_path / "demo" / "drafter", "demo-drafter", None)
    with pytest.raises(Exl3DflashError, match="demo target is not part of this installation"):
        resolve("demo", "target")


def test_a_hub_id_is_downloaded_and_its_commit_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    asked: dict[str, Any] = {}

    def download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("some-org/Some.Model_1@v1.0/x", "target") == ResolvedModel(snapshot, "some-org/Some.Model_1", COMMIT)
    assert asked["repo"] == "some-org/Some.Model_1"
    assert asked["revision"] == "v1.0/x"
    assert not any(pattern.endswith((".bin", ".pth", ".gguf")) for pattern in asked["allow_patterns"])
    assert resolve(str(snapshot), "target").revision == COMMIT


@pytest.mark.parametrize(
    "name", ["nowhere", "/no/such/dir", "a/b/c", "https://huggingface.co/a/b", "org/", "a/b@", "two words"]
)
def test_neither_a_directory_nor_an_id(name: str) -> None:
    with pytest.raises(Exl3DflashError, match="neither a directory nor a Hugging Face id"):
        resolve(name, "target")


def test_a_file_or_a_directory_without_config(model_directory: Path) -> None:
    with pytest.raises(Exl3DflashError, match=r"config\.json is a file.*fix: give "):
        resolve(str(model_directory / "config.json"), "target")
    (model_directory / "config.json").unlink()
    with pytest.raises(Exl3DflashError, match=r"drafter .*has no config\.json"):
        resolve(str(model_directory), "drafter")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_error(errors.GatedRepoError, 403), "restricted.*huggingface.co/org/name, then run: hf auth login"),
        (hub_error(errors.HfHubHTTPError, 401), "restricted"),
        (hub_error(errors.HfHubHTTPError, 403), "restricted"),
        (hub_error(errors.RepositoryNotFoundError, 401), "no such Hugging Face repository"),
        (hub_error(errors.RevisionNotFoundError, 404), "no such revision"),
        (hub_error(errors.LocalEntryNotFoundError), "hub cannot be reached"),
        (hub_error(errors.OfflineModeIsEnabled), "hub cannot be reached"),
        (hub_error(errors.HFValidationError), "not a valid Hugging Face id"),
        (OSError(errno.ENOSPC, "No space left"), "disk is full"),
        (hub_error(errors.HfHubHTTPError, 500), "interrupted .HfHubHTTPError, status 500.*run the command again"),
        (ConnectionResetError(TOKEN), "interrupted .ConnectionResetError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_every_failed_download_is_one_clear_line(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_with(monkeypatch, error)
    with pytest.raises(Exl3DflashError, match=message) as raised:
        resolve("org/name", "drafter")
    assert str(raised.value).startswith("drafter org/name: ")
    assert TOKEN not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_offline_without_a_copy_really_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(Exl3DflashError, match="hub cannot be reached"):
        resolve("some-org/never-downloaded", "target", local_files_only=True)

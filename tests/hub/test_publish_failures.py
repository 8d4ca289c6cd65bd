"""What the Hub refuses, or breaks off: one clear line, the state left behind, and a rerun that finishes."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub.conftest import TOKEN, Run
from tests.hub.stub_hub import StubHub
from tests.hub.test_publish import FILES, local_files

REPOSITORY = "me/tiny-exl3"


def refused(run: Run, *arguments: object) -> str:
    """The one line that a failing command ends with."""
    code, stdout, stderr = run(*arguments)
    assert code == 1
    assert stdout == ""
    line = stderr.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert "Traceback" not in stderr
    assert "http://127.0.0.1" not in stderr
    return line


def finishes(hub: StubHub, run: Run, directory: Path) -> None:
    """The same command again ends in the state that a run without failure has."""
    code, _, stderr = run("publish", directory, REPOSITORY)
    assert code == 0, stderr
    files = hub.files(REPOSITORY)
    files.pop(".gitattributes", None)
    assert files == local_files(directory)


@pytest.mark.parametrize(
    ("pattern", "status", "message", "said"),
    [
        ("PUT /lfs/", 403, "Request has expired", "the storage refused the upload of a file"),
        ("PUT /lfs/", 500, "try later", "status 500"),
        ("lfs/objects/batch", 403, "Private repository storage limit reached", "storage quota of me is exhausted"),
        ("/commit/main", 403, "You have exceeded your storage quota", "storage quota of me is exhausted"),
        ("/commit/main", 409, "Another commit is in progress", "somebody else changes the repository"),
        ("/commit/main", 412, "A commit has happened since", "the branch changed in the meantime"),
        ("/commit/main", 500, "Internal error", "status 500"),
        ("/commit/main", 429, "Too many requests", "rate limit is reached, for another 37 seconds; .*run the same"),
        ("/preupload/main", 429, "Too many requests", "rate limit is reached, for another 37 seconds; .*run the same"),
        ("/tree/main", 500, "Internal error", "status 500"),
    ],
)
def test_a_broken_upload_is_continued(
    hub: StubHub, drafters: tuple[Path, Path], run: Run, pattern: str, status: int, message: str, said: str
) -> None:
    hub.fail(pattern, status, message, times=6, Retry_After="37")
    line = refused(run, "publish", drafters[0], REPOSITORY)
    assert re.search(said, line), line
    assert not FILES & hub.files(REPOSITORY).keys()
    uploads_before = len(hub.uploads)
    hub.faults.clear()
    finishes(hub, run, drafters[0])
    assert len(hub.uploads) == max(uploads_before, 1)  # weights that had arrived were not sent again


def test_a_short_rate_limit_is_waited_for(hub: StubHub, drafters: tuple[Path, Path], run: Run) -> None:
    hub.fail("/preupload/main", 429, times=2, RateLimit='"api";r=0;t=3')
    finishes(hub, run, drafters[0])


def test_a_family_is_continued_where_it_stopped(hub: StubHub, drafters: tuple[Path, Path], run: Run) -> None:
    hub.fail("/commit/2.00bpw", 500)
    refused(run, "publish", *drafters, REPOSITORY)
    assert hub.files(REPOSITORY, "4.00bpw").keys() >= FILES
    assert not FILES & hub.files(REPOSITORY, "2.00bpw").keys()
    done = hub.repositories[REPOSITORY].branches["4.00bpw"]
    code, _, stderr = run("publish", *drafters, REPOSITORY)
    assert code == 0, stderr
    assert hub.repositories[REPOSITORY].branches["4.00bpw"] == done
    assert hub.files(REPOSITORY, "2.00bpw").keys() >= FILES
    assert "README.md" in hub.files(REPOSITORY)


def test_a_file_that_arrived_damaged_is_noticed(hub: StubHub, drafters: tuple[Path, Path], run: Run) -> None:
    hub.objects[hashlib.sha256((drafters[0] / "model.safetensors").read_bytes()).hexdigest()] = b"short"
    line = refused(run, "publish", drafters[0], REPOSITORY)
    assert "model.safetensors has 5 bytes" in line


@pytest.mark.parametrize("token", [None, "hf_wrongWrongWrongWrongWrongWrong00", "hf_with a newline\nInjected: 1"])
def test_no_or_a_wrong_token(
    hub: StubHub, drafters: tuple[Path, Path], run: Run, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nonexistent")
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    line = refused(run, "publish", drafters[0], REPOSITORY)
    assert "the token was not accepted" in line
    assert token is None or token not in line
    assert "Injected" not in line
    assert hub.repositories == {}


def test_a_token_that_only_reads_or_another_owner(hub: StubHub, drafters: tuple[Path, Path], run: Run) -> None:
    assert "me is not a member of them" in refused(run, "publish", drafters[0], "them/tiny")
    assert "me can only read in readers" in refused(run, "publish", drafters[0], "readers/tiny")
    hub.role = "read"
    assert "can only read" in refused(run, "publish", drafters[0], REPOSITORY)
    assert hub.repositories == {}


def test_creation_can_be_refused(hub: StubHub, drafters: tuple[Path, Path], run: Run) -> None:
    hub.fail("/api/repos/create", 403, "You don't have the rights to create a model here")
    assert "could not be created: this token may not write" in refused(run, "publish", drafters[0], REPOSITORY)
    hub.fail("/branch/", 403, "Forbidden")
    assert "the branch x could not be created" in refused(run, "publish", drafters[0], REPOSITORY, "--branch", "x")


def test_a_public_repository_does_not_become_private_by_wish(
    hub: StubHub, drafters: tuple[Path, Path], run: Run
) -> None:
    hub.add(REPOSITORY, {".gitattributes": b""})
    assert "exists and is public" in refused(run, "publish", drafters[0], REPOSITORY, "--private")
    assert hub.uploads == []


def test_an_existing_repository_and_branch_are_no_conflict(hub: StubHub, drafters: tuple[Path, Path], run: Run) -> None:
    hub.add(REPOSITORY, {".gitattributes": b""})
    hub.add(REPOSITORY, {".gitattributes": b""}, branch="4.00bpw")
    code, _, stderr = run("publish", drafters[0], f"{REPOSITORY}@4.00bpw")
    assert code == 0, stderr
    assert "POST /api/repos/create" in hub.requests  # answered with 409, twice


def test_a_license_the_hub_does_not_know_stops_before_anything_is_made(
    hub: StubHub, drafters: tuple[Path, Path], run: Run
) -> None:
    card = drafters[0] / "README.md"
    card.write_text(card.read_text().replace("license: apache-2.0", "license: my-license"))
    line = refused(run, "publish", drafters[0], REPOSITORY)
    assert "the Hub refuses the license of the card for main" in line
    assert hub.repositories == {}
    assert hub.uploads == []


def test_no_network(hub: StubHub, drafters: tuple[Path, Path], run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be reached" in refused(run, "publish", drafters[0], REPOSITORY)


def test_debugging_shows_no_token_either(
    hub: StubHub, drafters: tuple[Path, Path], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXL3_DFLASH_DEBUG", "1")
    hub.fail("PUT /lfs/", 403, "expired")
    code, _, stderr = run("publish", drafters[0], REPOSITORY)
    assert code == 1
    assert "Traceback" in stderr


def test_the_program_itself_through_hf_endpoint(hub: StubHub, drafters: tuple[Path, Path], tmp_path: Path) -> None:
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_HOME": str(tmp_path / "home"), "EXL3_DFLASH_DEBUG": "1", "HF_HUB_VERBOSITY": "debug"}

    def program(*arguments: object) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "exl3_dflash", *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert TOKEN not in done.stdout + done.stderr
        assert "secret-signature" not in done.stdout + done.stderr
        return done.returncode, done.stdout, done.stderr

    hub.fail("PUT /lfs/", 403, "expired")
    code, _, stderr = program("publish", drafters[0], REPOSITORY)
    assert code == 1
    assert stderr.strip().splitlines()[-1].startswith("error: the upload to me/tiny-exl3, main stopped")
    code, stdout, stderr = program("publish", drafters[0], REPOSITORY)
    assert code == 0, stderr
    assert stdout.strip() == f"{hub.url}/{REPOSITORY}"
    code, stdout, stderr = program("inspect", REPOSITORY, "--no-tensors")
    assert code == 0, stderr
    assert f"{REPOSITORY} at {hub.repositories[REPOSITORY].branches['main']}" in stdout

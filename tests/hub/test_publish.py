"""`exl3-dflash publish` against the stub Hub: what is there afterwards, and that running it again changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import ModelCard

from exl3_dflash.hub.resolve import resolve
from exl3_dflash.inspection import inspect_model
from tests.hub.conftest import Run
from tests.hub.stub_hub import StubHub

FILES = {
    "LICENSE", "README.md", "config.json", "model.safetensors", "quantization_config.json", "quantize_report.json",
    "recipe.yaml",
}  # fmt: skip


def local_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_drafter_arrives_whole(hub: StubHub, drafters: tuple[Path, Path], run: Run) -> None:
    code, stdout, stderr = run("publish", drafters[0], "me/tiny-exl3", "--private", "-m", "First")
    assert code == 0, stderr
    assert stdout.strip() == f"{hub.url}/me/tiny-exl3"
    assert hub.repositories["me/tiny-exl3"].private
    files = hub.files("me/tiny-exl3")
    assert files.pop(".gitattributes")
    assert files == local_files(drafters[0])
    assert set(files) == FILES
    assert len(hub.uploads) == 1  # the weights went through LFS


def test_a_branch_is_created_and_main_left_alone(hub: StubHub, drafters: tuple[Path, Path], run: Run) -> None:
    for name in (("me/tiny-exl3", "--branch", "4.00bpw"), ("me/tiny-exl3@4.00bpw",)):
        code, stdout, stderr = run("publish", drafters[0], *name)
        assert code == 0, stderr
        assert stdout.strip() == f"{hub.url}/me/tiny-exl3/tree/4.00bpw"
    assert set(hub.files("me/tiny-exl3", "4.00bpw")) == FILES | {".gitattributes"}
    assert set(hub.files("me/tiny-exl3")) == {".gitattributes"}


def test_running_it_again_sends_nothing(hub: StubHub, drafters: tuple[Path, Path], run: Run) -> None:
    assert run("publish", drafters[0], "team/tiny")[0] == 0
    before = dict(hub.repositories["team/tiny"].commits)
    code, stdout, stderr = run("publish", drafters[0], "team/tiny", "--json")
    assert code == 0, stderr
    result = json.loads(stdout)
    assert [upload["sent"] for upload in result["uploads"]] == [False]
    assert hub.repositories["team/tiny"].commits == before
    assert len(hub.uploads) == 1


def test_new_weights_replace_stale_ones(hub: StubHub, drafters: tuple[Path, Path], run: Run) -> None:
    """ExLlamaV3 loads every safetensors file in a folder: one that is left over breaks the drafter."""
    stale = {"model-00001-of-00002.safetensors": b"old", "model.safetensors.index.json": b"{}", "notes.txt": b"mine"}
    hub.add("me/tiny-exl3", stale)
    code, _, stderr = run("publish", drafters[0], "me/tiny-exl3")
    assert code == 0, stderr
    assert set(hub.files("me/tiny-exl3")) == FILES | {"notes.txt"}
    assert "main also holds notes.txt" in stderr


def test_a_family_has_a_branch_each_and_a_card_on_main(hub: StubHub, drafters: tuple[Path, Path], run: Run) -> None:
    for _ in range(2):
        code, stdout, stderr = run("publish", *drafters, "me/tiny-exl3")
        assert code == 0, stderr
        assert stdout.strip() == f"{hub.url}/me/tiny-exl3"
    repository = hub.repositories["me/tiny-exl3"]
    assert set(repository.branches) == {"main", "4.00bpw", "2.00bpw"}
    for directory, branch in zip(drafters, ("4.00bpw", "2.00bpw"), strict=True):
        files = hub.files("me/tiny-exl3", branch)
        assert {name: files[name] for name in FILES} == local_files(directory)
    card = ModelCard(hub.files("me/tiny-exl3")["README.md"].decode())
    assert card.data.license == "apache-2.0"
    assert "https://huggingface.co/me/tiny-exl3/tree/4.00bpw" in card.text
    assert "https://huggingface.co/me/tiny-exl3/tree/2.00bpw" in card.text
    assert "# Tiny drafter" in card.text
    assert len(repository.commits) == 1 + 2 + 3  # creation, two branches, three uploads: the rerun added nothing


def test_what_was_published_can_be_used_by_name(hub: StubHub, drafters: tuple[Path, Path], run: Run) -> None:
    assert run("publish", *drafters, "me/tiny-exl3")[0] == 0
    model = resolve("me/tiny-exl3@2.00bpw", "drafter")
    assert model.revision == hub.repositories["me/tiny-exl3"].branches["2.00bpw"]
    assert local_files(model.path) == local_files(drafters[1])
    assert inspect_model(model).bpw == json.loads((drafters[1] / "quantize_report.json").read_text())["bpw"]


def test_a_pull_request_is_opened_once(hub: StubHub, drafters: tuple[Path, Path], run: Run) -> None:
    hub.add("them/tiny", {"README.md": b"# theirs\n"})
    for expected in (f"{hub.url}/them/tiny/discussions/1", f"{hub.url}/them/tiny/tree/refs/pr/1"):
        code, stdout, stderr = run("publish", drafters[0], "them/tiny", "--pr", "-m", "EXL3")
        assert code == 0, stderr
        assert stdout.strip() == expected
    assert [one["title"] for one in hub.repositories["them/tiny"].pull_requests] == ["EXL3"]
    assert set(hub.files("them/tiny", "refs/pr/1")) == FILES
    assert hub.files("them/tiny") == {"README.md": b"# theirs\n"}


def test_dry_run_is_exact_and_offline(hub: StubHub, drafters: tuple[Path, Path], run: Run, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, stdout, stderr = run("publish", *drafters, "me/tiny-exl3", "--dry-run", "--json")
    assert code == 0, stderr
    assert hub.requests == []
    planned = json.loads(stdout)
    assert planned["dry_run"] is True
    assert run("publish", *drafters, "me/tiny-exl3", "--dry-run")[1].startswith("create the public model repository")

    assert run("publish", *drafters, "me/tiny-exl3")[0] == 0
    for upload in planned["uploads"]:
        files = hub.files("me/tiny-exl3", upload["branch"])
        for file in upload["files"]:
            assert len(files[file["path"]]) == file["size"]
        assert set(files) - {".gitattributes"} == {file["path"] for file in upload["files"]}


def test_text_that_was_added_to_the_published_card_is_not_lost(
    hub: StubHub, drafters: tuple[Path, Path], run: Run
) -> None:
    assert run("publish", drafters[0], "me/tiny-exl3")[0] == 0
    files = hub.files("me/tiny-exl3")
    added = files["README.md"].replace(b"<!-- exl3-dflash:keep -->", b"<!-- exl3-dflash:keep -->\nThanks to Ada.")
    hub.add("me/tiny-exl3", {**files, "README.md": added})
    code, _, stderr = run("publish", drafters[0], "me/tiny-exl3")
    assert code == 1
    assert "has text between its markers that the new one lacks" in stderr
    assert b"Ada" in hub.files("me/tiny-exl3")["README.md"]

    (drafters[0] / "README.md").write_bytes(added)
    assert run("card", drafters[0], "--repo", "me/tiny-exl3")[0] == 0  # made again: the text stays
    assert run("publish", drafters[0], "me/tiny-exl3")[0] == 0
    assert b"Thanks to Ada." in hub.files("me/tiny-exl3")["README.md"]
